// The entries that a block of lanes attends, as a stream of tiles: up to kTile rows of a plane,
// found through index lists, ranges and page tables. Nothing that no lane sees is read.
#pragma once

#include "../common/decode.h"
#include "rows.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// Bytes of a row up to which only its start is looked up ahead.
constexpr int64_t kShortRow = 768;

constexpr int kPad = 16;  // kernels take rows in groups of at most this many

struct Tile {
  const PlaneParams* plane;
  int64_t chunk;
  int32_t first, last;  // rows outside [first, last) are zeros
  RowBits seen;         // bit n: some lane sees row n; the other rows are zeros
  RowBits seen_by_all;  // bit n: every lane sees row n
  int64_t base;         // entry of row 0, where the tile is cut from a range
  const char* k[kTile + kPad];
  const char* rope[kTile + kPad];
  const char* v[kTile + kPad];
  const char* scales[kTile];  // of the groups of seen rows, in formats that have them
  float k_scale[kTile];       // 1 in formats without scales of whole rows
  float v_scale[kTile];

  bool mixed() const { return seen != seen_by_all; }

  // Makes every row a row of zeros, those past the end for good.
  void init(const char* zeros) {
    for (int n = 0; n < kTile + kPad; ++n) k[n] = rope[n] = v[n] = zeros;
    for (int n = 0; n < kTile; ++n) k_scale[n] = v_scale[n] = 1;
  }
};

// Fetches the rows of the next tile, evenly between the products of this one: many lines at once
// would fill the buffers that the products' own reads need.
class Prefetcher {
 public:
  // Waits for the rows of a tile that nothing was fetched for. Prefetches of all of them at once
  // would partly be lost.
  void read(const Tile& tile) {
    open(&tile, 1);
    while (lines_ > 0) {
      *static_cast<const volatile char*>(at_ < row_end_ ? at_ : row_end_ - 1);
      advance();
    }
  }

  // All of the tile's rows (none without a tile), spread over `steps` calls of `step`.
  void open(const Tile* tile, int64_t steps) {
    lines_ = 0;
    if (!tile) return;
    const PlaneParams& plane = *tile->plane;
    parts_ = 0;
    int64_t bytes = 0;
    const auto add = [&](const char* const* rows, const PagedRows& of) {
      if (of.dim == 0) return;
      rows_[parts_] = rows;
      bytes_[parts_] = bytes_of(of.type, of.dim);
      bytes += round_up(bytes_[parts_++], kLine);
    };
    add(tile->k, plane.k);
    add(tile->v, plane.v);
    add(tile->rope, plane.rope);
    row_ = tile->first;
    end_ = tile->last;
    bytes *= end_ - row_;
    lines_ = (bytes + steps * kLine - 1) / (steps * kLine);
    stride_ = lines_ > 1 ? kLine : (bytes + steps - 1) / steps;
    open_row(0);
  }

