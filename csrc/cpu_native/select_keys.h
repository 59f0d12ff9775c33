// The keys of a tile in the type that is multiplied, and their scales.
#pragma once

#include "../common/decode.h"
#include "convert.h"
#include "micro.h"
#include "select_lanes.h"
#include "select_tiles.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

template <class Mode>
class SelectKeys {
 public:
  SelectKeys(const SelectParams& p, const SelectBlock& block, Carver* carver)
      : p_(p), block_(block), ld_(round_up(p.keys.k.dim + p.keys.rope.dim, kPanel)) {
    const bool converts = p.keys.k.type != Mode::kType || pools_keys(p);
    const bool whole_tile = pools_keys(p) || joins_heads(p);
    mask_ = whole_tile ? kTile - 1 : kKeys - 1;
    zeros_ = carver->take<char>(ld_ * 4);
    buffer_ = carver->take<Element>(converts ? (mask_ + 1) * ld_ : 0);
    sum_buffer_ = carver->take<double>(pools_keys(p) ? ld_ : 0);
    row_buffer_ = carver->take<float>(pools_keys(p) ? ld_ : 0);
  }

  void init() { memset(zeros_, 0, static_cast<size_t>(ld_) * 4); }

  // As many zeros as a key has elements.
  const char* zeros() const { return zeros_; }

  const char* const* rows() const { return rows_; }

  // What products with the keys are multiplied by, if `scales_rows`.
  const float* scales() const { return scales_; }
  bool scales_rows() const { return p_.keys.k_scale.dim > 0 && p_.keys.group == 0; }

  // Reads keys [from, to) of the tile; zeros stand for unseen ones.
  void read(const SelectTile& tile, int from, int to, int32_t key_head) {
    const PagedRows& k = p_.keys.k;
    for (int n = from; n < to; ++n) {
      rows_[n] = zeros_;
      scales_[n] = 1;
      if (!(tile.seen >> n & 1)) continue;
      rows_[n] = at(k, tile.place[n], key_head);
      if (k.type != Mode::kType) {
        Element* converted = buffer_ + (n & mask_) * ld_;
        convert(rows_[n], tile.place[n], key_head, converted);
        rows_[n] = reinterpret_cast<const char*>(converted);
      }
      if (scales_rows()) scales_[n] = scale_at(tile.place[n], key_head);
    }
  }

  // Reads the mean keys of a tile of units, over the entries that the block's only row sees. False
  // if an entry has no page.
  bool pool(const SelectTile& tile, const SelectTiles& tiles, int32_t key_head) {
    const EntryRange& entries = block_.row[0].entries;
    for (int n = tile.first; n < kTile; ++n) {
      rows_[n] = zeros_;
      scales_[n] = 1;
      if (!(tile.seen >> n & 1)) continue;
      const int64_t begin = tile.number[n] * p_.block, end = begin + p_.block;
      const int64_t low = begin > entries.low ? begin : entries.low;
      const int64_t high = end < entries.high ? end : entries.high;
      for (int32_t d = 0; d < p_.dim; ++d) sum_buffer_[d] = 0;
      for (int64_t entry = low; entry < high; ++entry) {
        Place place;
        if (!tiles.find(entry, &place)) return false;
        convert(at(p_.keys.k, place, key_head), place, key_head, row_buffer_);
        const double scale = scales_rows() ? scale_at(place, key_head) : 1.0f;
        for (int32_t d = 0; d < p_.dim; ++d) sum_buffer_[d] += row_buffer_[d] * scale;
      }
      if constexpr (Mode::kGroup == 1) {
        Element* mean = buffer_ + n * ld_;
        const double count = static_cast<double>(high - low);
        for (int32_t d = 0; d < p_.dim; ++d) mean[d] = static_cast<float>(sum_buffer_[d] / count);
        rows_[n] = reinterpret_cast<const char*>(mean);
      }
    }
    return true;
  }

 private:
  typedef typename Mode::Element Element;

  static const char* at(const PagedRows& rows, const Place& place, int64_t key_head) {
    return rows.data + place.page * rows.page_stride + place.offset * rows.entry_stride +
           key_head * rows.head_stride;
  }

  float scale_at(const Place& place, int64_t key_head) const {
    const PagedRows& scales = p_.keys.k_scale;
    return read_number(scales.type, at(scales, place, key_head), 0);
  }

  // A key, but for the scale of the row. Rows with elements apart have groups.
  template <class To>
  void convert(const char* row, const Place& place, int64_t key_head, To* to) const {
    const PlaneParams& keys = p_.keys;
    if (keys.group == 0) return convert_row(keys.k.type, row, keys.k.dim, to);
    const GroupScales scales(keys.k_scale.type, at(keys.k_scale, place, key_head),
                             keys.k_scale.dim);
    scale_row(keys.k.type, row, keys.k.dim, keys.group, scales, to);
    if (keys.rope.dim == 0) return;
    convert_row(keys.rope.type, at(keys.rope, place, 0), keys.rope.dim, to + keys.k.dim);
  }

  const SelectParams& p_;
  const SelectBlock& block_;
  const int64_t ld_;
  int mask_;  // rows of the buffer are used in turn
  char* zeros_;
  Element* buffer_;
  double* sum_buffer_;
  float* row_buffer_;
  const char* rows_[kTile];
  alignas(64) float scales_[kTile];
};

// Spreads fetches of a tile's keys over the products of the tile before.
class KeyPrefetcher {
 public:
  // No tile: nothing is fetched. `calls` of `step` are made.
  void open(const SelectParams& p, const Lanes& lanes, const SelectTile* tile, int64_t calls) {
    p_ = &p;
    lanes_ = &lanes;
    tile_ = tile;
    if (!tile) return;
    place_ = tile->first;
    places_ = (kTile + calls - 1) / calls;
  }

  void step() {
    if (!tile_) return;
    const PagedRows& k = p_->keys.k;
    const int64_t bytes = bytes_of(k.type, k.dim);
    for (int64_t i = 0; i < places_; ++i, ++place_) {
      if (place_ >= tile_->last) {
        tile_ = nullptr;
        return;
      }
      if (!(tile_->seen >> place_ & 1)) continue;
      const Place& place = tile_->place[place_];
      const char* entry = k.data + place.page * k.page_stride + place.offset * k.entry_stride;
      for (int32_t s = 0; s < lanes_->segments(); ++s) {
        const char* row = entry + lanes_->segment(s).key_head * k.head_stride;
        for (int64_t at = 0; at < bytes; at += 64) prefetch(row + at);
      }
    }
  }

 private:
  const SelectParams* p_ = nullptr;
  const Lanes* lanes_ = nullptr;
  const SelectTile* tile_ = nullptr;
  int place_ = 0;
  int64_t places_ = 0;
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
