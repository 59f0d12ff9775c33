// The keys of a tile in the type that is multiplied, and their scales.
#pragma once

#include "../common/decode.h"
#include "convert.h"
#include "micro.h"
#include "select_lanes.h"
#include "select_products.h"
#include "select_tiles.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

template <class Mode>
class SelectKeys {
 public:
  SelectKeys(const SelectParams& p, const SelectBlock& block, Carver* carver)
      : p_(p), block_(block), ld_(round_up(p.keys.k.dim + p.keys.rope.dim, 64)) {
    const bool copies = p.keys.k.type != Mode::kType || pools_keys(p) || Mode::kAmx;
    mask_ = pools_keys(p) ? kTile - 1 : kKeys - 1;
    zeros_ = carver->take<char>(ld_ * 4);
    buffer_ = carver->take<Element>(copies ? (mask_ + 1) * ld_ : 0);
    sum_buffer_ = carver->take<double>(pools_keys(p) ? ld_ : 0);
    row_buffer_ = carver->take<float>(pools_keys(p) ? ld_ : 0);
    group_scales_ = carver->take<float>(p.keys.group > 0 ? kKeys * p.keys.k_scale.dim : 0);
  }

  void init() {
    memset(zeros_, 0, static_cast<size_t>(ld_) * 4);
    if (Mode::kAmx && !fills_registers())
      memset(buffer_, 0, static_cast<size_t>(kKeys * ld_) * sizeof(Element));
  }

  // As many zeros as a key has elements.
  const char* zeros() const { return zeros_; }

  const char* const* rows() const { return rows_; }

  // Those that were read last, as tile registers take them.
  const KeyRows* registers() const { return registers_; }

  // What products with the keys are multiplied by, if `scales_rows`.
  const float* scales() const { return scales_; }
  bool scales_rows() const { return p_.keys.k_scale.dim > 0 && p_.keys.group == 0; }

  // Reads keys [from, from + kKeys) of the tile; zeros stand for unseen ones.
  void read(const SelectTile& tile, int from, int32_t key_head) {
    const PagedRows& k = p_.keys.k;
    const char* data = k.data + key_head * k.head_stride;
    const uint32_t seen = static_cast<uint32_t>(tile.seen >> from);
    static_assert(kKeys == 32, "a bit for each");
    if (seen == UINT32_MAX) {
      for (int i = 0; i < kKeys; ++i) rows_[from + i] = data + tile.key[from + i];
    } else {
      for (int i = 0; i < kKeys; ++i)
        rows_[from + i] = seen >> i & 1 ? data + tile.key[from + i] : zeros_;
    }
    if (scales_rows()) {
      read_scales(tile, from, seen, key_head);
    } else {
      for (int i = 0; i < kKeys; ++i) scales_[from + i] = 1;
    }
    if (k.type == Mode::kType) {
      if (Mode::kAmx) find_registers(tile, from, seen);
      return;
    }
    Element* converted = buffer_ + (from & mask_) * ld_;
    if (p_.keys.group == 0) convert_rows(k.type, rows_ + from, k.dim, converted);
    if (p_.keys.group > 0) read_group_scales(tile, from, seen, key_head);
    for (int i = 0; i < kKeys; ++i, converted += ld_) {
      if (!(seen >> i & 1)) continue;
      if constexpr (Mode::kGroup < 4) {
        if (p_.keys.group > 0) {
          const int32_t groups = p_.keys.k_scale.dim;
          const GroupScales scales(group_scales_ + i * groups, groups, p_.keys.group);
          scale(rows_[from + i], scales, tile.place[from + i], converted);
        }
      }
      rows_[from + i] = reinterpret_cast<const char*>(converted);
    }
    for (int i = 0; i < kKeys / kRegister; ++i) registers_[i] = in_buffer(i);
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
    return rows.data + offset_of(rows, place) + key_head * rows.head_stride;
  }

