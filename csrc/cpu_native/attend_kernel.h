// The kernel of `attend`, compiled once for each instruction set. The including file defines
// SPARSE_ATTN_ISA, the namespace, and SPARSE_ATTN_KERNELS, the name of the table of entry points.
#pragma once

#include "attend_few.h"
#include "convert.h"
#include "softmax.h"
#if defined(__AMX_BF16__)
#include "attend_amx.h"
#endif

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// Up to so many lanes, vectors hold keys instead of lanes, which would leave them half empty.
constexpr int kFewLanes = kWidth / 2;

// Up to so many lanes of a row with an index list use `qk_fours`. Rows without lists cannot: a
// row's scores would depend on how many rows are processed with it.
#if defined(__AVX512F__)
constexpr int kFoursLanes = kWidth;
#else
constexpr int kFoursLanes = kWidth / 2;
#endif

inline bool all_finite(const float* x, int32_t count) {
  uint32_t largest_exponent = 0;
  for (int32_t i = 0; i < count; ++i) {
    const uint32_t exponent = bits_of(x[i]) & 0x7f800000u;
    largest_exponent = exponent > largest_exponent ? exponent : largest_exponent;
  }
  return largest_exponent != 0x7f800000u;
}

inline bool all_finite(const uint16_t* x, int32_t count) {  // bf16
  uint16_t largest_exponent = 0;
  for (int32_t i = 0; i < count; ++i) {
    const uint16_t exponent = x[i] & 0x7f80u;
    largest_exponent = exponent > largest_exponent ? exponent : largest_exponent;
  }
  return largest_exponent != 0x7f80u;
}

// A key's elements, in the one or two rows that hold them.
struct KeyParts {
  int32_t dim[2];
};

// Rows of a tile outside which some lanes see none.
struct Bounds {
  int32_t low, high;

  void add(Bounds other) {
    if (other.low < low) low = other.low;
    if (other.high > high) high = other.high;
  }

  bool meet(int32_t begin, int32_t end) const { return low < end && begin < high; }
};

// Attends chunks of one block of lanes.
template <class Mode>
class Attention {
 public:
  Attention(const AttendParams& p, const Block& block, Carver* carver)
      : p_(p),
        block_(block),
        shape_(p, lanes_of(block)),
        fours_(!kAmx && (p.main.listed || p.window.listed) && shape_.lanes <= kFoursLanes),
        few_(!kAmx && shape_.lanes <= kFewLanes),
        drips_(shape_.lanes <= kPanel),
        amx_(shape_.padded_lanes, carver) {
    const int64_t row = p.qk_dim > p.v_dim ? p.qk_dim : p.v_dim;
    zero_bytes_ = 4 * (row > shape_.padded_lanes ? row : shape_.padded_lanes) + kBytes;
    zeros_ = carver->take<char>(zero_bytes_);
    for (Tile*& tile : tiles_) tile = carver->take<Tile>(1);
    factors_ = carver->take<float>(kTile);
    alpha_ = carver->take<float>(shape_.padded_lanes);
    low_ = carver->take<int32_t>(shape_.padded_lanes);
    high_ = carver->take<int32_t>(shape_.padded_lanes);
    bounds_ = carver->take<Bounds>(lane_groups());
    scores_ = carver->take<float>(kTile * shape_.padded_lanes);
    q_rows_ = carver->take<float>(p.q_format == Mode::kFormat ? 0 : kWidth * p.qk_dim);
    main_parts_ = {{p.qk_dim - shape_.rope_dim, shape_.rope_dim}};
    window_parts_ = {{p.qk_dim, 0}};
    q_main_ = q_window_ = carver->take<float>(packed_floats(main_parts_));
    if (p.window.given && shape_.rope_dim > 0)
      q_window_ = carver->take<float>(packed_floats(window_parts_));
    const int64_t ld = round_up(row, kPanel);
    k_buffer_ =
        carver->take<Element>(copies_keys(p.main.k) || copies_keys(p.window.k) ? kTile * ld : 0);
    rope_buffer_ =
        carver->take<Element>(rope_is_apart(p.main) && copies_keys(p.main.rope) ? kTile * ld : 0);
    v_buffer_ = carver->take<Element>(converts(p.main.v) ? kTile * ld : 0);
    v_rest_ = carver->take<Element>(kTile * kPanel);
    kept_ = carver->take<float>(kTile / Mode::kGroup * kPanel);
    buffer_ld_ = ld;
    for (float*& partial : partials_) partial = carver->take<float>(shape_.partial_floats());
  }

