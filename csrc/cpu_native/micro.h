// The inner loops: products of rows of keys with queries (qk), and of probabilities with rows of
// values (pv).
//
// Rows hold elements of the mode's type, kGroup of them in the four bytes of a lane. Both loops
// take four bytes of one operand at a time, broadcast, against vectors of the other. Arm's products
// take them out of a register that holds four times as many. The loops are
//   qk       a key against a panel of queries, one lane per vector element
//   qk_few   a query against keys, one key per vector element (few lanes)
//   qk_fours four steps of a key against those of a few queries, a lane's steps side by side
//   pv       a probability against elements of a value, in the vector
// Each score and each output element is summed in one order, whichever the shape of the loop around
// it is: qk and qk_few agree; calls that use qk_fours use nothing else.
#pragma once

#include "tiles.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// A loop of its own: among other code it would run short of registers for addresses.
#define SPARSE_ATTN_APART static __attribute__((noinline))

// Fetches nothing.
struct NoFetcher {
  void step() {}
};

// What modes that multiply vectors leave to those that multiply tile registers.
struct VectorMode {
  static constexpr bool kAmx = false;
  static constexpr int kSteps = 1;  // of a key, that are multiplied together: these are whole
  struct Registers {};
  struct Products {
    template <class... Sizes>
    explicit Products(const Sizes&...) {}
  };
};

struct F32 : VectorMode {
  typedef float Element;
  static constexpr Format kFormat = Format::kFp32;
  static constexpr Number kType = Number::kFp32;
  static constexpr int kGroup = 1;

  static SPARSE_ATTN_INLINE Floats dot(Floats a, Floats b, Floats c) { return fma(a, b, c); }

#if defined(__aarch64__)
  template <int kLane>
  static SPARSE_ATTN_INLINE Floats dot_lane(Floats a, Floats b, Floats c) {
    return fma_lane<kLane>(a, b, c);
  }
#endif

  // The panel of two vectors of values in group n of the rows.
  static SPARSE_ATTN_INLINE void values(const char* const* rows, int n, int64_t offset, Floats* v) {
    v[0] = load(rows[n] + offset);
    v[1] = load(rows[n] + offset + kBytes);
  }
};

#if defined(SPARSE_ATTN_BF16)
struct Bf16 : VectorMode {
  typedef uint16_t Element;
  static constexpr Format kFormat = Format::kBf16;
  static constexpr Number kType = Number::kBf16;
  static constexpr int kGroup = 2;
#if defined(SPARSE_ATTN_MATRICES)
  static constexpr int kSteps = 2;  // products of matrices
#endif

  static SPARSE_ATTN_INLINE Floats dot(Floats a, Floats b, Floats c) { return dot_bf16(a, b, c); }

#if defined(__aarch64__)
  template <int kLane>
  static SPARSE_ATTN_INLINE Floats dot_lane(Floats a, Floats b, Floats c) {
    return dot_bf16_lane<kLane>(a, b, c);
  }
#endif

  static SPARSE_ATTN_INLINE void values(const char* const* rows, int n, int64_t offset, Floats* v) {
    const Floats even = load(rows[2 * n] + offset), odd = load(rows[2 * n + 1] + offset);
    v[0] = interleave_first(even, odd);
    v[1] = interleave_second(even, odd);
  }
};
#endif

#if defined(__aarch64__)
template <class Use, int... kNumber>
SPARSE_ATTN_INLINE void each(const Use& use, std::integer_sequence<int, kNumber...>) {
  (use(std::integral_constant<int, kNumber>()), ...);
}

// Calls use(0) to use(kCount - 1), with constants.
template <int kCount, class Use>
SPARSE_ATTN_INLINE void each(const Use& use) {
  each(use, std::make_integer_sequence<int, kCount>());
}
#endif

// Keys of one call of `qk`, and lanes of one call of `pv`: two vectors of sums for each, in the
// registers there are.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kQkRows = 8, kPvLanes = 8;
#else
constexpr int kQkRows = 4, kPvLanes = 4;
#endif

