// Few heads that attend the entries of an index list, in planes with keys and values of their own:
// what a KV head of a GQA model selects. Memory bounds them, and the rows of a head lie apart,
// between those of other heads. So rows are read once, from end to end, and fetched all the time at
// the same rate, from the first product of a tile to the last; and four lanes, whose scores lie
// side by side, are processed together, so that little else is left to do.
#pragma once

#include "convert.h"
#include "partial.h"
#include "softmax.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// Lanes that are processed together. Vectors hold so many lanes of kFourKeys keys.
constexpr int kFour = 4;
constexpr int kFourKeys = kWidth / kFour;
static_assert(kFourKeys <= 4, "sums of four keys are joined");

// Most lanes of a KV head. More would be bound by products.
constexpr int kMostFew = 8;

// Rows that are fetched ahead, and how a line of them is. Rows of a head that lie 2 KB apart share
// two sets of the first-level cache, which hold 24 of them: others drive them out before they are
// read. Processors with AMX do not drop the hint for the second level.
#if defined(__AMX_BF16__)
constexpr int64_t kAhead = 128;
SPARSE_ATTN_INLINE void prefetch_row(const char* line) { prefetch(line); }
#else
constexpr int64_t kAhead = 96;
SPARSE_ATTN_INLINE void prefetch_row(const char* line) { prefetch_l1(line); }
#endif

// The key in place i of vector v of scores. In vectors of even number even keys, in the others odd
// ones, where the probabilities of neighbours become pairs.
template <class Mode>
constexpr int key_of(int v, int i) {
  return (v / Mode::kGroup * kFourKeys + i) * Mode::kGroup + v % Mode::kGroup;
}

// The even or the odd fours of lanes of x and then those of y.
template <bool kOdd, int... kLane>
SPARSE_ATTN_INLINE Floats take_fours(Floats x, Floats y, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(
      x, y,
      (kLane / (kWidth / 2) * kWidth + (kLane % (kWidth / 2) / 4 * 2 + kOdd) * 4 % kWidth +
       kLane % 4)...);
}

// Sums of neighbouring fours of x, and then those of y.
SPARSE_ATTN_INLINE Floats add_neighbours(Floats x, Floats y) {
  const auto lanes = std::make_integer_sequence<int, kWidth>();
  return take_fours<false>(x, y, lanes) + take_fours<true>(x, y, lanes);
}

// Scores of `count` keys, filled up to whole vectors, with four lanes: s[v * kWidth + 4i + lane] of
// key_of(v, i). `q` is [ceil(dim / elements of a vector)][4][kWidth], filled up with zeros.
// Elements whose numbers agree modulo those of a vector are summed, then these sums.
template <class Mode, class Fetcher>
SPARSE_ATTN_APART void qk_four(const char* const* rows, int count, int32_t dim, const float* q,
                               float* s, Fetcher& fetcher) {
  constexpr int kRows = kQkRows / 2;
  constexpr int kElements = kWidth * Mode::kGroup;
  const int32_t whole = dim / kElements;
  const auto rest =
      (dim - whole * kElements) * static_cast<int64_t>(sizeof(typename Mode::Element));
  constexpr int kVectors = kRows / kFourKeys;  // of scores
  const int end =
      (count + kFourKeys * Mode::kGroup - 1) / (kFourKeys * Mode::kGroup) * Mode::kGroup;
  for (int v = 0; v < end; v += kVectors) {
    const char* row[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) row[r] = rows[key_of<Mode>(v + r / kFourKeys, r % kFourKeys)];
    Floats sum[kRows][kFour] = {};
    const auto add = [&](int32_t k, const auto& load_key) {
      Floats b[kFour];
#pragma GCC unroll 4
      for (int j = 0; j < kFour; ++j) b[j] = load(q + (k * kFour + j) * kWidth);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Floats a = load_key(row[r] + k * kBytes);
#pragma GCC unroll 4
        for (int j = 0; j < kFour; ++j) sum[r][j] = Mode::dot(a, b[j], sum[r][j]);
      }
    };
    for (int32_t k = 0; k < whole; ++k) {
      fetcher.step();
      add(k, [](const char* at) { return load(at); });
    }
    if (rest > 0) add(whole, [=](const char* at) { return load_partial(at, rest); });
    Floats total[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      transpose_fours(sum[r]);
      total[r] = (sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]);
    }
    if constexpr (kFourKeys > 1) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows / 2; ++r) total[r] = add_neighbours(total[2 * r], total[2 * r + 1]);
    }
    if constexpr (kFourKeys > 2) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows / 4; ++r) total[r] = add_neighbours(total[2 * r], total[2 * r + 1]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kVectors; ++r) store(s + (v + r) * kWidth, total[r]);
  }
}