  // See Kernels::attend.
  bool run(int64_t begin, int64_t end, float* partials) {
    [[maybe_unused]] const typename Mode::Registers registers;
    memset(zeros_, 0, static_cast<size_t>(zero_bytes_));
    for (Tile* tile : tiles_) tile->init(zeros_);
    TileStream stream(p_, block_, begin, end, zeros_);
    Tile *tile = tiles_[0], *next = tiles_[1];
    bool more = stream.next(tile);
    if (more && (few_ || fours_)) prefetcher_.read(*tile);
    if (p_.main.given) pack(main_parts_, q_main_);
    if (p_.window.given && (!p_.main.given || q_window_ != q_main_)) pack(window_parts_, q_window_);
    ChunkResults results(shape_, begin, end, partials, partials_);

    while (more) {
      more = stream.next(next);
      const Partial into = results.of(tile->chunk);
      prefetcher_.open(more ? next : nullptr, fetches(*tile));
      attend_tile(*tile, into);
      Tile* done = tile;
      tile = next;
      next = done;
    }
    if (stream.failed()) return false;
    results.close(p_, block_);
    return true;
  }

 private:
  typedef typename Mode::Element Element;

  static constexpr int64_t kElement = sizeof(Element);
  static constexpr bool kAmx = Mode::kAmx;
  typedef typename Mode::Products Products;

  static bool converts(const PagedRows& rows) { return rows.dim > 0 && rows.type != Mode::kType; }

  // Groups of kPvLanes lanes.
  int64_t lane_groups() const { return (shape_.padded_lanes + kPvLanes - 1) / kPvLanes; }

  // Tile registers take keys from one buffer.
  static bool copies_keys(const PagedRows& rows) {
    return converts(rows) || (kAmx && rows.dim > 0);
  }

  // Steps of four bytes that elements of a key or query take; what is multiplied together is whole.
  static int64_t steps(int32_t dim) {
    return round_up((dim + Mode::kGroup - 1) / Mode::kGroup, Mode::kSteps);
  }

  // Vectors of lanes of `qk_fours`.
  int vectors_of_fours() const {
    return shape_.lanes <= kWidth / 4 ? 1 : shape_.lanes <= kWidth / 2 ? 2 : 4;
  }

  int64_t packed_floats(const KeyParts& parts) const {
    if (fours_) {
      const int64_t fours = round_up(steps(parts.dim[0]), 4) + round_up(steps(parts.dim[1]), 4);
      return vectors_of_fours() * kWidth / 4 * fours;
    }
    return (few_ ? kFewLanes : shape_.padded_lanes) * (steps(parts.dim[0]) + steps(parts.dim[1]));
  }

  int64_t panel_lanes(int64_t lane) const {
    return shape_.padded_lanes - lane >= kPanel ? static_cast<int64_t>(kPanel)
                                                : static_cast<int64_t>(kWidth);
  }

  // Packs the block's queries for `qk_fours`.
  void pack_fours(const KeyParts& parts, float* q) {
    memset(q, 0, static_cast<size_t>(packed_floats(parts)) * 4);
    const int64_t lanes = vectors_of_fours() * kWidth / 4;
    for (int32_t lane = 0; lane < shape_.lanes; ++lane) {
      const char* row = query(lane, 0);
      float* to = q + 4 * (few_ ? lane : lane % 4 * (kWidth / 4) + lane / 4);
      for (int32_t dim : parts.dim) {
        for (int32_t i = 0; i < dim; i += 4 * Mode::kGroup) {
          const int32_t count = dim - i < 4 * Mode::kGroup ? dim - i : 4 * Mode::kGroup;
          memcpy(to, row + i * kElement, static_cast<size_t>(count * kElement));
          to += lanes * 4;
        }
        row += dim * kElement;
      }
    }
  }

