// Vectors of kWidth floats for the instruction set that the including file is compiled for. Plain
// compiler vectors, so that one source serves x86 and Arm; intrinsics only where compilers do not
// find the instruction. Everything has internal linkage: no function built for one instruction set
// may be shared with another.
#pragma once

#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../common/layout.h"
#include "../common/number.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kBytes = 4 * kWidth;

typedef float Floats __attribute__((vector_size(kBytes)));
typedef int32_t Ints __attribute__((vector_size(kBytes)));
typedef float UnalignedFloats __attribute__((vector_size(kBytes), aligned(1), may_alias));

#define SPARSE_ATTN_INLINE inline __attribute__((always_inline))

SPARSE_ATTN_INLINE Floats load(const void* p) { return *static_cast<const UnalignedFloats*>(p); }

SPARSE_ATTN_INLINE void store(void* p, Floats x) { *static_cast<UnalignedFloats*>(p) = x; }

// The first `bytes` bytes at p, then zeros. Reads nothing beyond.
SPARSE_ATTN_INLINE Floats load_partial(const void* p, int64_t bytes) {
  Floats x = {};
  memcpy(&x, p, static_cast<size_t>(bytes));
  return x;
}

SPARSE_ATTN_INLINE Floats broadcast(float x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (Floats)_mm256_set1_ps(x);
#else
  return Floats{x, x, x, x};
#endif
}

// The same four bytes in every lane.
SPARSE_ATTN_INLINE Floats broadcast_bytes(const void* p) {
  float x;
  memcpy(&x, p, 4);
  return broadcast(x);
}

SPARSE_ATTN_INLINE Ints broadcast_int(int32_t x) { return Ints{} + x; }

// a * b + c
SPARSE_ATTN_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// The larger; `b` if either is NaN.
SPARSE_ATTN_INLINE Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

SPARSE_ATTN_INLINE float max(float a, float b) { return a > b ? a : b; }

SPARSE_ATTN_INLINE float sum(Floats x) {  // halves are added, as in `sums`
  float lane[kWidth];
  store(lane, x);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

SPARSE_ATTN_INLINE float largest(Floats x) {
  float lane[kWidth];
  store(lane, x);
  float result = lane[0];
  for (int i = 1; i < kWidth; ++i) result = max(lane[i], result);
  return result;
}

// 2^x for x <= 0, within one unit in the last place. Exactly 1 at 0 and exactly 0 below -126; NaN
// stays NaN. The polynomial is the minimax fit of the relative error on [-1/2, 1/2] with p(0) = 1.
SPARSE_ATTN_INLINE Floats exp2(Floats x) {
  const Floats shift = broadcast(0x1.8p23f);  // the last bits of x + shift hold the nearest integer
  const Floats shifted = x + shift;
  const Floats f = x - (shifted - shift);
  Floats y = broadcast(0x1.41fbbcp-13f);
  y = fma(y, f, broadcast(0x1.5f3e54p-10f));
  y = fma(y, f, broadcast(0x1.3b2d4cp-7f));
  y = fma(y, f, broadcast(0x1.c6aee8p-5f));
  y = fma(y, f, broadcast(0x1.ebfbdcp-3f));
  y = fma(y, f, broadcast(0x1.62e430p-1f));
  y = fma(y, f, broadcast(1.0f));
  const Ints power = ((Ints)shifted << 23) + broadcast_int(0x3f800000);
  return x < broadcast(-126.0f) ? broadcast(0.0f) : y * (Floats)power;
}

SPARSE_ATTN_INLINE float exp2(float x) { return exp2(broadcast(x))[0]; }

template <int kBlock, int... kLane>
SPARSE_ATTN_INLINE Floats add_blocks(Floats x, Floats y, std::integer_sequence<int, kLane...>) {
  // Blocks 2i and 2i + 1 of x are added into block 2i, those of y into block 2i + 1.
  const Floats even =
      __builtin_shufflevector(x, y, (kLane / kBlock % 2 == 0 ? kLane : kLane - kBlock + kWidth)...);
  const Floats odd =
      __builtin_shufflevector(x, y, (kLane / kBlock % 2 == 0 ? kLane + kBlock : kLane + kWidth)...);
  return even + odd;
}

// Lane i holds the sum of x[i * kStep]'s lanes, for kWidth / kStep vectors; every sum is taken in
// the order of `sum`.
template <int kStep = 1>
SPARSE_ATTN_INLINE Floats sums(const Floats* x) {
  if constexpr (kStep == kWidth) {
    return x[0];
  } else {
    return add_blocks<kStep>(sums<2 * kStep>(x), sums<2 * kStep>(x + kStep),
                             std::make_integer_sequence<int, kWidth>());
  }
}

// kWidth elements of a format at p, as floats.
template <Format kFormat>
SPARSE_ATTN_INLINE Floats load_as_floats(const char* p) {
  if constexpr (kFormat == Format::kFp32) {
    return load(p);
  } else if constexpr (kFormat == Format::kBf16) {
    typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));
    Halves x;
    memcpy(&x, p, sizeof(x));
    return (Floats)(__builtin_convertvector(x, Ints) << 16);
  } else if constexpr (kFormat == Format::kFp16) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p))));
#else
    uint16_t x[kWidth];
    memcpy(x, p, sizeof(x));
    Floats y;
    for (int i = 0; i < kWidth; ++i) y[i] = half_to_float(x[i]);
    return y;
#endif
  } else {
    typedef int8_t Bytes __attribute__((vector_size(kWidth)));
    Bytes x;
    memcpy(&x, p, sizeof(x));
    return __builtin_convertvector(x, Floats);
  }
}

#if defined(__AVX512BF16__)
// c + a[2i + 1] * b[2i + 1] + a[2i] * b[2i] over pairs of bf16, in that order, each step rounded to
// float32. Denormal inputs count as zero and denormal results become zero.
SPARSE_ATTN_INLINE Floats dot_bf16(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}

// `low` and then `high`, rounded to bf16.
SPARSE_ATTN_INLINE Floats join_bf16(Floats low, Floats high) {
  return (Floats)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

typedef int16_t Shorts __attribute__((vector_size(kBytes)));

template <int kFirst, int... kPair>
SPARSE_ATTN_INLINE Floats interleave_bf16(Floats x, Floats y,
                                          std::integer_sequence<int, kPair...>) {
  constexpr int kHalf = kWidth;  // elements in half a vector
  return (Floats)__builtin_shufflevector((Shorts)x, (Shorts)y,
                                         (kFirst * kHalf + kPair / 2 + (kPair % 2) * 2 * kHalf)...);
}

// Pairs (x[i], y[i]) of the first half of x and y.
SPARSE_ATTN_INLINE Floats interleave_first(Floats x, Floats y) {
  return interleave_bf16<0>(x, y, std::make_integer_sequence<int, 2 * kWidth>());
}

// Pairs (x[i], y[i]) of the second half.
SPARSE_ATTN_INLINE Floats interleave_second(Floats x, Floats y) {
  return interleave_bf16<1>(x, y, std::make_integer_sequence<int, 2 * kWidth>());
}

// Lane i holds the pair (even[i], odd[i]), rounded to bf16.
SPARSE_ATTN_INLINE Floats pair_bf16(Floats even, Floats odd) {
  const Floats joined = join_bf16(even, odd);
  const Shorts x = (Shorts)joined;
  return (Floats)__builtin_shufflevector(x, x, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7,
                                         23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30,
                                         15, 31);
}
#endif

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