  void read_scales(const SelectTile& tile, int from, uint32_t seen, int32_t key_head) {
    const PagedRows& scales = p_.keys.k_scale;
    const char* data = scales.data + key_head * scales.head_stride;
    const auto read_type = [&](auto number) {
      const int64_t* const at = tile.scale + from;
      if (seen == UINT32_MAX) {
        int64_t apart = 0;  // each of them counts: pages in between may be any
        for (int i = 1; i < kKeys; ++i)
          apart |= at[i] - at[i - 1] - static_cast<int64_t>(sizeof(number));
        if (apart == 0) return convert_row(scales.type, data + at[0], kKeys, scales_ + from);
      }
      decltype(number) numbers[kKeys] = {};
      for (int i = 0; i < kKeys; ++i) {
        if (seen >> i & 1) memcpy(numbers + i, data + at[i], sizeof(number));
      }
      convert_row(scales.type, reinterpret_cast<const char*>(numbers), kKeys, scales_ + from);
    };
    switch (bytes_of(scales.type, 1)) {
      case 1:
        return read_type(uint8_t());
      case 2:
        return read_type(uint16_t());
      default:
        return read_type(uint32_t());
    }
  }

  // Whether keys consist of whole rows of registers.
  bool fills_registers() const { return p_.dim % (64 / static_cast<int>(sizeof(Element))) == 0; }

  KeyRows in_buffer(int i) const {
    const int64_t bytes = ld_ * static_cast<int64_t>(sizeof(Element));
    return {reinterpret_cast<const char*>(buffer_) + i * kRegister * bytes, bytes};
  }

  // Keys are read where they lie if they follow each other, else copied.
  void find_registers(const SelectTile& tile, int from, uint32_t seen) {
    const int64_t stride = p_.keys.k.entry_stride;
    for (int i = 0; i < kKeys / kRegister; ++i, from += kRegister, seen >>= kRegister) {
      bool apart = (seen & ((1u << kRegister) - 1)) != (1u << kRegister) - 1 || !fills_registers();
      for (int n = 0; n < kRegister && !apart; ++n)
        apart = tile.key[from + n] != tile.key[from] + n * stride;
      if (!apart) {
        registers_[i] = {rows_[from], stride};
        continue;
      }
      registers_[i] = in_buffer(i);
      Element* to = buffer_ + i * kRegister * ld_;
      for (int n = 0; n < kRegister; ++n, to += ld_)
        memcpy(to, rows_[from + n], static_cast<size_t>(p_.dim) * sizeof(Element));
    }
  }

  float scale_at(const Place& place, int64_t key_head) const {
    const PagedRows& scales = p_.keys.k_scale;
    return read_number(scales.type, at(scales, place, key_head), 0);
  }

  // kKeys rows without groups, but for their scales. Tables of a conversion are loaded once.
  template <class To>
  __attribute__((flatten)) void convert_rows(Number type, const char* const* rows, int32_t dim,
                                             To* to) const {
    with_type(type, [&](auto from) {
      for (int i = 0; i < kKeys; ++i) convert_row<from>(rows[i], dim, to + i * ld_);
    });
  }

#if defined(__AVX512VNNI__)
  void convert_rows(Number, const char* const*, int32_t, int8_t*) const {}  // never other numbers

  void convert_rows(Number, const char* const* rows, int32_t dim, uint8_t* to) const {
    const __m512i move = _mm512_set1_epi8(static_cast<char>(Int8::kMove));
    const int32_t whole = dim / 64 * 64;
    const __mmask64 rest = (uint64_t{1} << (dim - whole)) - 1;
    for (int i = 0; i < kKeys; ++i, to += ld_) {
      for (int32_t d = 0; d < whole; d += 64)
        _mm512_storeu_si512(to + d, _mm512_xor_si512(_mm512_loadu_si512(rows[i] + d), move));
      if (!rest) continue;
      const __m512i x = _mm512_maskz_loadu_epi8(rest, rows[i] + whole);
      _mm512_storeu_si512(to + whole, _mm512_xor_si512(x, move));
    }
  }
#endif

  void read_group_scales(const SelectTile& tile, int from, uint32_t seen, int32_t key_head) {
    const PagedRows& scales = p_.keys.k_scale;
    const char* data = scales.data + key_head * scales.head_stride;
    const int64_t bytes = bytes_of(scales.type, scales.dim);
    char numbers[kKeys * kMaxGroups * 4];
    const auto gather = [&](int64_t size) {
      for (int i = 0; i < kKeys; ++i) {
        char* to = numbers + i * size;
        seen >> i & 1 ? memcpy(to, data + tile.scale[from + i], static_cast<size_t>(size))
                      : memset(to, 0, static_cast<size_t>(size));
      }
    };
    bytes == 4 ? gather(4) : gather(bytes);
    convert_row(scales.type, numbers, kKeys * scales.dim, group_scales_);
  }