  // Packs the block's queries for `qk` (panels of [step][lane]) or `qk_few` ([lane][step]).
  void pack(const KeyParts& parts, float* q) {
    if (fours_) return pack_fours(parts, q);
    const int64_t all_steps = steps(parts.dim[0]) + steps(parts.dim[1]);
    if (few_ || kAmx) memset(q, 0, static_cast<size_t>(packed_floats(parts)) * 4);
    for (int32_t lane = 0; lane < shape_.padded_lanes; lane += kWidth) {
      const char* rows[kWidth];
      for (int i = 0; i < kWidth; ++i)
        rows[i] = lane + i < shape_.lanes ? query(lane + i, i) : zeros_;
      const int64_t panel = lane / kPanel * kPanel, width = panel_lanes(panel);
      float* to = few_ ? q : q + panel * all_steps + (lane - panel);
      for (int32_t dim : parts.dim) {
        if (few_) {
          for (int32_t i = 0; i < shape_.lanes; ++i) {
            memcpy(to + i * all_steps, rows[i], static_cast<size_t>(dim * kElement));
          }
          to += steps(dim);
        } else {
          pack_queries<Mode>(rows, dim, to, width);
          to += steps(dim) * width;
        }
        for (const char*& row : rows) row += dim * kElement;
      }
    }
  }

  // The query of a lane in the mode's type; in buffer `i` if it has another.
  const char* query(int32_t lane, int i) {
    const int64_t row = block_.row + lane / block_.heads, head = block_.head + lane % block_.heads;
    const char* from = p_.q + row * p_.q_strides[0] + head * p_.q_strides[1];
    if (p_.q_format == Mode::kFormat) return from;
    float* to = q_rows_ + i * p_.qk_dim;
    convert_row(codec_of(p_.q_format).element, from, p_.qk_dim, to);
    return reinterpret_cast<const char*>(to);
  }

  // Rows of a tile in the mode's type: in place, or in `buffer` if it `copies`.
  const char* const* native(const Tile& tile, const PagedRows& rows, const char* const* in_place,
                            bool copies, Element* buffer, const char** converted) {
    if (!copies) return in_place;
    return convert(tile, rows.dim, buffer, converted,
                   [&](int n, Element* to) { convert_row(rows.type, in_place[n], rows.dim, to); });
  }

  // The same of keys but for what is apart.
  const char* const* native_keys(const Tile& tile, const char** converted) {
    const PlaneParams& plane = *tile.plane;
    if (plane.group == 0)
      return native(tile, plane.k, tile.k, copies_keys(plane.k), k_buffer_, converted);
    return convert(tile, plane.k.dim + plane.rope.dim, k_buffer_, converted,
                   [&](int n, Element* to) {
                     const GroupScales scales(plane.k_scale.type, tile.scales[n], plane.k_scale.dim,
                                              plane.group);
                     scale_row(plane.k.type, tile.k[n], plane.k.dim, scales, to);
                     if (plane.rope.dim > 0)
                       convert_row(plane.rope.type, tile.rope[n], plane.rope.dim, to + plane.k.dim);
                   });
  }

  // `dim` elements of each seen row. Tile registers take all rows from the buffer, filled up with
  // zeros.
  template <class Convert>
  const char* const* convert(const Tile& tile, int32_t dim, Element* buffer, const char** converted,
                             const Convert& convert_to) {
    for (int n = 0; n < kTile + kPad; ++n) converted[n] = zeros_;
    int first = tile.first, last = tile.last;
    if constexpr (kAmx) {
      first = Products::first_row(tile);
      last = Products::end_row(tile);
    }
    for (int n = first; n < last; ++n) {
      const bool seen = tile.seen >> n & 1;
      if (!seen && !kAmx) continue;
      Element* to = buffer + n * buffer_ld_;
      if (seen) convert_to(n, to);
      if (kAmx) fill_up(to, seen ? dim : 0, dim);
      converted[n] = reinterpret_cast<const char*>(to);
    }
    return converted;
  }