// One tile's step of the running softmax of four lanes. `s` as `qk_four` leaves it, of `count`
// keys. Leaves probabilities of groups of keys, s[4 * group + lane].
template <class Mode, class Fetcher>
inline void softmax_four(float* s, int count, float factor, LaneState state, Fetcher& fetcher) {
  constexpr int kKeys = kFourKeys * Mode::kGroup;  // of vectors that are stored together
  const int end = (count + kKeys - 1) / kKeys * Mode::kGroup;
  const auto seen = [=](int v) {
    Ints key;
    for (int i = 0; i < kWidth; ++i) key[i] = key_of<Mode>(v, i / kFour);
    return key < broadcast_int(count);
  };
  Floats maxima = broadcast(-kInfinity);
  for (int v = 0; v < end; ++v) {
    Floats x = load(s + v * kWidth) * broadcast(factor);
    if (v >= count / kKeys * Mode::kGroup) x = seen(v) ? x : broadcast(-kInfinity);
    store(s + v * kWidth, x);
    maxima = max(x, maxima);
  }
  FourFloats four[kFourKeys], before, sum;
  memcpy(&before, state.maximum, sizeof(before));
  memcpy(&sum, state.sum, sizeof(sum));
  memcpy(four, &maxima, sizeof(maxima));
  FourFloats maximum = before;
  for (const FourFloats& x : four) maximum = x > maximum ? x : maximum;
  const auto widen = [](const FourFloats& x) {
    return broadcast_fours(reinterpret_cast<const char*>(&x));
  };
  const Floats all_maximum = widen(maximum);
  Floats sums = {};
  const auto probability = [&](int v) {
    fetcher.step();
    const Floats p = exp2(load(s + v * kWidth) - all_maximum);
    sums += p;
    return p;
  };
  for (int v = 0; v < end; v += Mode::kGroup) {
    if constexpr (Mode::kGroup == 1) {
      store(s + v * kWidth, probability(v));
    } else {
#if defined(SPARSE_ATTN_BF16)
      const Floats even = probability(v);
      store(s + v / 2 * kWidth, pair_bf16(even, probability(v + 1)));
#endif
    }
  }
  const Floats all_alpha = exp2(widen(before) - all_maximum);
  FourFloats alpha;
  memcpy(&alpha, &all_alpha, sizeof(alpha));
  memcpy(four, &sums, sizeof(sums));
  FourFloats added = four[0];
  for (int i = 1; i < kFourKeys; ++i) added += four[i];
  sum = sum * alpha + added;
  memcpy(state.maximum, &maximum, sizeof(maximum));
  memcpy(state.sum, &sum, sizeof(sum));
  memcpy(state.alpha, &alpha, sizeof(alpha));
}

// Panels of outputs of one call of `pv_four`, in the registers there are.
constexpr int kPvPanels = kPvLanes / 4;

// kPanels panels of outputs of four lanes, `o_ld` floats apart, like `pv`. Probabilities as
// `softmax_four` leaves them.
template <class Mode, int kPanels, class Fetcher>
SPARSE_ATTN_APART void pv_four(const float* p, const char* const* rows, int64_t offset, int groups,
                               const float* alpha, float* o, int64_t o_ld, Fetcher& fetcher) {
  constexpr int64_t kBytesOfPanel = kPanel * sizeof(typename Mode::Element);
  Floats sum[kFour][2 * kPanels] = {};
  for (int n = 0; n < groups; ++n) {
    fetcher.step();
    Floats v[2 * kPanels];
#pragma GCC unroll 2
    for (int i = 0; i < kPanels; ++i) Mode::values(rows, n, offset + i * kBytesOfPanel, v + 2 * i);
#pragma GCC unroll 4
    for (int lane = 0; lane < kFour; ++lane) {
      const Floats a = broadcast_bytes(p + n * kFour + lane);
#pragma GCC unroll 4
      for (int j = 0; j < 2 * kPanels; ++j) sum[lane][j] = Mode::dot(a, v[j], sum[lane][j]);
    }
  }
#pragma GCC unroll 4
  for (int lane = 0; lane < kFour; ++lane) {
    const Floats a = broadcast(alpha[lane]);
#pragma GCC unroll 4
    for (int j = 0; j < 2 * kPanels; ++j) {
      float* to = o + j / 2 * o_ld + lane * kPanel + j % 2 * kWidth;
      store(to, fma(a, load(to), sum[lane][j]));
    }
  }
}