  // A key, but for the scale of the row. Rows with elements apart have groups.
  void convert(const char* row, const Place& place, int64_t key_head, float* to) const {
    const PlaneParams& keys = p_.keys;
    if (keys.group == 0) return convert_row(keys.k.type, row, keys.k.dim, to);
    const GroupScales scales(keys.k_scale.type, at(keys.k_scale, place, key_head), keys.k_scale.dim,
                             keys.group);
    scale(row, scales, place, to);
  }

  template <class To>
  void scale(const char* row, const GroupScales& scales, const Place& place, To* to) const {
    const PlaneParams& keys = p_.keys;
    scale_row(keys.k.type, row, keys.k.dim, scales, to);
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
  float* group_scales_;  // [kKeys][groups]
  KeyRows registers_[kKeys / kRegister];
  const char* rows_[kTile];
  alignas(64) float scales_[kTile];
};

// Fetches the keys of the next tile, a few lines at a time between the products of this one: more
// at once would fill the buffers that the products' own reads need.
class KeyFetcher {
 public:
  // All segments' keys of a tile, spread over `steps` steps. No tile: nothing is fetched.
  void open(const SelectParams& p, const Lanes& lanes, const SelectTile* tile, int64_t steps) {
    lines_ = 0;
    if (!tile) return;
    tile_ = tile;
    lanes_ = &lanes;
    rows_ = &p.keys.k;
    bytes_ = bytes_of(rows_->type, rows_->dim);
    const bool adjacent = rows_->head_stride == bytes_;
    const int32_t heads = lanes.segment(lanes.segments() - 1).key_head - first_head() + 1;
    runs_ = adjacent ? 1 : lanes.segments();
    if (adjacent) bytes_ *= heads;
    by_page_ = adjacent && rows_->entry_stride == bytes_;
    const int64_t lines = (bytes_ + kLine - 1) / kLine * runs_ * (tile->last - tile->first);
    place_ = first_of(tile->seen);
    run_ = 0;
    open_run();
    lines_ = (lines + steps - 1) / steps;
  }

  SPARSE_ATTN_INLINE void step() {
    if (end_ - at_ > lines_ * kLine) {
      const char* at = at_;
      at_ += lines_ * kLine;
      for (; at != at_; at += kLine) prefetch(at);
      return;
    }
    for (int64_t i = 0; i < lines_; ++i) {
      prefetch(at_);
      at_ += kLine;
      if (at_ >= end_) next_run();
    }
  }

  // All that is left.
  void finish() {
    while (lines_ > 0) step();
  }

 private:
  static constexpr int64_t kLine = 64;

  int32_t first_head() const { return lanes_->segment(0).key_head; }

  void open_run() {
    if (by_page_) {
      const PageRun& run = tile_->run[run_];
      at_ = rows_->data + tile_->key[run.first] + first_head() * rows_->head_stride;
      end_ = at_ + (run.last - run.first) * bytes_;
      return;
    }
    at_ = rows_->data + tile_->key[place_] + lanes_->segment(run_).key_head * rows_->head_stride;
    end_ = at_ + bytes_;
  }

  __attribute__((noinline)) void next_run() {
    if (by_page_) {
      if (++run_ == tile_->runs) {
        lines_ = 0;
        end_ = at_;
      } else {
        open_run();
      }
      return;
    }
    if (++run_ == runs_) {
      run_ = 0;
      do {
        if (++place_ >= tile_->last) {
          lines_ = 0;
          end_ = at_;
          return;
        }
      } while (!(tile_->seen >> place_ & 1));
    }
    open_run();
  }

  const SelectTile* tile_ = nullptr;
  const Lanes* lanes_ = nullptr;
  const PagedRows* rows_ = nullptr;
  int64_t bytes_ = 0;     // of a run
  bool by_page_ = false;  // runs are the tile's, else those of each entry
  int32_t runs_ = 1, run_ = 0;
  int place_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t lines_ = 0;  // of a step
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