  // Zeros from element `from` on, to the end of the last register.
  static void fill_up(Element* row, int32_t from, int32_t dim) {
    const int64_t end = steps(dim) * Mode::kGroup;
    memset(row + from, 0, static_cast<size_t>((end - from) * kElement));
  }

  // Steps of the prefetcher in a tile: those of its loops, or calls of loops.
  int64_t fetches(const Tile& tile) const {
    if constexpr (kAmx) return amx_.fetches(tile, steps(p_.qk_dim), shape_.panels);
    const int64_t rows = tile.last - tile.first;
    const int64_t values = shape_.panels * ((shape_.lanes + kPvLanes - 1) / kPvLanes);
    if (!drips_) return (rows / kQkRows + 1) * (shape_.padded_lanes / kPanel + 1) + values;
    const int64_t calls = fours_ ? rows * vectors_of_fours() / (2 * kQkRows)
                          : few_ ? rows / kWidth
                                 : 0;
    return calls * (steps(p_.qk_dim) / 4) + values * (rows / Mode::kGroup) + 1;
  }

  void attend_tile(const Tile& tile, const Partial& into) {
    const PlaneParams& plane = *tile.plane;
    const bool in_window = &plane == &p_.window;
    const KeyParts& parts = in_window ? window_parts_ : main_parts_;
    const float* q = in_window ? q_window_ : q_main_;
    const char* converted_k[kTile + kPad];
    const char* converted_rope[kTile + kPad];
    const char* converted_v[kTile + kPad];
    const char* const* k = native_keys(tile, converted_k);
    const char* const* v =
        plane.v.dim > 0 ? native(tile, plane.v, tile.v, converts(plane.v), v_buffer_, converted_v)
                        : k;

    if (few_ || tile.mixed()) bound_lanes(tile);
    multiply_keys(tile, k, parts, 0, q);
    const float scale = static_cast<float>(p_.scale * 1.44269504088896341);
    const bool apart =
        rope_is_apart(plane) && plane.k_scale.dim > 0;  // the scale is not the rope part's
    if (apart) scale_scores(tile);
    if (rope_is_apart(plane)) {
      const char* const* rope = native(tile, plane.rope, tile.rope, copies_keys(plane.rope),
                                       rope_buffer_, converted_rope);
      multiply_keys(tile, rope, parts, 1, q);
    }
    for (int n = 0; n < kTile; ++n) factors_[n] = apart ? scale : scale * tile.k_scale[n];
    softmax(tile, into);
    if constexpr (kAmx) amx_.take(tile, scores_, zeros_);
    multiply_values(tile, v, into);
  }

