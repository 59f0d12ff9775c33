// Products of keys and queries that other ops do not need: bounds, and products that are rounded to
// bf16, with keys in vectors; and products that run over heads, and are joined as they come.
#pragma once

#include "micro.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// Rows of keys at a fixed distance of each other, in bytes: as many as a tile register has rows.
constexpr int kRegister = 16;
struct KeyRows {
  const char* at;
  int64_t stride;
};

// Elements [first, first + dim) of rows of keys as a panel, [dim][kPanel].
inline void pack_panel(const char* const* rows, int32_t first, int32_t dim, float* panel) {
  for (int v = 0; v < kPanel; v += kWidth) {
    const char* from[kWidth];
    for (int i = 0; i < kWidth; ++i) from[i] = rows[v + i] + 4 * first;
    transpose_rows<F32>(from, dim, [=](int32_t step, int count, const Floats* x) {
      for (int j = 0; j < count; ++j) store(panel + (step + j) * kPanel + v, x[j]);
    });
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

#if defined(__AVX512VNNI__)
// Products of integers of 8 bits, exact. One of two bytes has no sign: keys are moved up by kMove,
// and sums start at what that adds less.
struct Int8 : VectorMode {
  typedef uint8_t Element;
  static constexpr Format kFormat = Format::kInt8;
  static constexpr Number kType = Number::kNone;  // of no plane: all keys are moved
  static constexpr int kGroup = 4;
  static constexpr int kMove = 128;

  // Written out: GCC 12 copies vectors of floats that are taken for integers at each step of a
  // loop.
  static SPARSE_ATTN_INLINE Floats dot(Floats key, Floats q, Floats c) {
    asm("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(key), "v"(q));
    return c;
  }
};
#endif

// The heads of a list, whose products run over heads.
struct JoinedHeads {
  int32_t panels;
  const float* q;  // [panels][steps][kPanel]
  const float* weights;
  // Of integers: where sums start, and what products are multiplied by.
  const int32_t* starts;
  const float* q_scales;
};

// Scores of kRows keys from products that run over heads: total[r] is the sum over the heads whose
// numbers agree modulo kWidth. `kScaled`: products are multiplied by the scales of their keys. A
// line from `ahead` on is fetched for every four steps.
template <class Mode, int kRows, bool kRelu, bool kScaled>
SPARSE_ATTN_APART void join_keys(const char* const* rows, int32_t dim, const JoinedHeads& heads,
                                 const float* key_scale, const char* ahead, Floats* total) {
  constexpr bool kIntegers = Mode::kGroup == 4;
  Floats joined[kRows] = {};
  const float* q = heads.q;
  for (int32_t i = 0; i < heads.panels; ++i) {
    const int32_t lane = i * kPanel;
    Floats sum[kRows][2] = {};
    if (kIntegers) {
      const Floats start[2] = {load(heads.starts + lane), load(heads.starts + lane + kWidth)};
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        sum[r][0] = start[0];
        sum[r][1] = start[1];
      }
    }
    add_dots<Mode, kRows, 2>(rows, dim, q, sum, [=](int32_t step) __attribute__((always_inline)) {
      prefetch_l1(ahead + 16 * step);
    });
    q += kPanel * round_up((dim + Mode::kGroup - 1) / Mode::kGroup, Mode::kSteps);
    ahead += dim / (4 * Mode::kGroup) * 64;
    const Floats w[2] = {load(heads.weights + lane), load(heads.weights + lane + kWidth)};
    Floats q_scale[2] = {};
    if (kIntegers) {
      q_scale[0] = load(heads.q_scales + lane);
      q_scale[1] = load(heads.q_scales + lane + kWidth);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        Floats x = sum[r][j];
        if (kIntegers) x = __builtin_convertvector((Ints)x, Floats) * q_scale[j];
        if (kScaled) x *= broadcast(key_scale[r]);
        if (kRelu) x = max(Floats{}, x);
        joined[r] = fma(w[j], x, joined[r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) total[r] = joined[r];
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
