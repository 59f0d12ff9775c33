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

// Seen places [first, last) of a tile whose entries follow each other in one page.
struct PageRun {
  int first, last;
};

// From a multiple of kTile on.
struct SelectTile {
  int64_t base;
  bool follows;  // places before it, of the same queue, are those of the tile before
  RowBits seen;  // bit n: some row scores place n
  int first;     // a multiple of kKeys, up to the first seen place
  int last;      // follows the last one
  int64_t number[kTile];
  int runs;  // all seen places are in runs, in order
  PageRun run[kTile];
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

  // The tiles of the queue's places. Where keys lie is found if `paged`.
  void open(PlaceQueue* queue, bool paged) {
    queue_ = queue;
    places_ = {0, 0};
    base_ = 0;
    paged_ = paged;
    failed_ = false;
  }

  // The next tile that some row scores. False after the last one, and at an entry without a page.
  bool next(SelectTile* tile) {
    for (bool follows = true;; base_ += kTile) {
      if (base_ >= places_.high) {
        if (!take(queue_, &places_)) return false;
        follows = false;
        base_ = places_.low / kTile * kTile;
      }
      RowBits seen = 0;
      for (int32_t r = 0; r < block_.rows; ++r) {
        const EntryRange& places = block_.row[r].places;
        seen |= row_bits(places.low - base_, places.high - base_);
      }
      if (!seen) continue;
      tile->base = base_;
      tile->follows = follows;
      tile->seen = seen;
      tile->first = first_of(seen) / kKeys * kKeys;
      tile->last = end_of(seen);
      number_places(tile);
      base_ += kTile;
      failed_ = paged_ && !find_pages(tile);
      return !failed_;
    }
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

  // Also fetches the scales, and a line of each page of memory that keys lie in, which is looked up
  // so; the rest is fetched between products.
  bool find_pages(SelectTile* tile) const {
    const PagedRows &k = p_.keys.k, &scales = p_.keys.k_scale;
    tile->runs = 0;
    for (int n = first_of(tile->seen); n < tile->last;) {
      Place place;
      if (!pager_.find(tile->number[n], &place)) return false;
      const int last = end_of_run(*tile, n, p_.keys.page_size - place.offset);
      for (int i = n; i < last; ++i) tile->place[i] = {place.page, place.offset + i - n};
      follow(k, place, n, last, tile->key);
      if (scales.dim > 0) follow(scales, place, n, last, tile->scale);
      touch(k, kPage, k.data + key_head_ * k.head_stride, tile->key, n, last);
      if (scales.dim > 0) touch(scales, kLine, scales.data, tile->scale, n, last);
      tile->run[tile->runs++] = {n, last};
      const RowBits rest = last < kTile ? tile->seen >> last << last : 0;
      if (rest == 0) return true;
      n = first_of(rest);
    }
    return true;
  }

  // The end of the seen places from n on whose entries are `left` neighbours at most.
  int end_of_run(const SelectTile& tile, int n, int64_t left) const {
    const RowBits unseen = ~(tile.seen >> n);
    int64_t count = unseen ? first_of(unseen) : kTile;
    if (left < count) count = left;
    if (!block_.runs) return n + static_cast<int>(count);
    int last = n + 1;
    while (last < n + count && tile.number[last] == tile.number[last - 1] + 1) ++last;
    return last;
  }

  static void follow(const PagedRows& rows, const Place& place, int first, int last, int64_t* at) {
    int64_t offset = offset_of(rows, place);
    for (int i = first; i < last; ++i, offset += rows.entry_stride) at[i] = offset;
  }

  static constexpr int64_t kLine = 64, kPage = 4096;

  // Fetches a line of each `bytes` that the entries lie in.
  static void touch(const PagedRows& rows, int64_t bytes, const char* data, const int64_t* at,
                    int first, int last) {
    int64_t step = 1;
    while (step < kTile && 2 * step * rows.entry_stride <= bytes) step *= 2;
    for (int64_t i = first; i < last; i += step) prefetch(data + at[i]);
    prefetch(data + at[last - 1]);
  }

  const SelectParams& p_;
  const SelectBlock& block_;
  const int32_t key_head_;
  Pager pager_;
  PlaceQueue* queue_ = nullptr;
  EntryRange places_ = {0, 0};
  int64_t base_ = 0;  // places from base_ on are to come
  bool paged_ = true;
  bool failed_ = false;
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