  // Scores of a part of the keys, added to those of the part before.
  void multiply_keys(const Tile& tile, const char* const* rows, const KeyParts& parts, int part,
                     const float* q) {
    const int32_t dim = parts.dim[part];
    const int64_t all_steps = steps(parts.dim[0]) + steps(parts.dim[1]);
    if (fours_) {
      if (part == 1) q += vectors_of_fours() * kWidth / 4 * round_up(steps(parts.dim[0]), 4);
      switch (vectors_of_fours()) {
        case 1:
          return multiply_fours<1>(tile, rows, dim, q, part == 1);
        case 2:
          return multiply_fours<2>(tile, rows, dim, q, part == 1);
        default:
          return multiply_fours<kFoursLanes / (kWidth / 4)>(tile, rows, dim, q, part == 1);
      }
    }
    if (few_) {
      if (part == 1) q += steps(parts.dim[0]);
      for (int n = tile.first / kWidth * kWidth; n < tile.last; n += kWidth) {
        multiply_few(rows + n, dim, q, all_steps, part == 1, scores_ + n);
      }
      return;
    }
    if constexpr (kAmx) {
      const int64_t bytes = buffer_ld_ * kElement;
      const char* keys = rows[tile.first] - tile.first * bytes;  // a buffer
      for (int64_t lane = 0; lane < shape_.padded_lanes; lane += panel_lanes(lane)) {
        const int64_t width = panel_lanes(lane);
        const float* panel = q + lane * all_steps + (part == 1 ? steps(parts.dim[0]) * width : 0);
        amx_.multiply_keys(tile, keys, bytes, panel, width, steps(dim), part == 1, scores_ + lane,
                           prefetcher_);
      }
      return;
    }
    // From a multiple of kQkRows on, so that no group of scores ends after the tile.
    for (int n = tile.first / kQkRows * kQkRows; n < tile.last; n += kQkRows) {
      for (int64_t lane = 0; lane < shape_.padded_lanes;) {
        if (!drips_) prefetcher_.step();
        const int64_t width = panel_lanes(lane);
        if (tile.mixed() && !bounds_of(lane, lane + width).meet(n, n + kQkRows)) {
          lane += width;  // the softmax hides what is there
          continue;
        }
        const float* panel = q + lane * all_steps + (part == 1 ? steps(parts.dim[0]) * width : 0);
        float* s = scores_ + n * shape_.padded_lanes + lane;
        if (width == kPanel) {
          qk<Mode, kQkRows, 2>(rows + n, dim, panel, part == 1, s, shape_.padded_lanes);
        } else {
          qk<Mode, kQkRows, 1>(rows + n, dim, panel, part == 1, s, shape_.padded_lanes);
        }
        lane += width;
      }
    }
  }

  template <int kVectors>
  void multiply_fours(const Tile& tile, const char* const* rows, int32_t dim, const float* q,
                      bool adds) {
    constexpr int kRows = 2 * kQkRows / kVectors;
    for (int n = tile.first / kRows * kRows; n < tile.last; n += kRows) {
      const int64_t ld = few_ ? kTile : shape_.padded_lanes;
      qk_fours<Mode, kRows, kVectors>(rows + n, dim, q, adds, scores_ + (few_ ? n : n * ld), ld,
                                      prefetcher_);
    }
  }

  void multiply_few(const char* const* rows, int32_t dim, const float* q, int64_t q_ld, bool adds,
                    float* s) {
    switch (shape_.lanes) {
      case 1:
        return qk_few<Mode, 1>(rows, dim, q, q_ld, adds, s, kTile, prefetcher_);
      case 2:
        return qk_few<Mode, 2>(rows, dim, q, q_ld, adds, s, kTile, prefetcher_);
      case 3:
        return qk_few<Mode, 3>(rows, dim, q, q_ld, adds, s, kTile, prefetcher_);
      case 4:
        return qk_few<Mode, 4>(rows, dim, q, q_ld, adds, s, kTile, prefetcher_);
      default:
        return qk_few<Mode, kFewLanes>(rows, dim, q, q_ld, adds, s, kTile, prefetcher_);
    }
  }

  void scale_scores(const Tile& tile) {
    for (int n = tile.first; n < tile.last; ++n) {
      for (int64_t lane = 0; lane < shape_.lanes; ++lane) {
        scores_[few_ ? lane * kTile + n : n * shape_.padded_lanes + lane] *= tile.k_scale[n];
      }
    }
  }

  void softmax(const Tile& tile, const Partial& into) {
    if (few_) {
      for (int32_t lane = 0; lane < shape_.lanes; ++lane) {
        const LaneState state = {into.maximum + lane, into.sum + lane, alpha_ + lane};
        softmax_lane<Mode>(tile, factors_, scores_ + lane * kTile, low_[lane], high_[lane], state);
      }
      return;
    }
    for (int64_t lane = 0; lane < shape_.padded_lanes; lane += kWidth) {
      const LaneState state = {into.maximum + lane, into.sum + lane, alpha_ + lane};
      float* s = scores_ + lane;
      if (tile.mixed()) {
        softmax_lanes<Mode, true>(tile, factors_, s, shape_.padded_lanes, (Ints)load(low_ + lane),
                                  (Ints)load(high_ + lane), state);
      } else {
        softmax_lanes<Mode, false>(tile, factors_, s, shape_.padded_lanes, Ints{}, Ints{}, state);
      }
    }
  }

