// The kernel of `select`, compiled once for each instruction set. The including file defines
// SPARSE_ATTN_ISA, the namespace, and SPARSE_ATTN_SELECT_KERNELS, the name of the table of entry
// points.
//
// A lane is a head of a list in one of a block's rows. Keys of a tile are transposed into panels,
// one key per vector element, so that each lane's products run over keys and are joined with those
// of other heads element by element. Where heads fill panels and their scores are added, queries
// are transposed instead, once: products of a key run over heads, and are joined as they come.
#pragma once

#include "../common/decode.h"
#include "convert.h"
#include "micro.h"
#include "rows.h"
#include "select_schedule.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr double kLog2E = 1.44269504088896341;

// Elements [first, first + dim) of rows of keys as a panel of [steps][kPanel], steps of four bytes.
template <class Mode>
inline void pack_panel(const char* const* rows, int32_t first, int32_t dim, float* panel) {
  constexpr int32_t kElement = sizeof(typename Mode::Element);
  const int32_t whole = dim / (4 * Mode::kGroup) * 4;  // steps that come in fours
  const int32_t left = dim - whole * Mode::kGroup;     // elements
  for (int v = 0; v < kPanel; v += kWidth) {
    const auto place = [&](const char* const* from, int64_t offset, int32_t step, int steps) {
      Floats keys[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const char* row[kWidth / 4];
        for (int i = 0; i < kWidth / 4; ++i) row[i] = from[4 * i + j];
        keys[j] = load_fours(row, offset);
      }
      transpose_fours(keys);
      for (int j = 0; j < steps; ++j) store(panel + (step + j) * kPanel + v, keys[j]);
    };
    for (int32_t step = 0; step < whole; step += 4)
      place(rows + v, first * kElement + 4 * step, step, 4);
    if (left == 0) continue;
    char last[kWidth][16] = {};  // the rest of the last steps is zero
    const char* last_rows[kWidth];
    for (int r = 0; r < kWidth; ++r) {
      memcpy(last[r], rows[v + r] + first * kElement + 4 * whole,
             static_cast<size_t>(left * kElement));
      last_rows[r] = last[r];
    }
    place(last_rows, 0, whole, (left + Mode::kGroup - 1) / Mode::kGroup);
  }
}

// The larger of two, or NaN.
template <class Vector>
SPARSE_ATTN_INLINE Vector larger(Vector a, Vector b) {
  return (a > b) | (a != a) ? a : b;
}

// What an element of kRows queries adds to their products with kCount vectors of keys. `kBounds`:
// the largest product with what lies between `low` and `high`.
template <bool kBounds, int kCount, class Vector>
SPARSE_ATTN_INLINE void add_products(Vector q, const Vector* low, const Vector* high, Vector* sum) {
#pragma GCC unroll 4
  for (int j = 0; j < kCount; ++j)
    sum[j] = kBounds ? sum[j] + larger(q * low[j], q * high[j]) : fma(q, low[j], sum[j]);
}

// Bounds of products of kRows queries with a panel of keys that lie between `low` and `high`.
template <int kRows>
inline void qk_bounds(const char* const* rows, int32_t dim, const float* low, const float* high,
                      float* s, int64_t ld) {
  Floats sum[kRows][2] = {};
  for (int32_t k = 0; k < dim; ++k) {
    const Floats a[2] = {load(low + k * kPanel), load(low + k * kPanel + kWidth)};
    const Floats b[2] = {load(high + k * kPanel), load(high + k * kPanel + kWidth)};
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
      add_products<true, 2>(broadcast_bytes(rows[r] + 4 * k), a, b, sum[r]);
  }
  for (int r = 0; r < kRows; ++r) {
    store(s + r * ld, sum[r][0]);
    store(s + r * ld + kWidth, sum[r][1]);
  }
}