#if defined(SPARSE_ATTN_MATRICES)
// `add_dots` by products of matrices: two keys by two lanes, two steps at a time.
template <int kRows, int kVectors, class Between>
SPARSE_ATTN_INLINE void add_matrices(const char* const* rows, int32_t dim, const float* q,
                                     Floats (*sum)[kVectors], const Between& between) {
  static_assert(kRows % 2 == 0, "keys come in pairs");
  const char* row[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) row[r] = rows[r];
  Floats total[kRows][kVectors];  // of two keys: the first lanes of a vector, the last ones
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r += 2) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      total[r][j] = zip<Doubles, 0>(sum[r][j], sum[r + 1][j]);
      total[r + 1][j] = zip<Doubles, 1>(sum[r][j], sum[r + 1][j]);
    }
  }
  // Two steps with the panel at `with`; `a` are those of the pairs of keys.
  const auto multiply = [&](const Floats* a, const float* with) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        const Floats b = load(with + (half * kVectors + j) * kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r += 2)
          total[r + half][j] = multiply_bf16(a[r / 2], b, total[r + half][j]);
      }
    }
  };
  // Four steps of each key, from `offset` on.
  const auto multiply_fours = [&](const char* const* from, int64_t offset, const float* with,
                                  bool all) __attribute__((always_inline)) {
    Floats first[kRows / 2], second[kRows / 2];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r += 2) {
      const Floats x = broadcast_fours(from[r] + offset), y = broadcast_fours(from[r + 1] + offset);
      first[r / 2] = alternate<Doubles, 0>(x, y);
      second[r / 2] = alternate<Doubles, 1>(x, y);
    }
    multiply(first, with);
    if (all) multiply(second, with + 2 * kVectors * kWidth);
  };
  constexpr int kFour = 8;  // elements of four steps
  const int32_t whole = dim / kFour;
  for (int32_t k = 0; k < whole; ++k) {
    between(4 * k);
    multiply_fours(row, 16 * k, q + 4 * k * kVectors * kWidth, true);
  }
  const int32_t rest = dim - whole * kFour;
  if (rest > 0) {
    char last[kRows][16] = {};
    const char* last_rows[kRows];
    for (int r = 0; r < kRows; ++r) {
      memcpy(last[r], row[r] + 16 * whole, static_cast<size_t>(rest) * 2);
      last_rows[r] = last[r];
    }
    multiply_fours(last_rows, 0, q + 4 * whole * kVectors * kWidth, rest > kFour / 2);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r += 2) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      sum[r][j] = unzip<Doubles, 0>(total[r][j], total[r + 1][j]);
      sum[r + 1][j] = unzip<Doubles, 1>(total[r][j], total[r + 1][j]);
    }
  }
}
#endif

// Adds products of kRows keys with a panel of queries to sums: sum[r][j] += key r . queries of
// vector j. `q` holds the panel, [steps][kVectors * kWidth], as `pack_queries` leaves it. Calls
// between(step) at every fourth step.
template <class Mode, int kRows, int kVectors, class Between>
SPARSE_ATTN_INLINE void add_dots(const char* const* rows, int32_t dim, const float* q,
                                 Floats (*sum)[kVectors], const Between& between) {
#if defined(SPARSE_ATTN_MATRICES)
  if constexpr (Mode::kSteps == 2) return add_matrices<kRows, kVectors>(rows, dim, q, sum, between);
#endif
  const char* row[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) row[r] = rows[r];
  const int32_t groups = dim / Mode::kGroup;
  int32_t k = 0;
#if defined(__aarch64__)
  for (; k + 4 <= groups; k += 4) {
    between(k);
    Floats a[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) a[r] = broadcast_fours(row[r] + 4 * k);
    each<4>([&](auto step) {
      Floats b[kVectors];
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) b[j] = load(q + ((k + step) * kVectors + j) * kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int j = 0; j < kVectors; ++j)
          sum[r][j] = Mode::template dot_lane<step>(a[r], b[j], sum[r][j]);
      }
    });
  }
#endif
  for (; k < groups; ++k) {
    if (k % 4 == 0) between(k);
    Floats b[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) b[j] = load(q + (k * kVectors + j) * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Floats a = broadcast_bytes(row[r] + 4 * k);
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[r][j] = Mode::dot(a, b[j], sum[r][j]);
    }
  }
  if (dim % Mode::kGroup != 0) {  // the last element has no neighbour to read
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      uint32_t last = 0;
      memcpy(&last, row[r] + 4 * groups, sizeof(typename Mode::Element));
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        sum[r][j] = Mode::dot(broadcast_bytes(&last), load(q + (groups * kVectors + j) * kWidth),
                              sum[r][j]);
      }
    }
  }
}

// Scores of kRows keys: s[r * ld + lane] = (adds ? s[r * ld + lane] : 0) + key r . query of the
// lane. `q` as above.
template <class Mode, int kRows, int kVectors>
SPARSE_ATTN_APART void qk(const char* const* rows, int32_t dim, const float* q, bool adds, float* s,
                          int64_t ld) {
  Floats sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) sum[r][j] = adds ? load(s + r * ld + j * kWidth) : Floats{};
  }
  add_dots<Mode, kRows, kVectors>(rows, dim, q, sum, [](int32_t) {});
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) store(s + r * ld + j * kWidth, sum[r][j]);
  }
}

