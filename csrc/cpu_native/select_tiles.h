// The places that a block's rows score, as a stream of tiles: up to kTile of them side by side, and
// where their keys lie.
#pragma once

#include "rows.h"
#include "select_schedule.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// Keys that are read and multiplied together: whole panels.
constexpr int kKeys = 32;
static_assert(kKeys % kPanel == 0 && kTile % kKeys == 0, "a tile is cut into whole panels");

// From a multiple of kTile on.
struct SelectTile {
  int64_t base;
  RowBits seen;  // bit n: some row scores place n
  int first;     // a multiple of kKeys, up to the first seen place
  int last;      // follows the last one
  int64_t number[kTile];
  Place place[kTile];
  int64_t key[kTile], scale[kTile];  // where the first key head's are, in bytes
};

inline int64_t offset_of(const PagedRows& rows, const Place& place) {
  return place.page * rows.page_stride + place.offset * rows.entry_stride;
}

class SelectTiles {
 public:
  // `key_head`: the first that is read.
  SelectTiles(const SelectParams& p, const SelectBlock& block, int32_t key_head)
      : p_(p), block_(block), key_head_(key_head) {
    pager_.open(p.keys, block.sequence);
  }

  // The tiles of chunks [begin, end). Where keys lie is found if `paged`.
  void open(int64_t begin, int64_t end, bool paged) {
    base_ = begin * kChunk;
    end_ = end * kChunk;
    paged_ = paged;
    failed_ = false;
  }

  // The next tile that some row scores. False after the last one, and at an entry without a page.
  bool next(SelectTile* tile) {
    for (; base_ < end_; base_ += kTile) {
      RowBits seen = 0;
      for (int32_t r = 0; r < block_.rows; ++r) {
        const EntryRange& places = block_.row[r].places;
        seen |= row_bits(places.low - base_, places.high - base_);
      }
      if (!seen) continue;
      tile->base = base_;
      tile->seen = seen;
      tile->first = first_of(seen) / kKeys * kKeys;
      tile->last = end_of(seen);
      number_places(tile);
      base_ += kTile;
      failed_ = paged_ && !find_pages(tile);
      return !failed_;
    }
    return false;
  }

  bool failed() const { return failed_; }

  bool find(int64_t entry, Place* place) const { return pager_.find(entry, place); }

 private:
  void number_places(SelectTile* tile) const {
    for (int n = 0; n < kTile; ++n) tile->number[n] = tile->base + n;
    if (!block_.runs) return;
    const Run* run = block_.runs;
    for (int64_t count = block_.run_count; count > 1;) {  // the last run that starts up to the base
      const int64_t half = count / 2;
      if (run[half].place <= tile->base) run += half;
      count -= half;
    }
    for (int n = 0; n < tile->last; ++n) {
      while (tile->base + n >= run->place + (run->high - run->low)) ++run;
      tile->number[n] = run->low + (tile->base + n - run->place);
    }
  }

  // Also fetches a line of each page of memory, which is looked up so; the rest is fetched between
  // products.
  bool find_pages(SelectTile* tile) const {
    const PagedRows &k = p_.keys.k, &scales = p_.keys.k_scale;
    const char* first_key = k.data + key_head_ * k.head_stride;
    const char *key_before = nullptr, *scale_before = nullptr;
    const auto touch = [](const char* at, const char** before) {
      constexpr int kPageBits = 12;
      if (reinterpret_cast<uintptr_t>(at) >> kPageBits ==
          reinterpret_cast<uintptr_t>(*before) >> kPageBits)
        return;
      prefetch(at);
      *before = at;
    };
    for (int n = tile->first; n < tile->last; ++n) {
      if (!(tile->seen >> n & 1)) continue;
      if (!pager_.find(tile->number[n], &tile->place[n])) return false;
      tile->key[n] = offset_of(k, tile->place[n]);
      touch(first_key + tile->key[n], &key_before);
      if (scales.dim == 0) continue;
      tile->scale[n] = offset_of(scales, tile->place[n]);
      touch(scales.data + tile->scale[n], &scale_before);
    }
    return true;
  }

  const SelectParams& p_;
  const SelectBlock& block_;
  const int32_t key_head_;
  Pager pager_;
  int64_t base_ = 0, end_ = 0;  // places from base_ on are to come
  bool paged_ = true;
  bool failed_ = false;
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