// Products (or bounds) in float64, times the keys' scales, rounded to bf16. Rounding moves by a
// whole step where a product lies between two numbers of bf16: so the product must not err.
template <int kRows, bool kBounds>
inline void qk_rounded(const char* const* rows, int32_t dim, const float* low, const float* high,
                       const float* key_scale, float* s, int64_t ld) {
  constexpr int kVectors = kPanel / kDoubles;
  Doubles sum[kRows][kVectors] = {};
  for (int32_t k = 0; k < dim; ++k) {
    Doubles a[kVectors], b[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      a[j] = load_doubles(low + k * kPanel + j * kDoubles);
      b[j] = kBounds ? load_doubles(high + k * kPanel + j * kDoubles) : Doubles{};
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const double q = reinterpret_cast<const float*>(rows[r])[k];
      add_products<kBounds, kVectors>(Doubles{} + q, a, b, sum[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* to = s + r * ld;
    for (int j = 0; j < kVectors; ++j)
      store_floats(to + j * kDoubles, sum[r][j] * load_doubles(key_scale + j * kDoubles));
    for (int j = 0; j < kPanel; j += kWidth) store(to + j, round_to_bf16(load(to + j)));
  }
}

// Scores of kRows keys from products that run over heads, `panels` panels of them: total[r] is the
// sum over the heads whose numbers agree modulo kWidth. `kScaled`: products are multiplied by the
// scales of their keys.
template <class Mode, int kRows, bool kRelu, bool kScaled>
SPARSE_ATTN_APART void join_keys(const char* const* rows, int32_t dim, const float* q,
                                 int32_t panels, const float* weights, const float* key_scale,
                                 Floats* total) {
  Floats joined[kRows] = {};
  const int64_t panel = int64_t{kPanel} * ((dim + Mode::kGroup - 1) / Mode::kGroup);
  for (int32_t i = 0; i < panels; ++i, q += panel, weights += kPanel) {
    Floats sum[kRows][2] = {};
    add_dots<Mode, kRows, 2>(rows, dim, q, sum);
    const Floats w[2] = {load(weights), load(weights + kWidth)};
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        Floats x = kScaled ? sum[r][j] * broadcast(key_scale[r]) : sum[r][j];
        if (kRelu) x = max(Floats{}, x);
        joined[r] = fma(w[j], x, joined[r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) total[r] = joined[r];
}

// Numbers that come one by one, in ascending order and without gaps, pooled by unit: a unit is done
// when a number lies past it.
class Pooling {
 public:
  // Units are `block` strides, of which a number covers `strides`. Those in `free` go to `best`.
  void open(int64_t block, int64_t strides, bool sums, EntryRange free, Best* best) {
    block_ = block;
    strides_ = strides;
    sums_ = sums;
    free_ = free;
    best_ = best;
    units_ = 0;
  }

  void take(int64_t number, float score, uint64_t* spare) {
    if (!(score == score)) score = -kInfinity;
    const int64_t end = number + strides_;
    if (units_ == 0) first_ = number / block_;
    for (; (first_ + 1) * block_ <= number; ++first_, --units_) close(spare);
    for (; (first_ + units_) * block_ < end; ++units_) at(first_ + units_) = sums_ ? 0 : -kInfinity;
    for (int64_t unit = first_; unit < first_ + units_; ++unit) {
      double& value = at(unit);
      if (sums_) {
        const int64_t low = unit * block_ > number ? unit * block_ : number;
        const int64_t high = (unit + 1) * block_ < end ? (unit + 1) * block_ : end;
        value += static_cast<double>(score) * static_cast<double>(high - low);
      } else if (score > value) {
        value = score;
      }
    }
  }

  void finish(uint64_t* spare) {
    for (; units_ > 0; ++first_, --units_) close(spare);
  }

 private:
  double& at(int64_t unit) { return values_[unit % (kMaxStrides + 1)]; }

  void close(uint64_t* spare) {
    if (first_ < free_.low || first_ >= free_.high) return;
    make_room(best_, spare);
    add(best_, static_cast<float>(at(first_)), first_);
  }

  int64_t block_, strides_;
  bool sums_;
  EntryRange free_;
  Best* best_;
  int64_t first_, units_;  // units [first_, first_ + units_) wait for more
  double values_[kMaxStrides + 1];
};

// Consecutive heads of a list that read the same key head.
struct Segment {
  int32_t key_head;
  int32_t head;  // in the list
  int32_t heads;
};

// Whether products run over heads.
inline bool joins_heads(const SelectParams& p) {
  return (p.score == Score::kReluSum || p.score == Score::kDot) && !p.rounded && !p.bounds &&
         !pools_keys(p) && heads_per_list(p) % kPanel == 0 && p.lists % p.key_heads == 0;
}

// Running maximum m of the lanes' scores, in base 2, and sum of 2^(score - m).
struct Sums {
  float* maximum;
  float* sum;
};

inline Sums sums_at(float* at, int64_t lanes) { return {at, at + lanes}; }

inline void clear(const Sums& sums, int64_t lanes) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
    sums.maximum[lane] = kNoScore;
    sums.sum[lane] = 0;
  }
}

// Sums of no score change nothing.
inline void merge_into(const Sums& into, const Sums& from, int64_t lanes) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const float m0 = into.maximum[lane], m1 = from.maximum[lane], m = max(m0, m1);
    into.sum[lane] = into.sum[lane] * exp2(m0 - m) + from.sum[lane] * exp2(m1 - m);
    into.maximum[lane] = m;
  }
}

template <class Mode>
class Scorer {
 public:
  static int64_t scratch_bytes(const SelectParams& p, int32_t rows) {
    SelectBlock block;
    block.rows = rows;
    Carver carver(nullptr);
    Scorer scorer(p, block, &carver);
    return carver.taken();
  }

  Scorer(const SelectParams& p, const SelectBlock& block, Carver* carver)
      : p_(p), block_(block), heads_(heads_per_list(p)), lanes_(heads_ * block.rows) {
    const int64_t dim = round_up(p.keys.k.dim + p.keys.rope.dim, kPanel);
    const bool converts_q = p.q_format != Mode::kFormat;
    const bool converts_k = p.keys.k.type != Mode::kType || pools_keys(p);
    zeros_ = carver->take<char>(dim * 4);
    q_buffer_ = carver->take<Element>(converts_q ? lanes_ * dim : 0);
    k_buffer_ = carver->take<Element>(converts_k ? kTile * dim : 0);
    sum_buffer_ = carver->take<double>(pools_keys(p) ? dim : 0);
    row_buffer_ = carver->take<float>(pools_keys(p) ? dim : 0);
    panel_ = carver->take<float>((p.bounds ? 2 : 1) * kPanel *
                                 round_up((p.dim + Mode::kGroup - 1) / Mode::kGroup, 4));
    weights_ = carver->take<float>(lanes_);
    chunk_sums_ = carver->take<float>(2 * lanes_);
    products_ = carver->take<float>(joins_heads(p) ? 0 : lanes_ * kTile);
    q_panels_ = carver->take<float>(joins_heads(p) ? lanes_ * steps(p.dim) : 0);
    ld_ = dim;
  }

  bool sum(int64_t begin, int64_t end, const Sums& into) {
    prepare();
    const Sums sums = sums_at(chunk_sums_, lanes_);
    int64_t chunk = begin;
    clear(sums, lanes_);
    const bool paged = for_tiles(begin, end, [&] {
      if (tile_->base / kChunk != chunk) {
        merge_into(into, sums, lanes_);
        clear(sums, lanes_);
        chunk = tile_->base / kChunk;
      }
      for (int32_t r = 0; r < block_.rows; ++r) {
        const EntryRange places = places_in_tile(r);
        for_lanes(r, [&](int32_t lane) { add_lane(lane, places, sums); });
      }
    });
    merge_into(into, sums, lanes_);
    return paged;
  }

  bool score(int64_t begin, int64_t end, const Sums& sums, uint64_t* spare, RowBest* best) {
    prepare();
    if (p_.score == Score::kSoftmaxSum) divide_weights(sums);
    for (int32_t r = 0; r < block_.rows; ++r) {
      const SelectRow& row = block_.row[r];
      units_[r].open(p_.block, p_.strides, p_.pool == Pool::kSum, row.free, &best[r].units);
      // All blocks but that of the newest unit, which is returned anyhow.
      const EntryRange others = {
          0, row.units.high > 0 ? (row.units.high - 1) / p_.candidate_block : 0};
      blocks_[r].open(p_.candidate_block, 1, false, others, &best[r].blocks);
    }
    const bool paged = for_tiles(begin, end, [&] {
      for (int32_t r = 0; r < block_.rows; ++r) {
        const EntryRange places = places_in_tile(r);
        if (places.low >= places.high) continue;
        join(r, sums);
        hand_on(r, places, spare, &best[r]);
      }
    });
    for (int32_t r = 0; r < block_.rows; ++r) {
      units_[r].finish(spare);
      blocks_[r].finish(spare);
    }
    return paged;
  }

 private:
  typedef typename Mode::Element Element;

  static int64_t steps(int32_t dim) { return (dim + Mode::kGroup - 1) / Mode::kGroup; }

  // Lanes of a segment lie side by side, those of a row first.
  template <class Visit>
  SPARSE_ATTN_INLINE void for_lanes(int32_t r, const Visit& visit) const {
    for (int32_t i = 0; i < segment_count_; ++i) {
      const Segment& segment = segments_[i];
      const int32_t first = segment.head * block_.rows + r * segment.heads;
      for (int32_t lane = first; lane < first + segment.heads; ++lane) visit(lane);
    }
  }

  void prepare() {
    memset(zeros_, 0, static_cast<size_t>(ld_) * 4);
    pager_.open(p_.keys, block_.sequence);
    segment_count_ = 0;
    for (int32_t head = 0; head < heads_; ++head) {
      const int64_t all = static_cast<int64_t>(block_.list) * heads_ + head;
      const int32_t key_head = static_cast<int32_t>(all * p_.key_heads / p_.heads);
      if (segment_count_ == 0 || segments_[segment_count_ - 1].key_head != key_head)
        segments_[segment_count_++] = {key_head, head, 0};
      ++segments_[segment_count_ - 1].heads;
    }
    for (int32_t r = 0; r < block_.rows; ++r) {
      int32_t head = block_.list * heads_;
      for_lanes(r, [&](int32_t lane) { prepare_lane(lane, block_.row[r].row, head++); });
    }
    for (int32_t lane = 0; joins_heads(p_) && lane < lanes_; lane += kWidth) {
      const int32_t panel = lane / kPanel * kPanel;
      float* to = q_panels_ + panel * steps(p_.dim) + (lane - panel);
      transpose_rows<Mode>(q_ + lane, p_.dim, [=](int32_t step, int count, const Floats* x) {
        for (int j = 0; j < count; ++j) store(to + (step + j) * kPanel, x[j]);
      });
    }
  }

  void prepare_lane(int32_t lane, int64_t row, int32_t head) {
    const char* q = p_.q + row * p_.q_strides[0] + head * p_.q_strides[1];
    q_[lane] = q;
    if constexpr (Mode::kGroup == 1) {
      if (p_.q_format != Mode::kFormat) {
        convert_row(codec_of(p_.q_format).element, q, p_.dim, q_buffer_ + lane * ld_);
        q_[lane] = reinterpret_cast<const char*>(q_buffer_ + lane * ld_);
      }
    }
    weights_[lane] = 1;
    if (!p_.weights) return;
    convert_row(codec_of(p_.weight_format).element,
                p_.weights + row * p_.weight_strides[0] + head * p_.weight_strides[1], 1,
                weights_ + lane);
  }

  // The places of row r in the tile.
  EntryRange places_in_tile(int32_t r) const {
    const EntryRange& places = block_.row[r].places;
    return {places.low - tile_->base > 0 ? places.low - tile_->base : 0,
            places.high - tile_->base < kTile ? places.high - tile_->base : kTile};
  }

  // kTile places side by side, from a multiple of it on.
  struct Tile {
    int64_t base;
    RowBits seen;     // bit n: some row scores place n
    int first, last;  // the panels of the seen places begin at `first`; `last` follows these places
    int64_t number[kTile];
    Place place[kTile];
  };

  // Visits the tiles of chunks [begin, end) that some row scores, their products found. False if an
  // entry has no page.
  template <class Visit>
  bool for_tiles(int64_t begin, int64_t end, const Visit& visit) {
    base_ = begin * kChunk;
    end_ = end * kChunk;
    failed_ = false;
    bool more = next(&tiles_[0]);
    for (int i = 0; more; i = 1 - i) {
      tile_ = &tiles_[i];
      more = next(&tiles_[1 - i]);
      if (failed_) return false;
      open_prefetch(more ? &tiles_[1 - i] : nullptr);
      if (!multiply()) return false;
      visit();
    }
    return !failed_;
  }

  // Finds what stands in the next tile that some row scores. False after the last one, and at an
  // entry without a page.
  bool next(Tile* tile) {
    for (; base_ < end_; base_ += kTile) {
      RowBits seen = 0;
      for (int32_t r = 0; r < block_.rows; ++r) {
        const EntryRange& places = block_.row[r].places;
        seen |= row_bits(places.low - base_, places.high - base_);
      }
      if (!seen) continue;
      tile->base = base_;
      tile->seen = seen;
      tile->first = first_of(seen) / kPanel * kPanel;
      tile->last = end_of(seen);
      number_places(tile);
      base_ += kTile;
      if (!pools_keys(p_)) failed_ = !find_pages(tile);
      return !failed_;
    }
    return false;
  }

  void number_places(Tile* tile) const {
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
  bool find_pages(Tile* tile) const {
    const PagedRows& scales = p_.keys.k_scale;
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
      touch(key_at(*tile, n, segments_[0].key_head), &key_before);
      if (scales.dim > 0) {
        touch(scales.data + tile->place[n].page * scales.page_stride +
                  tile->place[n].offset * scales.entry_stride,
              &scale_before);
      }
    }
    return true;
  }

  const char* key_at(const Tile& tile, int n, int64_t key_head) const {
    const PagedRows& k = p_.keys.k;
    return k.data + tile.place[n].page * k.page_stride + tile.place[n].offset * k.entry_stride +
           key_head * k.head_stride;
  }

  // Spreads fetches of a tile's keys over the products of the tile before.
  void open_prefetch(const Tile* tile) {
    ahead_ = pools_keys(p_) ? nullptr : tile;
    if (!ahead_) return;
    ahead_place_ = tile->first;
    const int calls =
        joins_heads(p_) ? block_.rows * kTile / kQkRows : (lanes_ / kQkRows + 1) * kTile / kPanel;
    ahead_places_ = (kTile + calls - 1) / calls;
  }

  void prefetch_some() {
    if (!ahead_) return;
    for (int i = 0; i < ahead_places_; ++i, ++ahead_place_) {
      if (ahead_place_ >= ahead_->last) {
        ahead_ = nullptr;
        return;
      }
      if (!(ahead_->seen >> ahead_place_ & 1)) continue;
      for (int32_t s = 0; s < segment_count_; ++s) {
        const char* row = key_at(*ahead_, ahead_place_, segments_[s].key_head);
        const int64_t bytes = bytes_of(p_.keys.k.type, p_.keys.k.dim);
        for (int64_t at = 0; at < bytes; at += 64) prefetch(row + at);
      }
    }
  }

  // Products of every lane with the tile. False if an entry has no page.
  bool multiply() {
    for (int32_t i = 0; i < segment_count_; ++i) {
      const Segment& segment = segments_[i];
      if (!pools_keys(p_)) {
        read_keys(segment.key_head);
      } else if (!pool_keys(segment.key_head)) {
        return false;
      }
      if (joins_heads(p_)) return true;
      for (int n = tile_->first; n < tile_->last; n += kPanel) {
        pack_panel<Mode>(k_ + n, 0, p_.dim, panel_);
        if (p_.bounds) pack_panel<Mode>(k_ + n, p_.dim, p_.dim, upper_panel());
        multiply_panel(segment, n);
      }
    }
    return true;
  }

  void read_keys(int32_t key_head) {
    const PagedRows& k = p_.keys.k;
    for (int n = tile_->first; n < tile_->last + kPanel && n < kTile; ++n) {
      k_[n] = zeros_;
      key_scale_[n] = 1;
      if (!(tile_->seen >> n & 1)) continue;
      k_[n] = key_at(*tile_, n, key_head);
      if (k.type != Mode::kType) {
        read_key(k_[n], tile_->place[n], key_head, k_buffer_ + n * ld_);
        k_[n] = reinterpret_cast<const char*>(k_buffer_ + n * ld_);
      }
      if (scales_rows()) key_scale_[n] = scale_at(tile_->place[n], key_head);
    }
  }

  // Whether products are multiplied by the scales of their keys.
  bool scales_rows() const { return p_.keys.k_scale.dim > 0 && p_.keys.group == 0; }

  const char* scales_at(const Place& place, int64_t key_head) const {
    const PagedRows& scales = p_.keys.k_scale;
    return scales.data + place.page * scales.page_stride + place.offset * scales.entry_stride +
           key_head * scales.head_stride;
  }

  float scale_at(const Place& place, int64_t key_head) const {
    return read_number(p_.keys.k_scale.type, scales_at(place, key_head), 0);
  }

  // A key, but for the scale of the row. Rows with elements apart have groups.
  template <class To>
  void read_key(const char* row, const Place& place, int64_t key_head, To* to) const {
    const PlaneParams& keys = p_.keys;
    if (keys.group == 0) return convert_row(keys.k.type, row, keys.k.dim, to);
    const GroupScales scales(keys.k_scale.type, scales_at(place, key_head), keys.k_scale.dim);
    scale_row(keys.k.type, row, keys.k.dim, keys.group, scales, to);
    if (keys.rope.dim == 0) return;
    const char* rope =
        keys.rope.data + place.page * keys.rope.page_stride + place.offset * keys.rope.entry_stride;
    convert_row(keys.rope.type, rope, keys.rope.dim, to + keys.k.dim);
  }

  // Mean keys of units, over the entries that the block's only row sees.
  bool pool_keys(int32_t key_head) {
    const PagedRows& k = p_.keys.k;
    const EntryRange& entries = block_.row[0].entries;
    for (int n = tile_->first; n < tile_->last + kPanel && n < kTile; ++n) {
      k_[n] = zeros_;
      key_scale_[n] = 1;
      if (!(tile_->seen >> n & 1)) continue;
      const int64_t begin = tile_->number[n] * p_.block, end = begin + p_.block;
      const int64_t low = begin > entries.low ? begin : entries.low;
      const int64_t high = end < entries.high ? end : entries.high;
      for (int32_t d = 0; d < p_.dim; ++d) sum_buffer_[d] = 0;
      for (int64_t entry = low; entry < high; ++entry) {
        Place place;
        if (!pager_.find(entry, &place)) return false;
        read_key(k.data + place.page * k.page_stride + place.offset * k.entry_stride +
                     key_head * k.head_stride,
                 place, key_head, row_buffer_);
        const double scale = scales_rows() ? scale_at(place, key_head) : 1.0f;
        for (int32_t d = 0; d < p_.dim; ++d) sum_buffer_[d] += row_buffer_[d] * scale;
      }
      if constexpr (Mode::kGroup == 1) {
        Element* mean = k_buffer_ + n * ld_;
        const double count = static_cast<double>(high - low);
        for (int32_t d = 0; d < p_.dim; ++d) mean[d] = static_cast<float>(sum_buffer_[d] / count);
        k_[n] = reinterpret_cast<const char*>(mean);
      }
    }
    return true;
  }

  void multiply_panel(const Segment& segment, int n) {
    int32_t lane = segment.head * block_.rows;
    const int32_t end = lane + segment.heads * block_.rows;
    const int32_t first = lane;
    for (; lane + kQkRows <= end; lane += kQkRows) multiply_lanes<kQkRows>(lane, n);
    if (kQkRows > 4 && lane + 4 <= end) {
      multiply_lanes<4>(lane, n);
      lane += 4;
    }
    switch (end - lane) {
      case 1:
        multiply_lanes<1>(lane, n);
        break;
      case 2:
        multiply_lanes<2>(lane, n);
        break;
      case 3:
        multiply_lanes<3>(lane, n);
        break;
    }
    if (p_.rounded) return;
    if (!scales_rows() || pools_keys(p_)) return;
    for (lane = first; lane < end; ++lane) {
      float* s = products_ + lane * kTile + n;
      for (int i = 0; i < kPanel; i += kWidth) store(s + i, load(s + i) * load(key_scale_ + n + i));
    }
  }

  template <int kRows>
  void multiply_lanes(int32_t lane, int n) {
    prefetch_some();
    float* s = products_ + lane * kTile + n;
    if constexpr (Mode::kGroup == 1) {
      if (p_.rounded || p_.bounds) {  // with few registers' worth of sums
        if constexpr (kRows > 4) {
          multiply_lanes<4>(lane, n);
          multiply_lanes<kRows - 4>(lane + 4, n);
        } else if (!p_.rounded) {
          qk_bounds<kRows>(q_ + lane, p_.dim, panel_, upper_panel(), s, kTile);
        } else if (p_.bounds) {
          qk_rounded<kRows, true>(q_ + lane, p_.dim, panel_, upper_panel(), key_scale_ + n, s,
                                  kTile);
        } else {
          qk_rounded<kRows, false>(q_ + lane, p_.dim, panel_, nullptr, key_scale_ + n, s, kTile);
        }
        return;
      }
    }
    qk<Mode, kRows, 2>(q_ + lane, p_.dim, panel_, false, s, kTile);
  }

  float* upper_panel() { return panel_ + kPanel * round_up(p_.dim, 4); }

  Floats exponent(Floats product) const {
    return product * broadcast(static_cast<float>(p_.scale * kLog2E));
  }

  // Adds a lane's scores at places [low, high) of the tile to its sums. A NaN counts as -inf.
  void add_lane(int32_t lane, const EntryRange& places, const Sums& sums) {
    if (places.low >= places.high) return;
    const float* products = products_ + lane * kTile;
    float x[kTile];
    const int begin = static_cast<int>(places.low / kWidth * kWidth);
    const int end = static_cast<int>((places.high + kWidth - 1) / kWidth * kWidth);
    const Floats hidden = broadcast(-kInfinity);
    const Ints low = broadcast_int(static_cast<int32_t>(places.low));
    const Ints high = broadcast_int(static_cast<int32_t>(places.high));
    Floats maxima = hidden;
    for (int n = begin; n < end; n += kWidth) {
      Ints place = {};
      for (int i = 0; i < kWidth; ++i) place[i] = n + i;
      const Floats y = exponent(load(products + n));
      const Floats seen = (place >= low) & (place < high) & (y == y) ? y : hidden;
      store(x + n, seen);
      maxima = max(seen, maxima);
    }
    const float before = sums.maximum[lane], maximum = max(largest(maxima), before);
    Floats total = {};
    for (int n = begin; n < end; n += kWidth) total += exp2(load(x + n) - broadcast(maximum));
    float sum = 0;
    for (int i = 0; i < kWidth; ++i) sum += total[i];
    sums.sum[lane] = sums.sum[lane] * exp2(before - maximum) + sum;
    sums.maximum[lane] = maximum;
  }

  // The weight of each probability becomes that of each 2^(score - maximum). An infinite maximum
  // leaves probabilities of 0 and NaN, a sum of 0 only NaN.
  void divide_weights(const Sums& sums) {
    for (int32_t lane = 0; lane < lanes_; ++lane) {
      if (sums.maximum[lane] < kInfinity) weights_[lane] /= sums.sum[lane];
    }
  }

  // Joins the products of row r's lanes to scores of the tile.
  void join(int32_t r, const Sums& sums) {
    if (joins_heads(p_)) return join_heads(r);
    if (p_.rounded) return p_.score == Score::kDot ? join_rounded<false>(r) : join_rounded<true>(r);
    const Floats scale = broadcast(static_cast<float>(p_.scale)), one = broadcast(1.0f);
    switch (p_.score) {
      case Score::kReluSum:
        return join(r, Floats{}, scale, [&](Floats sum, Floats x, int32_t lane) {
          return fma(broadcast(weights_[lane]), max(Floats{}, x), sum);
        });
      case Score::kDot:
        return join(r, Floats{}, scale, [&](Floats sum, Floats x, int32_t lane) {
          return fma(broadcast(weights_[lane]), x, sum);
        });
      case Score::kMax:
        return join(r, broadcast(-kInfinity), scale, [&](Floats best, Floats x, int32_t lane) {
          const Floats y = broadcast(weights_[lane]) * x;
          return larger(best, y);
        });
      case Score::kSoftmaxSum:
        return join(r, Floats{}, one, [&](Floats sum, Floats x, int32_t lane) {
          return fma(broadcast(weights_[lane]), exp2(exponent(x) - broadcast(sums.maximum[lane])),
                     sum);
        });
    }
  }

  template <class Join>
  SPARSE_ATTN_INLINE void join(int32_t r, Floats start, Floats scale, const Join& with) {
    for (int n = tile_->first; n < tile_->last; n += kWidth) {
      Floats joined = start;
      for_lanes(r, [&](int32_t lane) {
        joined = with(joined, load(products_ + lane * kTile + n), lane);
      });
      store(scores_ + n, joined * scale);
    }
  }

  void join_heads(int32_t r) {
    const float* q = q_panels_ + r * heads_ * steps(p_.dim);
    const float* weights = weights_ + r * heads_;
    const auto join = p_.score == Score::kDot
                          ? (scales_rows() ? &join_keys<Mode, kQkRows, false, true>
                                           : &join_keys<Mode, kQkRows, false, false>)
                      : scales_rows() ? &join_keys<Mode, kQkRows, true, true>
                                      : &join_keys<Mode, kQkRows, true, false>;
    constexpr int kKeys = kQkRows > kWidth ? kQkRows : kWidth;
    static_assert(kPanel % kKeys == 0,
                  "tiles begin at multiples of kPanel, and are filled up to one");
    for (int n = tile_->first; n < tile_->last; n += kKeys) {
      Floats sum[kKeys];
      for (int i = 0; i < kKeys; i += kQkRows) {
        prefetch_some();
        join(k_ + n + i, p_.dim, q, heads_ / kPanel, weights, key_scale_ + n + i, sum + i);
      }
      for (int i = 0; i < kKeys; i += 4) {
        transpose_fours(sum + i);
        const FourFloats total =
            add_fours(FourFloats{}, (sum[i] + sum[i + 1]) + (sum[i + 2] + sum[i + 3]));
        *reinterpret_cast<FourFloats*>(scores_ + n + i) = total * static_cast<float>(p_.scale);
      }
    }
  }

  template <bool kRelu>
  void join_rounded(int32_t r) {
    for (int n = tile_->first; n < tile_->last; n += kWidth) {
      Doubles sum[2] = {};
      for_lanes(r, [&](int32_t lane) {
        Floats x = load(products_ + lane * kTile + n);
        if (kRelu) x = max(Floats{}, x);
        float term[kWidth];
        store(term, round_to_bf16(x * broadcast(weights_[lane])));
        sum[0] += load_doubles(term);
        sum[1] += load_doubles(term + kDoubles);
      });
      for (int i = 0; i < 2; ++i) store_floats(scores_ + n + i * kDoubles, sum[i] * p_.scale);
      store(scores_ + n, round_to_bf16(load(scores_ + n)));
    }
  }

  // Hands the scores of row r at `places` of the tile on to the best of its units and blocks.
  void hand_on(int32_t r, EntryRange places, uint64_t* spare, RowBest* best) {
    const bool pooled = pools(p_) && !pools_keys(p_);
    for (int64_t n = places.low; pooled && n < places.high; ++n)
      units_[r].take(tile_->number[n], scores_[n], spare);
    for (int64_t n = places.low; p_.candidate_k > 0 && n < places.high; ++n)
      blocks_[r].take(tile_->number[n], scores_[n], spare);
    if (pooled) return;
    const EntryRange& free = block_.row[r].free;
    while (places.low < places.high && tile_->number[places.low] < free.low) ++places.low;
    while (places.low < places.high && tile_->number[places.high - 1] >= free.high) --places.high;
    static_assert(kTile <= kBestStep, "room for a tile");
    const RowBits taken = row_bits(places.low, places.high);
    Best* units = &best->units;
    make_room(units, spare);
    const Floats threshold = broadcast(units->threshold);
    for (int n = tile_->first; n < tile_->last; n += kWidth) {
      uint32_t better = greater(load(scores_ + n), threshold) & static_cast<uint32_t>(taken >> n);
      for (; better; better &= better - 1) {
        const int at = n + __builtin_ctz(better);
        units->ranks[units->size++] = ranked(scores_[at], tile_->number[at]);
      }
    }
  }

  const SelectParams& p_;
  const SelectBlock& block_;
  const int32_t heads_;
  const int32_t lanes_;
  int64_t ld_;
  char* zeros_;
  Element *q_buffer_, *k_buffer_;
  double* sum_buffer_;
  float* row_buffer_;
  float* panel_;
  float* weights_;
  float* chunk_sums_;
  float* products_;  // [lanes][kTile]
  float* q_panels_;  // [lanes / kPanel][steps][kPanel]
  const char* q_[kMaxLanes];
  Segment segments_[kMaxLanes];
  int32_t segment_count_ = 0;
  Pager pager_;
  Tile tiles_[2];
  const Tile* tile_ = nullptr;
  int64_t base_ = 0, end_ = 0;  // places from base_ on are to come
  bool failed_ = false;
  const Tile* ahead_ = nullptr;  // to be fetched, from ahead_place_ on
  int ahead_place_ = 0, ahead_places_ = 0;
  const char* k_[kTile];
  alignas(64) float key_scale_[kTile];
  alignas(64) float scores_[kTile];
  Pooling units_[kMaxRows], blocks_[kMaxRows];
};

// bf16 products where queries are bf16 and keys, but for the scales of rows, are too.
#if defined(__AVX512BF16__)
inline bool computes_in_bf16(const SelectParams& p) {
  const Number type = p.keys.k.type;
  return p.q_format == Format::kBf16 && !p.rounded && !p.bounds && !pools_keys(p) &&
         type != Number::kFp32 && type != Number::kFp16;
}
#endif

template <class Use>
SPARSE_ATTN_INLINE auto with_mode(const SelectParams& p, const Use& use) {
#if defined(__AVX512BF16__)
  if (computes_in_bf16(p)) return use(Bf16());
#endif
  (void)p;
  return use(F32());
}

int64_t scratch_bytes(const SelectParams& p, int32_t rows) {
  return with_mode(p, [&](auto mode) { return Scorer<decltype(mode)>::scratch_bytes(p, rows); });
}

int64_t sum_floats(const SelectParams& p, int32_t rows) {
  return p.score == Score::kSoftmaxSum ? int64_t{2} * heads_per_list(p) * rows : 0;
}

int64_t lanes_of(const SelectParams& p, const SelectBlock& block) {
  return int64_t{1} * heads_per_list(p) * block.rows;
}

void clear(const SelectParams& p, const SelectBlock& block, float* sums) {
  clear(sums_at(sums, lanes_of(p, block)), lanes_of(p, block));
}

void merge(const SelectParams& p, const SelectBlock& block, float* from, float* sums) {
  const int64_t lanes = lanes_of(p, block);
  merge_into(sums_at(sums, lanes), sums_at(from, lanes), lanes);
}

bool sum(const SelectParams& p, const SelectBlock& block, int64_t begin, int64_t end, char* scratch,
         float* sums) {
  Carver carver(scratch);
  return with_mode(p, [&](auto mode) {
    Scorer<decltype(mode)> scorer(p, block, &carver);
    return scorer.sum(begin, end, sums_at(sums, lanes_of(p, block)));
  });
}

bool score(const SelectParams& p, const SelectBlock& block, int64_t begin, int64_t end,
           char* scratch, float* sums, uint64_t* spare, RowBest* best) {
  Carver carver(scratch);
  return with_mode(p, [&](auto mode) {
    Scorer<decltype(mode)> scorer(p, block, &carver);
    return scorer.score(begin, end, sums_at(sums, lanes_of(p, block)), spare, best);
  });
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA

extern const SelectKernels SPARSE_ATTN_SELECT_KERNELS = {
    SPARSE_ATTN_ISA::scratch_bytes, SPARSE_ATTN_ISA::sum_floats, SPARSE_ATTN_ISA::clear,
    SPARSE_ATTN_ISA::sum,           SPARSE_ATTN_ISA::merge,      SPARSE_ATTN_ISA::score};

}  // namespace sparse_attn