// Calls use(step, steps, x) for every four steps of kWidth rows: lane i of x[j] is step `step` + j
// of row i. The last call may have fewer steps; elements beyond `dim` are zero, not read.
template <class Mode, class Use>
SPARSE_ATTN_INLINE void transpose_rows(const char* const* rows, int32_t dim, Use use) {
  const auto transpose = [&](const char* const* from, int64_t offset, int32_t step, int steps) {
    Floats x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const char* row[kWidth / 4];
      for (int i = 0; i < kWidth / 4; ++i) row[i] = from[4 * i + j];
      x[j] = load_fours(row, offset);
    }
    transpose_fours(x);
    use(step, steps, x);
  };
  const int32_t whole = dim / (4 * Mode::kGroup) * 4;  // steps that come in fours
  for (int32_t step = 0; step < whole; step += 4) transpose(rows, 4 * step, step, 4);
  const int32_t rest = dim - whole * Mode::kGroup;  // elements
  if (rest == 0) return;
  char last[kWidth][16] = {};
  const char* last_rows[kWidth];
  for (int r = 0; r < kWidth; ++r) {
    memcpy(last[r], rows[r] + 4 * whole,
           static_cast<size_t>(rest) * sizeof(typename Mode::Element));
    last_rows[r] = last[r];
  }
  transpose(last_rows, 0, whole, (rest + Mode::kGroup - 1) / Mode::kGroup);
}

// Packs kWidth queries as `add_dots` takes them: a vector of lanes in each step of a panel of
// `width` lanes. Products of matrices take two steps side by side, of half of the lanes each.
template <class Mode>
SPARSE_ATTN_INLINE void pack_queries(const char* const* rows, int32_t dim, float* to,
                                     int64_t width) {
  transpose_rows<Mode>(rows, dim, [=](int32_t step, int count, const Floats* x) {
#if defined(SPARSE_ATTN_MATRICES)
    if (Mode::kSteps == 2) {
      for (int j = 0; j < count; j += 2) {
        store(to + (step + j) * width, zip<Floats, 0>(x[j], x[j + 1]));
        store(to + (step + j + 1) * width, zip<Floats, 1>(x[j], x[j + 1]));
      }
      return;
    }
#endif
    for (int j = 0; j < count; ++j) store(to + (step + j) * width, x[j]);
  });
}

// Scores of kWidth keys against kLanes queries: s[lane * ld + key], added to what is there if
// `adds`. Queries are rows of steps, `q_ld` floats apart. The keys are in the vector: sums run as
// in `qk`, and give the same bits.
template <class Mode, int kLanes>
SPARSE_ATTN_APART void qk_few(const char* const* rows, int32_t dim, const float* q, int64_t q_ld,
                              bool adds, float* s, int64_t ld, Prefetcher& prefetcher) {
  Floats sum[kLanes];
#pragma GCC unroll 8
  for (int lane = 0; lane < kLanes; ++lane) sum[lane] = adds ? load(s + lane * ld) : Floats{};
  transpose_rows<Mode>(rows, dim, [&](int32_t step, int steps, const Floats* keys) {
    prefetcher.step();
#if defined(__aarch64__)
    if (steps == 4) {
      Floats a[kLanes];
#pragma GCC unroll 8
      for (int lane = 0; lane < kLanes; ++lane)
        a[lane] = broadcast_fours(reinterpret_cast<const char*>(q + lane * q_ld + step));
      each<4>([&](auto j) {
#pragma GCC unroll 8
        for (int lane = 0; lane < kLanes; ++lane)
          sum[lane] = Mode::template dot_lane<j>(a[lane], keys[j], sum[lane]);
      });
      return;
    }
#endif
#pragma GCC unroll 4
    for (int j = 0; j < steps; ++j) {
#pragma GCC unroll 8
      for (int lane = 0; lane < kLanes; ++lane) {
        sum[lane] = Mode::dot(keys[j], broadcast_bytes(q + lane * q_ld + step + j), sum[lane]);
      }
    }
  });
#pragma GCC unroll 8
  for (int lane = 0; lane < kLanes; ++lane) store(s + lane * ld, sum[lane]);
}