// Where the rows of a list lie, and fetching them: tile by tile the keys and then the values. A
// ring of two chunks: one is listed before the tiles of the other come to their end.
class ListedRows {
 public:
  static constexpr int kTileRows = 2 * kTile;
  static constexpr int kTiles = 2 * static_cast<int>(kChunk / kTile);

  void init(const AttendParams& p, const Block& block, int64_t begin, int64_t end,
            const char* zeros, const char** rows) {
    p_ = &p;
    block_ = &block;
    zeros_ = zeros;
    rows_ = rows;
    chunk_ = begin;
    end_ = end;
    bytes_[0] = bytes_of(p.main.k.type, p.main.k.dim);
    bytes_[1] = bytes_of(p.main.v.type, p.main.v.dim);
    pager_.open(p.main, block.sequence);
  }

  // Whether there is a tile of that number: they are counted from 0 on, and asked for in order.
  // False at an entry without a page, too.
  bool list(int64_t tile) {
    while (tile >= tiles_ && chunk_ < end_ && !failed_) list_chunk();
    return tile < tiles_ && !failed_;
  }

  bool failed() const { return failed_; }

  const char* const* keys(int64_t tile) const { return rows_ + tile % kTiles * kTileRows; }
  const char* const* values(int64_t tile) const { return keys(tile) + kTile; }
  int32_t count(int64_t tile) const { return counts_[tile % kTiles]; }
  int64_t chunk(int64_t tile) const { return chunks_[tile % kTiles]; }

  // Fetches up to kAhead rows of `tile` and what is left of those before, evenly in `steps` calls
  // of `step`.
  void open(int64_t tile, int64_t steps) {
    int64_t last = tile * kTileRows + kAhead;
    if (last > tiles_ * kTileRows) last = tiles_ * kTileRows;
    if (last < static_cast<int64_t>(next_)) last = static_cast<int64_t>(next_);
    each_ = static_cast<uint64_t>((last - static_cast<int64_t>(next_)) *
                                  static_cast<int64_t>(kOne) / steps);
    due_ = 0;
  }

  SPARSE_ATTN_INLINE void step() {
    for (due_ += each_; due_ >= kOne; due_ -= kOne) {
      const uint64_t at = next_++ % (kTiles * kTileRows);
      const char* row = rows_[at];
      const char* const end = row + bytes_[at / kTile % 2];
      do {
        prefetch_row(row);
        row += 64;
      } while (row < end);
    }
  }

 private:
  static constexpr uint64_t kOne = 1 << 20;

  void list_chunk() {
    const PlaneParams& plane = p_->main;
    const EntryRange range = visible_range(plane, p_->causal, block_->row, block_->position,
                                           p_->seq_lens[block_->sequence]);
    int64_t count = 0;
    const auto add = [&](const EntryRange& run) {
      for (int64_t entry = run.low; entry < run.high;) {
        Place place;
        if (!pager_.find(entry, &place)) return false;
        int64_t many = plane.page_size - place.offset;
        if (many > run.high - entry) many = run.high - entry;
        entry += many;
        add_rows(place, many, &count);
      }
      return true;
    };
    failed_ = !visit_listed(plane, block_->row, block_->index_head, chunk_ * kChunk, range, add);
    for (int64_t at = 0; at < count; at += kTile, ++tiles_) {
      const int64_t tile = tiles_ % kTiles;
      chunks_[tile] = chunk_;
      counts_[tile] = static_cast<int32_t>(count - at < kTile ? count - at : kTile);
      for (int32_t n = counts_[tile]; n < kTile; ++n)
        rows_[tile * kTileRows + n] = rows_[tile * kTileRows + kTile + n] = zeros_;
    }
    ++chunk_;
  }