  // Rows of the tile that each lane sees, and each group of lanes.
  void bound_lanes(const Tile& tile) {
    for (int64_t lane = 0; lane < shape_.padded_lanes; ++lane) low_[lane] = high_[lane] = 0;
    for (int64_t i = 0; i < lane_groups(); ++i) bounds_[i] = {kTile, 0};
    for (int32_t r = 0; r < block_.rows; ++r) {
      const RowBits bits = seen_by_row(tile, r);
      if (!bits) continue;
      const Bounds bounds = {first_of(bits), end_of(bits)};
      const int32_t begin = r * block_.heads, end = begin + block_.heads;
      for (int32_t lane = begin; lane < end; ++lane) {
        low_[lane] = bounds.low;
        high_[lane] = bounds.high;
      }
      for (int32_t i = begin / kPvLanes; i <= (end - 1) / kPvLanes; ++i) bounds_[i].add(bounds);
    }
  }

  // Rows of a mixed tile outside which no lane of [begin, end) sees one.
  Bounds bounds_of(int64_t begin, int64_t end) const {
    Bounds bounds = bounds_[begin / kPvLanes];
    for (int64_t i = begin / kPvLanes + 1; i <= (end - 1) / kPvLanes; ++i) bounds.add(bounds_[i]);
    return bounds;
  }

  RowBits seen_by_row(const Tile& tile, int32_t r) const {
    if (tile.plane->listed) return tile.seen;
    const EntryRange range = visible_range(*tile.plane, p_.causal, block_.row + r,
                                           block_.position + r, p_.seq_lens[block_.sequence]);
    return row_bits(range.low - tile.base, range.high - tile.base);
  }

  void multiply_values(const Tile& tile, const char* const* rows, const Partial& into) {
    if (!tile.mixed() || unseen_are_finite(tile, rows)) {
      return multiply_values(tile, rows, into, 0, shape_.lanes);
    }
    // Zero times a non-finite value is not zero: each query row gets zeros for the rows that it
    // does not see.
    const char* seen[kTile + kPad];
    for (int32_t r = 0; r < block_.rows; ++r) {
      const RowBits bits = seen_by_row(tile, r);
      for (int n = 0; n < kTile + kPad; ++n)
        seen[n] = n < kTile && (bits >> n & 1) ? rows[n] : zeros_;
      multiply_values(tile, seen, into, r * block_.heads, (r + 1) * block_.heads);
    }
  }

  // Whether values that some lane does not see are finite.
  bool unseen_are_finite(const Tile& tile, const char* const* rows) const {
    const RowBits unsure = tile.seen & ~tile.seen_by_all;
    for (int n = tile.first; n < tile.last; ++n) {
      if ((unsure >> n & 1) && !all_finite(reinterpret_cast<const Element*>(rows[n]), p_.v_dim))
        return false;
    }
    return true;
  }

  void multiply_values(const Tile& tile, const char* const* rows, const Partial& into, int32_t lane,
                       int32_t end) {
    const int32_t whole = p_.v_dim / kPanel * kPanel;
    for (int32_t d = 0; d < whole; d += kPanel)
      multiply_panel(tile, rows, d * kElement, into.o + d * shape_.padded_lanes, lane, end);
    if (whole == p_.v_dim) return;
    const char* rest[kTile + kPad];  // the last elements, filled up with zeros
    for (int n = 0; n < kTile + kPad; ++n) rest[n] = zeros_;
    for (int n = tile.first; n < tile.last; ++n) {
      Element* to = v_rest_ + n * kPanel;
      memset(to, 0, kPanel * kElement);
      memcpy(to, rows[n] + whole * kElement, static_cast<size_t>((p_.v_dim - whole) * kElement));
      rest[n] = reinterpret_cast<const char*>(to);
    }
    multiply_panel(tile, rest, 0, into.o + whole * shape_.padded_lanes, lane, end);
  }

