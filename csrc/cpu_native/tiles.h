// The entries that a block of lanes attends, as a stream of tiles: up to kTile rows of a plane,
// found through index lists, ranges and page tables. Nothing that no lane sees is read.
#pragma once

#include "rows.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

constexpr int kPad = 16;  // kernels take rows in groups of at most this many

struct Tile {
  const PlaneParams* plane;
  int64_t chunk;
  int32_t first, last;   // rows outside [first, last) are zeros
  uint64_t seen;         // bit n: some lane sees row n; the other rows are zeros
  uint64_t seen_by_all;  // bit n: every lane sees row n
  int64_t base;          // entry of row 0, where the tile is cut from a range
  const char* k[kTile + kPad];
  const char* rope[kTile + kPad];
  const char* v[kTile + kPad];
  float k_scale[kTile];  // 1 in formats without scales
  float v_scale[kTile];

  bool mixed() const { return seen != seen_by_all; }

  // Makes every row a row of zeros, those past the end for good.
  void init(const char* zeros) {
    for (int n = 0; n < kTile + kPad; ++n) k[n] = rope[n] = v[n] = zeros;
    for (int n = 0; n < kTile; ++n) k_scale[n] = v_scale[n] = 1;
  }
};

class TileStream {
 public:
  // The tiles of chunks [begin, end) of `block`. `zeros` holds as many zero bytes as a row of any
  // plane.
  TileStream(const AttendParams& p, const Block& block, int64_t begin, int64_t end,
             const char* zeros)
      : p_(p), block_(block), zeros_(zeros), chunk_(begin), end_(end) {}

  // False after the last tile, and at an entry without a page.
  bool next(Tile* tile) {
    for (; chunk_ < end_ && !failed_; open_ = false, ++chunk_) {
      if (!open_) open();
      while (position_ < limit_ && !failed_) {
        if (plane_->listed ? fill_from_list(tile) : fill_from_range(tile)) return true;
      }
    }
    return false;
  }

  bool failed() const { return failed_; }

 private:
  // Starts a chunk. Then [position_, limit_) are its entries, or places in its list.
  void open() {
    open_ = true;
    const bool in_window = chunk_ < block_.chunks[0];
    plane_ = in_window ? &p_.window : &p_.main;
    pager_.open(*plane_, block_.sequence);
    const int64_t chunk = in_window ? block_.first_chunk[0] + chunk_
                                    : block_.first_chunk[1] + chunk_ - block_.chunks[0];
    if (plane_->listed) {
      position_ = limit_ = 0;
      list(chunk * kChunk, in_window ? 0 : block_.index_head);
    } else {
      position_ = chunk * kChunk;
      limit_ = position_ + kChunk;
      every_ = {0, INT64_MAX};
      for (int32_t r = 0; r < block_.rows; ++r) {
        const EntryRange range = range_of(r);
        if (range.low > every_.low) every_.low = range.low;
        if (range.high < every_.high) every_.high = range.high;
      }
    }
  }

  EntryRange range_of(int32_t r) const {
    return visible_range(*plane_, p_.causal, block_.row + r, block_.position + r,
                         p_.seq_lens[block_.sequence]);
  }

  // Lists the seen ones among kChunk entries of the index list, from place `begin` on.
  void list(int64_t begin, int32_t index_head) {
    const EntryRange range = range_of(0);
    int64_t end = listed_entries(*plane_, block_.row, index_head);
    if (end > begin + kChunk) end = begin + kChunk;
    const int64_t* strides = plane_->index_strides;
    const int32_t* indices = plane_->indices + block_.row * strides[0] + index_head * strides[1];
    const int64_t size = plane_->select_block;
    int64_t j = begin / size;
    for (int64_t place = begin, skipped = begin - j * size; place < end; ++j, skipped = 0) {
      const int64_t index = indices[j * strides[2]];
      int64_t low = index * size + skipped, high = index * size + size;
      if (high - low > end - place) high = low + end - place;
      place += high - low;
      if (index < 0) continue;
      if (low < range.low) low = range.low;
      if (high > range.high) high = range.high;
      for (int64_t entry = low; entry < high; ++entry) {
        if (!pager_.find(entry, &pages_[limit_], &offsets_[limit_])) {
          failed_ = true;
          return;
        }
        ++limit_;
      }
    }
  }