  void add_rows(const Place& place, int64_t many, int64_t* count) {
    const PagedRows &k = p_->main.k, &v = p_->main.v;
    const char* key = k.data + block_->kv_head * k.head_stride + place.page * k.page_stride +
                      place.offset * k.entry_stride;
    const char* value = v.data + block_->kv_head * v.head_stride + place.page * v.page_stride +
                        place.offset * v.entry_stride;
    while (many > 0) {
      const int64_t n = *count % kTile;
      const char** to = rows_ + (tiles_ + *count / kTile) % kTiles * kTileRows + n;
      const int64_t here = many < kTile - n ? many : kTile - n;
      for (int64_t i = 0; i < here; ++i, key += k.entry_stride, value += v.entry_stride) {
        to[i] = key;
        to[kTile + i] = value;
      }
      many -= here;
      *count += here;
    }
  }

  const AttendParams* p_ = nullptr;
  const Block* block_ = nullptr;
  const char* zeros_ = nullptr;
  const char** rows_ = nullptr;  // [kTiles][keys, values][kTile]
  int64_t chunk_ = 0, end_ = 0;  // chunks that are not listed
  int64_t tiles_ = 0;            // that are listed
  bool failed_ = false;
  Pager pager_;
  int32_t counts_[kTiles];
  int64_t chunks_[kTiles];
  int64_t bytes_[2];
  uint64_t next_ = 0;            // the row to fetch
  uint64_t each_ = 0, due_ = 0;  // rows of a step, in parts of kOne
};

// What is left to a class of products, `Own`: Registers, what it holds as long as it multiplies;
// pack(), and attend_tile(tile, into).
template <class Mode, class Own>
class ListedAttention {
 public:
  static bool serves(const AttendParams& p) {
    const PlaneParams& plane = p.main;
    return plane.listed && !p.window.given && plane.k.type == Mode::kType && plane.rope.dim == 0 &&
           plane.v.dim > 0 && plane.v.type == Mode::kType && plane.k_scale.dim == 0 &&
           plane.v_scale.dim == 0 && heads_per_group(p) <= kMostFew;
  }

  // See Kernels::attend.
  bool run(int64_t begin, int64_t end, float* partials) {
    [[maybe_unused]] const typename Own::Registers registers;
    memset(zeros_, 0, static_cast<size_t>(zeros_bytes_));
    listed_.init(p_, block_, begin, end, zeros_, rows_);
    if (listed_.list(0)) {
      listed_.open(0, 1);
      listed_.step();
    }
    auto* own = static_cast<Own*>(this);
    own->pack();
    ChunkResults results(shape_, begin, end, partials, partials_);
    for (int64_t tile = 0; listed_.list(tile); ++tile) {
      listed_.list(tile + 1);
      own->attend_tile(tile, results.of(listed_.chunk(tile)));
    }
    if (listed_.failed()) return false;
    results.close(p_, block_);
    return true;
  }

 protected:
  typedef typename Mode::Element Element;

  static constexpr int64_t kElement = sizeof(Element);

  ListedAttention(const AttendParams& p, const Block& block, Carver* carver)
      : p_(p), block_(block), shape_(p, lanes_of(block)) {
    zeros_bytes_ = round_up((p.qk_dim > p.v_dim ? p.qk_dim : p.v_dim) * kElement, kBytes);
    zeros_ = carver->take<char>(zeros_bytes_);
    rows_ = carver->take<const char*>(ListedRows::kTiles * ListedRows::kTileRows);
    for (float*& partial : partials_) partial = carver->take<float>(shape_.partial_floats());
  }

  int64_t fours() const { return (shape_.lanes + kFour - 1) / kFour; }

  const char* query(int32_t lane) const {
    return p_.q + block_.row * p_.q_strides[0] + (block_.head + lane) * p_.q_strides[1];
  }

  // What scores are multiplied by: powers are of two.
  float factor() const { return static_cast<float>(p_.scale * 1.44269504088896341); }

  const AttendParams& p_;
  const Block& block_;
  const Shape shape_;
  int64_t zeros_bytes_;
  char* zeros_;
  ListedRows listed_;

 private:
  const char** rows_;
  float* partials_[2];
};

template <class Mode>
class FewAttention : public ListedAttention<Mode, FewAttention<Mode>> {
  typedef ListedAttention<Mode, FewAttention> Base;
  friend Base;

 public:
  FewAttention(const AttendParams& p, const Block& block, Carver* carver) : Base(p, block, carver) {
    q_ = carver->take<float>(fours() * packed_floats());
    q_row_ = carver->take<float>(p.q_format == Mode::kFormat ? 0 : p.qk_dim);
    scores_ = carver->take<float>(fours() * kTile * kFour);
    alpha_ = carver->take<float>(fours() * kFour);
    v_rest_ = carver->take<Element>(kTile * kPanel);
  }