  void multiply_panel(const Tile& tile, const char* const* rows, int64_t offset, float* o,
                      int32_t lane, int32_t end) {
    if constexpr (kAmx)
      return amx_.multiply_panel(tile, rows, offset, lane, end, alpha_, o, prefetcher_);
    if (Mode::kSteps == 2 && lane % 2 == 1)  // others come in pairs
      multiply_lanes<1>(tile, rows, offset, o, lane++);
    if (Mode::kGroup > 1 && lane + 2 * kPvLanes <= end) {
      multiply_lanes<kPvLanes, Values::kRowsToKeep>(tile, rows, offset, o, lane);
      for (lane += kPvLanes; lane + kPvLanes <= end; lane += kPvLanes)
        multiply_lanes<kPvLanes, Values::kKept>(tile, rows, offset, o, lane);
    }
    for (; lane + kPvLanes <= end; lane += kPvLanes)
      multiply_lanes<kPvLanes>(tile, rows, offset, o, lane);
    if (kPvLanes > 4 && lane + 4 <= end) {
      multiply_lanes<4>(tile, rows, offset, o, lane);
      lane += 4;
    }
    switch (end - lane) {
      case 1:
        return multiply_lanes<1>(tile, rows, offset, o, lane);
      case 2:
        return multiply_lanes<2>(tile, rows, offset, o, lane);
      case 3:
        return multiply_lanes<3>(tile, rows, offset, o, lane);
    }
  }

  template <int kLanes, Values kValues = Values::kRows>
  void multiply_lanes(const Tile& tile, const char* const* rows, int64_t offset, float* o,
                      int32_t lane) {
    // Later lanes find all values kept, whatever the first of them see.
    const bool all = kValues == Values::kRowsToKeep || !tile.mixed();
    const Bounds bounds = all ? Bounds{tile.first, tile.last} : bounds_of(lane, lane + kLanes);
    const int begin = bounds.low / Mode::kGroup,
              end = (bounds.high + Mode::kGroup - 1) / Mode::kGroup;
    float* to = o + lane * kPanel;
    if (few_) {
      pv<Mode, kLanes, true, kValues>(scores_ + lane * kTile, kTile, rows, offset, begin, end,
                                      kept_, alpha_ + lane, to, prefetcher_);
#if defined(SPARSE_ATTN_MATRICES)
    } else if constexpr (Mode::kSteps == 2) {
      const auto multiply = [&](auto& fetcher) {
        pv_matrices<kLanes, kValues>(scores_, shape_.padded_lanes, lane, rows, offset, begin / 2,
                                     (end + 1) / 2, kept_, alpha_ + lane, to, fetcher);
      };
      if (drips_) return multiply(prefetcher_);
      NoFetcher none;
      prefetcher_.step();
      multiply(none);
#endif
    } else if (drips_) {
      pv<Mode, kLanes, false, kValues>(scores_ + lane, shape_.padded_lanes, rows, offset, begin,
                                       end, kept_, alpha_ + lane, to, prefetcher_);
    } else {
      NoFetcher none;
      prefetcher_.step();
      pv<Mode, kLanes, false, kValues>(scores_ + lane, shape_.padded_lanes, rows, offset, begin,
                                       end, kept_, alpha_ + lane, to, none);
    }
  }

  const AttendParams& p_;
  const Block& block_;
  const Shape shape_;
  const bool fours_;  // scores by `qk_fours`
  const bool few_;    // scores lie [lane][kTile], else [kTile][lane]
  const bool drips_;  // rows are fetched within loops, else between them
  Products amx_;
  int64_t zero_bytes_;
  char* zeros_;
  Tile* tiles_[2];
  float* factors_;
  float* alpha_;
  int32_t *low_, *high_;
  Bounds* bounds_;  // of kPvLanes lanes each
  float* scores_;
  float* q_rows_;
  KeyParts main_parts_, window_parts_;
  float *q_main_, *q_window_;
  Element *k_buffer_, *rope_buffer_, *v_buffer_, *v_rest_;
  float* kept_;
  int64_t buffer_ld_;
  float* partials_[2];
  Prefetcher prefetcher_;
};