// Scores of kRows keys against the lanes of kVectors vectors, each of kWidth / 4 lanes with four
// steps side by side: s[lane * ld + key], added to what is there if `adds`. Four vectors hold the
// lanes of one, lane 4i + j at place i of vector j, and scores are s[key * ld + lane]. `q` is
// [ceil(steps / 4)][kVectors][kWidth], zeros after the last step. One load of a key serves four
// steps, where `qk` would load four times for the lanes of a single vector. Steps whose numbers
// agree modulo 4 are summed, then these four sums. `fetcher.step()` is called between products.
template <class Mode, int kRows, int kVectors, class Fetcher>
SPARSE_ATTN_APART void qk_fours(const char* const* rows, int32_t dim, const float* q, bool adds,
                                float* s, int64_t ld, Fetcher& fetcher) {
  Floats sum[kRows][kVectors] = {};
  const char* row[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) row[r] = rows[r];
  const auto add = [&](const char* const* from, int64_t offset, const float* with) {
    Floats b[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) b[j] = load(with + j * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Floats a = broadcast_fours(from[r] + offset);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[r][j] = Mode::dot(a, b[j], sum[r][j]);
    }
  };
  const int32_t whole = dim / (4 * Mode::kGroup);
  for (int32_t k = 0; k < whole; ++k) {
    fetcher.step();
    add(row, 16 * k, q + k * kVectors * kWidth);
  }
  const int32_t rest = dim - whole * 4 * Mode::kGroup;  // elements
  if (rest > 0) {
    char last[kRows][16] = {};
    const char* last_rows[kRows];
    for (int r = 0; r < kRows; ++r) {
      memcpy(last[r], row[r] + 16 * whole,
             static_cast<size_t>(rest) * sizeof(typename Mode::Element));
      last_rows[r] = last[r];
    }
    add(last_rows, 0, q + whole * kVectors * kWidth);
  }
  const auto total_of = [](Floats* x) {
    transpose_fours(x);
    return (x[0] + x[1]) + (x[2] + x[3]);
  };
  if constexpr (kVectors == 4) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Floats total = total_of(sum[r]);
      store(s + r * ld, adds ? load(s + r * ld) + total : total);
    }
    return;
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r += 4) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      Floats x[4] = {sum[r][j], sum[r + 1][j], sum[r + 2][j], sum[r + 3][j]};
      FourFloats lanes[kWidth / 4];
      const Floats total = total_of(x);
      memcpy(lanes, &total, sizeof(total));
#pragma GCC unroll 4
      for (int i = 0; i < kWidth / 4; ++i) {
        auto* to = reinterpret_cast<FourFloats*>(s + (j * kWidth / 4 + i) * ld + r);
        *to = adds ? *to + lanes[i] : lanes[i];
      }
    }
  }
}

// Where `pv` finds the values of a panel, as `dot` takes them.
enum class Values { kRows, kRowsToKeep, kKept };

// Panel of outputs of kLanes lanes: o[lane * kPanel + i] = alpha[lane] * o[..] + sum over groups
// [begin, end) of rows. Probabilities of lane l and group n are at p[n * p_ld + l], or at p[l *
// p_ld + n] if kByLane. What `dot` takes of the values of group n is kept, so that other lanes need
// not put it together again, at kept[n * kPanel].
template <class Mode, int kLanes, bool kByLane, Values kValues, class Fetcher>
SPARSE_ATTN_APART void pv(const float* p, int64_t p_ld, const char* const* rows, int64_t offset,
                          int begin, int end, float* kept, const float* alpha, float* o,
                          Fetcher& fetcher) {
  Floats sum[kLanes][2] = {};
  const auto values = [&](int n, Floats* v) {
    fetcher.step();
    if (kValues == Values::kKept) {
      v[0] = load(kept + n * kPanel);
      v[1] = load(kept + n * kPanel + kWidth);
    } else {
      Mode::values(rows, n, offset, v);
    }
    if (kValues == Values::kRowsToKeep) {
      store(kept + n * kPanel, v[0]);
      store(kept + n * kPanel + kWidth, v[1]);
    }
  };
  int n = begin;
#if defined(__aarch64__)
  for (; kByLane && n + 4 <= end; n += 4) {
    Floats a[kLanes];
#pragma GCC unroll 8
    for (int lane = 0; lane < kLanes; ++lane)
      a[lane] = broadcast_fours(reinterpret_cast<const char*>(p + lane * p_ld + n));
    each<4>([&](auto i) {
      Floats v[2];
      values(n + i, v);
#pragma GCC unroll 8
      for (int lane = 0; lane < kLanes; ++lane) {
        sum[lane][0] = Mode::template dot_lane<i>(a[lane], v[0], sum[lane][0]);
        sum[lane][1] = Mode::template dot_lane<i>(a[lane], v[1], sum[lane][1]);
      }
    });
  }
  for (; !kByLane && n < end; ++n) {
    Floats v[2], a[(kLanes + 3) / 4];
    values(n, v);
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; i += 4)
      a[i / 4] = broadcast_fours(reinterpret_cast<const char*>(p + n * p_ld + i));
    each<kLanes>([&](auto lane) {
      sum[lane][0] = Mode::template dot_lane<lane % 4>(a[lane / 4], v[0], sum[lane][0]);
      sum[lane][1] = Mode::template dot_lane<lane % 4>(a[lane / 4], v[1], sum[lane][1]);
    });
  }