 private:
  using Base::fours, Base::kElement, Base::listed_, Base::p_, Base::shape_;
  using typename Base::Element;
  typedef typename Mode::Registers Registers;

  static constexpr int kElements = kWidth * Mode::kGroup;  // of a vector

  int64_t packed_floats() const { return (p_.qk_dim + kElements - 1) / kElements * kFour * kWidth; }

  // Packs the queries as `qk_four` takes them.
  void pack() {
    memset(q_, 0, static_cast<size_t>(fours() * packed_floats()) * 4);
    for (int32_t lane = 0; lane < shape_.lanes; ++lane) {
      const char* row = Base::query(lane);
      if (p_.q_format != Mode::kFormat) {
        convert_row(codec_of(p_.q_format).element, row, p_.qk_dim, q_row_);
        row = reinterpret_cast<const char*>(q_row_);
      }
      float* to = q_ + lane / kFour * packed_floats() + lane % kFour * kWidth;
      for (int32_t d = 0; d < p_.qk_dim; d += kElements, to += kFour * kWidth) {
        const int32_t count = p_.qk_dim - d < kElements ? p_.qk_dim - d : kElements;
        memcpy(to, row + d * kElement, static_cast<size_t>(count * kElement));
      }
    }
  }

  void attend_tile(int64_t tile, const Partial& into) {
    const int32_t count = listed_.count(tile);
    const int64_t calls = (p_.v_dim + kPvPanels * kPanel - 1) / (kPvPanels * kPanel);
    const int64_t groups = (count + Mode::kGroup - 1) / Mode::kGroup;
    const int64_t keys = round_up(count, kFourKeys * Mode::kGroup);
    const int64_t qk = keys / kQkRows * 2 * (p_.qk_dim / kElements);
    listed_.open(tile + 1, fours() * (qk + keys / kFourKeys + calls * groups));
    for (int64_t i = 0; i < fours(); ++i) {
      qk_four<Mode>(listed_.keys(tile), count, p_.qk_dim, q_ + i * packed_floats(), scores(i),
                    listed_);
    }
    for (int64_t i = 0; i < fours(); ++i) {
      const int64_t lane = i * kFour;
      const LaneState state = {into.maximum + lane, into.sum + lane, alpha_ + lane};
      softmax_four<Mode>(scores(i), count, Base::factor(), state, listed_);
    }
    multiply_values(listed_.values(tile), count, static_cast<int>(groups), into);
  }

  float* scores(int64_t four) const { return scores_ + four * kTile * kFour; }

  void multiply_values(const char* const* rows, int32_t count, int groups, const Partial& into) {
    const int32_t whole = p_.v_dim / kPanel * kPanel;
    int32_t d = 0;
    for (; d + kPvPanels * kPanel <= whole; d += kPvPanels * kPanel)
      multiply_panels<kPvPanels>(rows, d * kElement, groups, d, into);
    for (; d < whole; d += kPanel) multiply_panels<1>(rows, d * kElement, groups, d, into);
    if (d == p_.v_dim) return;
    const char* rest[kTile];  // the last elements, filled up with zeros
    memset(v_rest_, 0, kTile * kPanel * kElement);
    for (int32_t n = 0; n < kTile; ++n) {
      Element* to = v_rest_ + n * kPanel;
      if (n < count)
        memcpy(to, rows[n] + d * kElement, static_cast<size_t>((p_.v_dim - d) * kElement));
      rest[n] = reinterpret_cast<const char*>(to);
    }
    multiply_panels<1>(rest, 0, groups, d, into);
  }

  template <int kPanels>
  void multiply_panels(const char* const* rows, int64_t offset, int groups, int32_t d,
                       const Partial& into) {
    for (int64_t i = 0; i < fours(); ++i) {
      pv_four<Mode, kPanels>(scores(i), rows, offset, groups, alpha_ + i * kFour,
                             into.o + d * shape_.padded_lanes + i * kFour * kPanel,
                             shape_.padded_lanes * kPanel, listed_);
    }
  }

  float* q_;
  float* q_row_;
  float* scores_;
  float* alpha_;
  Element* v_rest_;
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn

#if defined(__AMX_BF16__)
#include "attend_few_amx.h"
#endif