// The mode that a call computes in. bf16 products where queries are bf16 and the numbers of every
// row are numbers of bf16. An element of fp8_v32 or int8_v32, or with a bf16 scale, need not be one
// after it is scaled: it is rounded then, which errs by 2^-9 of it, while fp8 and int8 themselves
// err by 2^-4 of it and 2^-8 of the largest.
#if defined(SPARSE_ATTN_BF16)
inline bool exact_in_bf16(const PagedRows& rows) {
  return rows.dim == 0 || (rows.type != Number::kFp32 && rows.type != Number::kFp16);
}

inline bool computes_in_bf16(const AttendParams& p) {
  return p.q_format == Format::kBf16 && exact_in_bf16(p.main.k) && exact_in_bf16(p.main.rope) &&
         exact_in_bf16(p.main.v) && exact_in_bf16(p.window.k);
}
#endif

// Whether AMX's registers are quicker, though their products always take as long as those of 16
// lanes. Rows without lists share them: as a row's bits must not depend on how many do, all such
// calls use them.
inline bool suits_registers(const AttendParams& p) {
  constexpr int kLeastHeads = 5;
  return heads_per_group(p) >= kLeastHeads || !(p.main.listed || p.window.listed);
}

// Names the class that attends a call.
template <class Class>
struct Chosen {
  typedef Class Type;
};

template <class Mode, class Use>
SPARSE_ATTN_INLINE auto with_class_of(const AttendParams& p, const Use& use) {
  return FewAttention<Mode>::serves(p) ? use(Chosen<FewAttention<Mode>>())
                                       : use(Chosen<Attention<Mode>>());
}

template <class Use>
SPARSE_ATTN_INLINE auto with_class(const AttendParams& p, const Use& use) {
#if defined(__AMX_BF16__)
  if (computes_in_bf16(p) && suits_registers(p) && !FewAttention<Bf16>::serves(p))
    return use(Chosen<Attention<Bf16Amx<AmxAttend>>>());
#endif
#if defined(SPARSE_ATTN_BF16)
  if (computes_in_bf16(p)) return with_class_of<Bf16>(p, use);
#endif
  return with_class_of<F32>(p, use);
}

int64_t scratch_bytes(const AttendParams& p, int32_t lanes) {
  Block block;
  block.rows = lanes;
  block.heads = 1;
  Carver carver(nullptr);
  return with_class(p, [&](auto chosen) {
    [[maybe_unused]] const typename decltype(chosen)::Type counted(p, block, &carver);
    return carver.taken();
  });
}

int64_t partial_floats(const AttendParams& p, int32_t lanes) {
  return Shape(p, lanes).partial_floats();
}

bool attend(const AttendParams& p, const Block& block, int64_t begin, int64_t end, char* scratch,
            float* partials) {
  Carver carver(scratch);
  return with_class(p, [&](auto chosen) {
    return typename decltype(chosen)::Type(p, block, &carver).run(begin, end, partials);
  });
}

void merge(const AttendParams& p, const Block& block, int64_t count, float* partials) {
  const Shape shape(p, lanes_of(block));
  const Partial total = shape.partial(partials);
  for (int64_t i = 1; i < count; ++i)
    merge_into(shape, total, shape.partial(partials + i * shape.partial_floats()));
  finish(p, block, shape, total);
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA

extern const Kernels SPARSE_ATTN_KERNELS = {
#if defined(__AMX_BF16__)
    true,
#else
    false,
#endif
    SPARSE_ATTN_ISA::scratch_bytes, SPARSE_ATTN_ISA::partial_floats, SPARSE_ATTN_ISA::attend,
    SPARSE_ATTN_ISA::merge};

}  // namespace sparse_attn