#endif
  for (; n < end; ++n) {
    Floats v[2];
    values(n, v);
#pragma GCC unroll 8
    for (int lane = 0; lane < kLanes; ++lane) {
      const Floats a = broadcast_bytes(kByLane ? p + lane * p_ld + n : p + n * p_ld + lane);
      sum[lane][0] = Mode::dot(a, v[0], sum[lane][0]);
      sum[lane][1] = Mode::dot(a, v[1], sum[lane][1]);
    }
  }
#pragma GCC unroll 8
  for (int lane = 0; lane < kLanes; ++lane) {
    const Floats a = broadcast(alpha[lane]);
    float* to = o + lane * kPanel;
    store(to, fma(a, load(to), sum[lane][0]));
    store(to + kWidth, fma(a, load(to + kWidth), sum[lane][1]));
  }
}

#if defined(SPARSE_ATTN_MATRICES)
// Where the probabilities of a pair of lanes are among those of a group of four rows, which lie in
// two rows of scores: each takes half of the lanes of a vector.
SPARSE_ATTN_INLINE int64_t place_of_pair(int32_t lane, int64_t ld) {
  const int32_t column = lane / kWidth * kWidth, in_vector = lane % kWidth * 2;
  return column + in_vector % kWidth + in_vector / kWidth * ld;
}

// `pv` by products of matrices: two lanes by two elements, four rows [4n, 4n + 4) at a time.
// Probabilities of lanes from `lane` on, even if there are several, are in two rows of `p_ld`
// floats for each n. What the product takes of a panel is kept at kept[n * 2 * kPanel].
template <int kLanes, Values kValues, class Fetcher>
SPARSE_ATTN_APART void pv_matrices(const float* p, int64_t p_ld, int32_t lane,
                                   const char* const* rows, int64_t offset, int begin, int end,
                                   float* kept, const float* alpha, float* o, Fetcher& fetcher) {
  constexpr int kPairs = (kLanes + 1) / 2;
  Floats sum[kPairs][4] = {};
  const float* from[kPairs];
#pragma GCC unroll 4
  for (int i = 0; i < kPairs; ++i) from[i] = p + place_of_pair(lane / 2 * 2 + 2 * i, p_ld);
  for (int n = begin; n < end; ++n) {
    fetcher.step();
    fetcher.step();
    Floats v[4];
    if (kValues == Values::kKept) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) v[j] = load(kept + n * 2 * kPanel + j * kWidth);
    } else {
      Floats x[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) x[j] = load(rows[4 * n + j] + offset);
      const Floats a[2] = {zip<Shorts, 0>(x[0], x[1]), zip<Shorts, 1>(x[0], x[1])};
      const Floats b[2] = {zip<Shorts, 0>(x[2], x[3]), zip<Shorts, 1>(x[2], x[3])};
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        v[2 * j] = zip<Floats, 0>(a[j], b[j]);
        v[2 * j + 1] = zip<Floats, 1>(a[j], b[j]);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4 && kValues == Values::kRowsToKeep; ++j)
      store(kept + n * 2 * kPanel + j * kWidth, v[j]);
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
      const Floats a = broadcast_fours(reinterpret_cast<const char*>(from[i] + 2 * n * p_ld));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[i][j] = multiply_bf16(a, v[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) {
    const Floats a = broadcast(alpha[i]), *x = sum[i / 2];
    float* to = o + i * kPanel;
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j, to += kWidth) {
      const bool first = kLanes == 1 ? lane % 2 == 0 : i % 2 == 0;
      const Floats y = first ? unzip<Doubles, 0>(x[2 * j], x[2 * j + 1])
                             : unzip<Doubles, 1>(x[2 * j], x[2 * j + 1]);
      store(to, fma(a, load(to), y));
    }
  }
}
#endif

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