  SPARSE_ATTN_INLINE void step() {
    for (int64_t i = 0; i < lines_; ++i) {
      prefetch_l1(at_);
      advance();
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  SPARSE_ATTN_INLINE void open_row(int part) {
    part_ = part;
    at_ = rows_[part][row_];
    row_end_ = at_ + bytes_[part];
    // Rows that do not start where lines do may end in one more.
    reach_ = row_end_ + reinterpret_cast<uintptr_t>(at_) % kLine;
  }

  SPARSE_ATTN_INLINE void advance() {
    at_ += stride_;
    if (at_ < reach_) return;
    if (part_ + 1 < parts_) return open_row(part_ + 1);
    if (++row_ < end_) return open_row(0);
    lines_ = 0;
  }

  const char* const* rows_[3];
  int64_t bytes_[3];
  int parts_ = 0, part_ = 0;
  int32_t row_ = 0, end_ = 0;
  const char *at_ = nullptr, *row_end_ = nullptr, *reach_ = nullptr;
  int64_t lines_ = 0, stride_ = kLine;  // of a step
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
    const auto add = [&](const EntryRange& run) {
      for (int64_t entry = run.low; entry < run.high; ++entry) {
        if (!pager_.find(entry, &places_[limit_])) return false;
        ++limit_;
      }
      return true;
    };
    failed_ = !visit_listed(*plane_, block_.row, index_head, begin, range_of(0), add);
  }

  bool fill_from_list(Tile* tile) {
    const int32_t count =
        limit_ - position_ < kTile ? static_cast<int32_t>(limit_ - position_) : kTile;
    start(tile, row_bits(0, count), row_bits(0, count));
    place(tile, 0, count, places_ + position_);
    position_ += count;
    return true;
  }

  // False if no lane sees any of the next kTile entries.
  bool fill_from_range(Tile* tile) {
    const RowBits seen_by_all = row_bits(every_.low - position_, every_.high - position_);
    RowBits seen = seen_by_all;
    for (int32_t r = 0; r < block_.rows && ~seen; ++r) {
      const EntryRange range = range_of(r);
      seen |= row_bits(range.low - position_, range.high - position_);
    }
    const int64_t base = position_;
    position_ += kTile;
    if (!seen) return false;
    start(tile, seen, seen_by_all);
    tile->base = base;
    for (int32_t n = tile->first; n < tile->last;) {
      if (!(seen >> n & 1)) {
        clear(tile, n++);
        continue;
      }
      Place first;
      if (!pager_.find(base + n, &first)) {
        failed_ = true;
        return false;
      }
      const RowBits unseen = ~(seen >> n);
      int64_t run = unseen ? first_of(unseen) : kTile;
      if (run > plane_->page_size - first.offset) run = plane_->page_size - first.offset;
      for (int32_t i = 0; i < run; ++i) places_[i] = {first.page, first.offset + i};
      place(tile, n, static_cast<int32_t>(run), places_);
      n += static_cast<int32_t>(run);
    }
    return true;
  }

  void start(Tile* tile, RowBits seen, RowBits seen_by_all) {
    tile->plane = plane_;
    tile->chunk = chunk_;
    tile->seen = seen;
    tile->seen_by_all = seen_by_all;
    tile->first = first_of(seen);
    tile->last = end_of(seen);
    for (int32_t n = 0; n < tile->first; ++n) clear(tile, n);
    for (int32_t n = tile->last; n < kTile; ++n) clear(tile, n);
  }

  void clear(Tile* tile, int32_t n) const {
    tile->k[n] = tile->rope[n] = tile->v[n] = zeros_;
    tile->k_scale[n] = tile->v_scale[n] = 1;
  }

  // Puts `count` entries into rows n and on.
  void place(Tile* tile, int32_t n, int32_t count, const Place* places) const {
    place_rows(plane_->k, count, places, tile->k + n);
    if (plane_->rope.dim > 0) place_rows(plane_->rope, count, places, tile->rope + n);
    if (plane_->v.dim > 0) place_rows(plane_->v, count, places, tile->v + n);
    if (plane_->group > 0) {
      place_rows(plane_->k_scale, count, places, tile->scales + n);
    } else if (plane_->k_scale.dim > 0) {
      place_scales(plane_->k_scale, count, places, tile->k_scale + n);
    }
    if (plane_->v_scale.dim > 0) place_scales(plane_->v_scale, count, places, tile->v_scale + n);
  }

  // Also fetches the ends of each row, of short ones, which rarely lie in two pages, the start.
  // That looks their pages up before the prefetches that follow, which would wait for the look-up
  // one by one.
  void place_rows(const PagedRows& rows, int32_t count, const Place* places,
                  const char** to) const {
    const char* data = rows.data + block_.kv_head * rows.head_stride;
    const int64_t last_byte = bytes_of(rows.type, rows.dim) - 1;
    for (int32_t i = 0; i < count; ++i) {
      const char* row =
          data + places[i].page * rows.page_stride + places[i].offset * rows.entry_stride;
      to[i] = row;
      prefetch_l1(row);
      if (last_byte > kShortRow) prefetch_l1(row + last_byte);
    }
  }

  void place_scales(const PagedRows& rows, int32_t count, const Place* places, float* to) const {
    const char* data = rows.data + block_.kv_head * rows.head_stride;
    for (int32_t i = 0; i < count; ++i) {
      to[i] = read_number(
          rows.type,
          data + places[i].page * rows.page_stride + places[i].offset * rows.entry_stride, 0);
    }
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
  Place places_[kChunk];       // of the chunk's list, or of a part of a tile of a range
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