  bool fill_from_list(Tile* tile) {
    const int32_t count =
        limit_ - position_ < kTile ? static_cast<int32_t>(limit_ - position_) : kTile;
    start(tile, row_bits(0, count), row_bits(0, count));
    for (int32_t n = 0; n < count; ++n)
      place(tile, n, pages_[position_ + n], offsets_[position_ + n]);
    position_ += count;
    return true;
  }

  // False if no lane sees any of the next kTile entries.
  bool fill_from_range(Tile* tile) {
    const uint64_t seen_by_all = row_bits(every_.low - position_, every_.high - position_);
    uint64_t seen = seen_by_all;
    for (int32_t r = 0; r < block_.rows && ~seen; ++r) {
      const EntryRange range = range_of(r);
      seen |= row_bits(range.low - position_, range.high - position_);
    }
    const int64_t base = position_;
    position_ += kTile;
    if (!seen) return false;
    start(tile, seen, seen_by_all);
    tile->base = base;
    for (int32_t n = tile->first; n < tile->last; ++n) {
      if (!(seen >> n & 1)) {
        clear(tile, n);
        continue;
      }
      int32_t page, offset;
      if (!pager_.find(base + n, &page, &offset)) {
        failed_ = true;
        return false;
      }
      place(tile, n, page, offset);
    }
    return true;
  }

  void start(Tile* tile, uint64_t seen, uint64_t seen_by_all) {
    tile->plane = plane_;
    tile->chunk = chunk_;
    tile->seen = seen;
    tile->seen_by_all = seen_by_all;
    tile->first = __builtin_ctzll(seen);
    tile->last = 64 - __builtin_clzll(seen);
    for (int32_t n = 0; n < tile->first; ++n) clear(tile, n);
    for (int32_t n = tile->last; n < kTile; ++n) clear(tile, n);
  }

  void clear(Tile* tile, int32_t n) const {
    tile->k[n] = tile->rope[n] = tile->v[n] = zeros_;
    tile->k_scale[n] = tile->v_scale[n] = 1;
  }

  void place(Tile* tile, int32_t n, int64_t page, int64_t offset) {
    tile->k[n] = at(plane_->k, page, offset);
    if (plane_->rope.dim > 0) tile->rope[n] = at(plane_->rope, page, offset);
    tile->v[n] = plane_->v.dim > 0 ? at(plane_->v, page, offset) : tile->k[n];
    if (plane_->k_scale.dim > 0) tile->k_scale[n] = scale_at(plane_->k_scale, page, offset);
    if (plane_->v_scale.dim > 0) tile->v_scale[n] = scale_at(plane_->v_scale, page, offset);
  }

  // Also fetches the row's ends. That looks its pages up before the prefetches that follow, which
  // would wait for the look-up one by one.
  const char* at(const PagedRows& rows, int64_t page, int64_t offset) const {
    const char* row = rows.data + page * rows.page_stride + offset * rows.entry_stride +
                      block_.kv_head * rows.head_stride;
    prefetch(row);
    prefetch(row + rows.dim * element_bytes(rows.format) - 1);
    return row;
  }

  float scale_at(const PagedRows& rows, int64_t page, int64_t offset) const {
    uint16_t scale;
    memcpy(&scale, at(rows, page, offset), 2);
    return half_to_float(scale);
  }

  const AttendParams& p_;
  const Block& block_;
  const char* zeros_;
  int64_t chunk_, end_;
  bool open_ = false;
  bool failed_ = false;
  const PlaneParams* plane_ = nullptr;
  Pager pager_;
  int64_t position_ = 0, limit_ = 0;
  EntryRange every_ = {0, 0};  // what every row of the block sees
  int32_t pages_[kChunk], offsets_[kChunk];
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
