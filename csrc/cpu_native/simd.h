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
#if __ARM_FEATURE_SVE_BITS == 256
#define SPARSE_ATTN_SVE
#include <arm_sve.h>
#endif
#endif

// Products of pairs of bf16.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define SPARSE_ATTN_BF16
#if defined(__aarch64__)
#define SPARSE_ATTN_MATRICES  // of two by four of them
#endif
#endif

#include "../common/layout.h"
#include "../common/number.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__) || defined(SPARSE_ATTN_SVE)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kBytes = 4 * kWidth;

typedef float Floats __attribute__((vector_size(kBytes)));
typedef int32_t Ints __attribute__((vector_size(kBytes)));
typedef float UnalignedFloats __attribute__((vector_size(kBytes), aligned(1), may_alias));

typedef int16_t Shorts __attribute__((vector_size(kBytes)));

#define SPARSE_ATTN_INLINE inline __attribute__((always_inline))

#if defined(SPARSE_ATTN_SVE)
// The same vectors as intrinsics take them.
typedef svfloat32_t SveFloats __attribute__((arm_sve_vector_bits(256)));
typedef svint32_t SveInts __attribute__((arm_sve_vector_bits(256)));
typedef svfloat64_t SveDoubles __attribute__((arm_sve_vector_bits(256)));

// A product added to the vector `c`. Not the intrinsic, for which GCC 12 copies sums in every turn
// of a loop.
#define SPARSE_ATTN_SVE_ADD(instruction, c, ...) \
  asm(instruction : "+w"(c) : __VA_ARGS__);      \
  return c
#endif

SPARSE_ATTN_INLINE Floats load(const void* p) { return *static_cast<const UnalignedFloats*>(p); }

SPARSE_ATTN_INLINE void store(void* p, Floats x) { *static_cast<UnalignedFloats*>(p) = x; }

// To an aligned place, past the caches where there is an instruction for it.
SPARSE_ATTN_INLINE void stream(void* p, Floats x) {
#if defined(__AVX512F__)
  _mm512_stream_ps(static_cast<float*>(p), (__m512)x);
#elif defined(__AVX2__)
  _mm256_stream_ps(static_cast<float*>(p), (__m256)x);
#elif defined(__x86_64__)
  _mm_stream_ps(static_cast<float*>(p), x);
#else
  store(p, x);
#endif
}

// The first `bytes` bytes at p, then zeros. Reads nothing beyond.
SPARSE_ATTN_INLINE Floats load_partial(const void* p, int64_t bytes) {
#if defined(__AVX512BW__)
  const uint64_t all = ~uint64_t{0};
  return (Floats)_mm512_maskz_loadu_epi8(bytes == 0 ? 0 : all >> (kBytes - bytes), p);
#else
  Floats x = {};
  memcpy(&x, p, static_cast<size_t>(bytes));
  return x;
#endif
}

// Into the second-level cache: the first level has too few buffers for what gathers miss.
// Processors may drop this hint where the page of memory must be looked up first.
SPARSE_ATTN_INLINE void prefetch(const char* p) { __builtin_prefetch(p, 0, 2); }

// Into the first-level cache too: for what is read soon, a line at a time. Not dropped.
SPARSE_ATTN_INLINE void prefetch_l1(const char* p) { __builtin_prefetch(p, 0, 3); }

SPARSE_ATTN_INLINE Floats broadcast(float x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (Floats)_mm256_set1_ps(x);
#elif defined(SPARSE_ATTN_SVE)
  return svdup_f32(x);
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

// Whether `fma` rounds once.
#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kFusedProducts = true;
#else
constexpr bool kFusedProducts = false;
#endif

// a * b + c
SPARSE_ATTN_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(SPARSE_ATTN_SVE)
  return svmla_x(svptrue_b32(), (SveFloats)c, (SveFloats)a, (SveFloats)b);
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

// The smaller; `b` if either is NaN.
SPARSE_ATTN_INLINE Floats min(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

SPARSE_ATTN_INLINE Ints max(Ints a, Ints b) {
#if defined(__AVX512F__)
  return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}

SPARSE_ATTN_INLINE float max(float a, float b) { return a > b ? a : b; }

SPARSE_ATTN_INLINE float largest(Floats x) {
  float lane[kWidth];
  store(lane, x);
  float result = lane[0];
  for (int i = 1; i < kWidth; ++i) result = max(lane[i], result);
  return result;
}

typedef int32_t FourInts __attribute__((vector_size(16)));

SPARSE_ATTN_INLINE int32_t highest(Ints x) {
  FourInts four[kWidth / 4];
  memcpy(four, &x, sizeof(x));
  for (int i = 1; i < kWidth / 4; ++i) four[0] = four[i] > four[0] ? four[i] : four[0];
  int32_t result = four[0][0];
  for (int i = 1; i < 4; ++i) result = four[0][i] > result ? four[0][i] : result;
  return result;
}

template <int... kLane>
SPARSE_ATTN_INLINE Ints max_of_pairs(Ints x, Ints y, std::integer_sequence<int, kLane...>) {
  return max(__builtin_shufflevector(x, y, (2 * kLane)...),
             __builtin_shufflevector(x, y, (2 * kLane + 1)...));
}

// Lane i is the highest lane of x[i], of kWidth vectors, which are lost.
SPARSE_ATTN_INLINE Ints highest_of_each(Ints* x) {
  for (int count = kWidth / 2; count > 0; count /= 2) {
    for (int i = 0; i < count; ++i)
      x[i] = max_of_pairs(x[2 * i], x[2 * i + 1], std::make_integer_sequence<int, kWidth>());
  }
  return x[0];
}

// Bit i: a[i] > b[i]. NaN is not.
SPARSE_ATTN_INLINE uint32_t greater(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)));
#elif defined(SPARSE_ATTN_SVE)
  const Ints bits = (a > b) & Ints{1, 2, 4, 8, 16, 32, 64, 128};
  return static_cast<uint32_t>(svorv(svptrue_b32(), (SveInts)bits));
#elif defined(__aarch64__)
  return static_cast<uint32_t>(vaddvq_s32((a > b) & Ints{1, 2, 4, 8}));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= static_cast<uint32_t>(a[i] > b[i]) << i;
  return bits;
#endif
}

// Rounded to the nearest number of bf16, ties to even; NaN stays NaN.
SPARSE_ATTN_INLINE Floats round_to_bf16(Floats x) {
  const Ints bits = (Ints)x;
  const Ints odd = (bits >> 16) & broadcast_int(1);
  const Ints rounded = (bits + broadcast_int(0x7fff) + odd) & broadcast_int(~0xffff);
  return x == x ? (Floats)rounded : x;
}

typedef double Doubles __attribute__((vector_size(kBytes)));
typedef float HalfFloats __attribute__((vector_size(kBytes / 2), aligned(4), may_alias));

constexpr int kDoubles = kWidth / 2;

SPARSE_ATTN_INLINE Doubles load_doubles(const float* p) {
  return __builtin_convertvector(*reinterpret_cast<const HalfFloats*>(p), Doubles);
}

SPARSE_ATTN_INLINE void store_floats(float* p, Doubles x) {
  *reinterpret_cast<HalfFloats*>(p) = __builtin_convertvector(x, HalfFloats);
}

#if defined(__aarch64__)
// a * b + c, of a one lane in every four.
template <int kLane>
SPARSE_ATTN_INLINE Floats fma_lane(Floats a, Floats b, Floats c) {
#if defined(SPARSE_ATTN_SVE)
  SPARSE_ATTN_SVE_ADD("fmla %0.s, %1.s, %2.s[%3]", c, "w"(b), "y"(a), "i"(kLane));
#else
  return vfmaq_laneq_f32(c, b, a, kLane);
#endif
}
#endif

// a * b + c
SPARSE_ATTN_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__)
  return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(SPARSE_ATTN_SVE)
  return svmla_x(svptrue_b64(), (SveDoubles)c, (SveDoubles)a, (SveDoubles)b);
#elif defined(__aarch64__)
  return vfmaq_f64(c, a, b);
#else
  return a * b + c;
#endif
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

typedef float FourFloats __attribute__((vector_size(16), aligned(1), may_alias));

// The same four floats in every four lanes.
SPARSE_ATTN_INLINE Floats broadcast_fours(const char* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_broadcast_f32x4(_mm_loadu_ps(reinterpret_cast<const float*>(p)));
#elif defined(__AVX2__)
  return (Floats)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
#elif defined(SPARSE_ATTN_SVE)
  // Of bytes, whose addresses may be sums.
  return svreinterpret_f32(svld1rq(svptrue_b8(), reinterpret_cast<const uint8_t*>(p)));
#else
  return load(p);
#endif
}

// Lane 4i + j is element j of p[i].
SPARSE_ATTN_INLINE Floats load_fours(const char* const* p, int64_t offset) {
  [[maybe_unused]] const auto four = [=](int i) {
    return *reinterpret_cast<const FourFloats*>(p[i] + offset);
  };
#if defined(__AVX512F__)
  __m512 x = _mm512_castps128_ps512(four(0));
  x = _mm512_mask_broadcast_f32x4(x, 0x00f0, four(1));
  x = _mm512_mask_broadcast_f32x4(x, 0x0f00, four(2));
  return (Floats)_mm512_mask_broadcast_f32x4(x, 0xf000, four(3));
#elif defined(__AVX2__)
  return (Floats)_mm256_insertf128_ps(_mm256_castps128_ps256(four(0)), four(1), 1);
#elif defined(SPARSE_ATTN_SVE)
  return svsel(svptrue_pat_b32(SV_VL4), (SveFloats)broadcast_fours(p[0] + offset),
               (SveFloats)broadcast_fours(p[1] + offset));
#else
  return four(0);
#endif
}

#if defined(__aarch64__)
template <class Vector>
constexpr int kLanesOf = sizeof(Vector) / sizeof(Vector{}[0]);

// What follows rearranges lanes as large as those of `Vector`.

// Every other lane of x and of y from kFirst on, by turns.
template <class Vector, int kFirst, int... kLane>
SPARSE_ATTN_INLINE Floats alternate(Floats x, Floats y, std::integer_sequence<int, kLane...>) {
  return (Floats)__builtin_shufflevector(
      (Vector)x, (Vector)y, (kLane / 2 * 2 + kFirst + kLane % 2 * kLanesOf<Vector>)...);
}

template <class Vector, int kFirst>
SPARSE_ATTN_INLINE Floats alternate(Floats x, Floats y) {
  return alternate<Vector, kFirst>(x, y, std::make_integer_sequence<int, kLanesOf<Vector>>());
}

// The first (kHalf 0) or second halves of x and y, by turns.
template <class Vector, int kHalf, int... kLane>
SPARSE_ATTN_INLINE Floats zip(Floats x, Floats y, std::integer_sequence<int, kLane...>) {
  constexpr int kLanes = kLanesOf<Vector>;
  return (Floats)__builtin_shufflevector((Vector)x, (Vector)y,
                                         (kHalf * kLanes / 2 + kLane / 2 + kLane % 2 * kLanes)...);
}

template <class Vector, int kHalf>
SPARSE_ATTN_INLINE Floats zip(Floats x, Floats y) {
  return zip<Vector, kHalf>(x, y, std::make_integer_sequence<int, kLanesOf<Vector>>());
}

// Every other lane of x from kFirst on, then of y.
template <class Vector, int kFirst, int... kLane>
SPARSE_ATTN_INLINE Floats unzip(Floats x, Floats y, std::integer_sequence<int, kLane...>) {
  return (Floats)__builtin_shufflevector((Vector)x, (Vector)y, (2 * kLane + kFirst)...);
}

template <class Vector, int kFirst>
SPARSE_ATTN_INLINE Floats unzip(Floats x, Floats y) {
  return unzip<Vector, kFirst>(x, y, std::make_integer_sequence<int, kLanesOf<Vector>>());
}
#else
// Of each four lanes of x and those of y, which count on from 4: four.
template <int... kPicked, int... kLane>
SPARSE_ATTN_INLINE Floats pick(Floats x, Floats y, std::integer_sequence<int, kLane...>) {
  constexpr int kFrom[] = {kPicked...};
  return __builtin_shufflevector(
      x, y, (kLane / 4 * 4 + kFrom[kLane % 4] % 4 + kFrom[kLane % 4] / 4 * kWidth)...);
}

template <int... kPicked>
SPARSE_ATTN_INLINE Floats pick(Floats x, Floats y) {
  return pick<kPicked...>(x, y, std::make_integer_sequence<int, kWidth>());
}
#endif

// x[j] holds, four lanes each, rows j, 4 + j, 8 + j, ... Then lane i of x[j] is element j of row i.
SPARSE_ATTN_INLINE void transpose_fours(Floats* x) {
#if defined(__aarch64__)
  const Floats a = alternate<Floats, 0>(x[0], x[1]), b = alternate<Floats, 0>(x[2], x[3]);
  const Floats c = alternate<Floats, 1>(x[0], x[1]), d = alternate<Floats, 1>(x[2], x[3]);
  x[0] = alternate<Doubles, 0>(a, b);
  x[1] = alternate<Doubles, 0>(c, d);
  x[2] = alternate<Doubles, 1>(a, b);
  x[3] = alternate<Doubles, 1>(c, d);
#else
  const Floats a = pick<0, 4, 1, 5>(x[0], x[1]), b = pick<0, 4, 1, 5>(x[2], x[3]);
  const Floats c = pick<2, 6, 3, 7>(x[0], x[1]), d = pick<2, 6, 3, 7>(x[2], x[3]);
  x[0] = pick<0, 1, 4, 5>(a, b);
  x[1] = pick<2, 3, 6, 7>(a, b);
  x[2] = pick<0, 1, 4, 5>(c, d);
  x[3] = pick<2, 3, 6, 7>(c, d);
#endif
}

// Sums of lanes whose numbers agree modulo 4, the lowest lane first.
SPARSE_ATTN_INLINE FourFloats add_fours(FourFloats sum, Floats x) {
  FourFloats four[kWidth / 4];
  memcpy(four, &x, sizeof(x));
  for (int i = 0; i < kWidth / 4; ++i) sum += four[i];
  return sum;
}

// Block i of x[j] becomes block j of x[i]; blocks are of four lanes.
SPARSE_ATTN_INLINE void transpose_blocks(Floats* x) {
#if defined(__AVX512F__)
  const __m512 a = _mm512_shuffle_f32x4((__m512)x[0], (__m512)x[1], 0x44);
  const __m512 b = _mm512_shuffle_f32x4((__m512)x[0], (__m512)x[1], 0xee);
  const __m512 c = _mm512_shuffle_f32x4((__m512)x[2], (__m512)x[3], 0x44);
  const __m512 d = _mm512_shuffle_f32x4((__m512)x[2], (__m512)x[3], 0xee);
  x[0] = (Floats)_mm512_shuffle_f32x4(a, c, 0x88);
  x[1] = (Floats)_mm512_shuffle_f32x4(a, c, 0xdd);
  x[2] = (Floats)_mm512_shuffle_f32x4(b, d, 0x88);
  x[3] = (Floats)_mm512_shuffle_f32x4(b, d, 0xdd);
#elif defined(__AVX2__) || defined(SPARSE_ATTN_SVE)
  const Floats first = x[0];
  x[0] = __builtin_shufflevector(first, x[1], 0, 1, 2, 3, 8, 9, 10, 11);
  x[1] = __builtin_shufflevector(first, x[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
  (void)x;  // of a single block
#endif
}

// Lane i is the sum of the lanes of x[i]: of each four lanes, then of these sums, the lowest first.
SPARSE_ATTN_INLINE Floats add_across(Floats* x) {
  Floats fours[kWidth / 4];
#pragma GCC unroll 4
  for (int i = 0; i < kWidth / 4; ++i) {
    Floats* y = x + 4 * i;
    transpose_fours(y);
    fours[i] = (y[0] + y[1]) + (y[2] + y[3]);
  }
  transpose_blocks(fours);
  Floats sum = {};
#pragma GCC unroll 4
  for (int i = 0; i < kWidth / 4; ++i) sum += fours[i];
  return sum;
}

// The largest of lanes whose numbers agree modulo 4, and of `most`, which is no NaN.
SPARSE_ATTN_INLINE FourFloats max_fours(FourFloats most, Floats x) {
  FourFloats four[kWidth / 4];
  memcpy(four, &x, sizeof(x));
  for (int i = 0; i < kWidth / 4; ++i) most = four[i] > most ? four[i] : most;
  return most;
}

// kWidth bytes at p.
SPARSE_ATTN_INLINE Ints load_bytes(const char* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#elif defined(SPARSE_ATTN_SVE)
  return svld1ub_s32(svptrue_b32(), reinterpret_cast<const uint8_t*>(p));
#elif defined(__aarch64__)
  uint32_t four;
  memcpy(&four, p, 4);
  return (Ints)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#else
  Ints x;
  for (int i = 0; i < kWidth; ++i) x[i] = static_cast<uint8_t>(p[i]);
  return x;
#endif
}

// kWidth numbers of 4 bits at p, the one of even index in the low half of each byte.
SPARSE_ATTN_INLINE Ints load_nibbles(const char* p) {
#if defined(__AVX512F__)
  const __m512i x = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return (Ints)_mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi64(x, 28)),
                                _mm512_set1_epi32(15));
#elif defined(__AVX2__)
  int32_t four;
  memcpy(&four, p, 4);
  const __m256i x = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
  return (Ints)_mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi64(x, 28)),
                                _mm256_set1_epi32(15));
#elif defined(__aarch64__)
  typedef uint32_t UnsignedInts __attribute__((vector_size(kBytes)));
  uint32_t nibbles = 0;
  memcpy(&nibbles, p, kWidth / 2);
  UnsignedInts shifts;
  for (uint32_t i = 0; i < kWidth; ++i) shifts[i] = 4 * i;
  return (Ints)((UnsignedInts{} + nibbles) >> shifts & 15);
#else
  Ints x;
  for (int i = 0; i < kWidth; ++i) x[i] = static_cast<uint8_t>(p[i / 2]) >> 4 * (i % 2) & 15;
  return x;
#endif
}

// Rounded as float_to_bf16 does.
SPARSE_ATTN_INLINE void store_bf16(uint16_t* p, Floats x) {
  const Ints bits = (Ints)x;
  const Ints rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
  const Ints shorts = (x == x ? rounded : quiet) >> 16;
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)shorts));
#elif defined(__AVX2__)
  const __m128i low = _mm256_castsi256_si128((__m256i)shorts);
  const __m128i high = _mm256_extracti128_si256((__m256i)shorts, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(low, high));
#elif defined(__x86_64__)
  const __m128i four = (__m128i)shorts;
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(four, four));
#elif defined(SPARSE_ATTN_SVE)
  svst1h(svptrue_b32(), reinterpret_cast<int16_t*>(p), (SveInts)shorts);
#elif defined(__aarch64__)
  vst1_s16(reinterpret_cast<int16_t*>(p), vmovn_s32(shorts));
#else
  for (int i = 0; i < kWidth; ++i) p[i] = static_cast<uint16_t>(shorts[i]);
#endif
}

// The low byte of every lane.
SPARSE_ATTN_INLINE void store_bytes(uint8_t* p, Ints x) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__AVX2__)
  const __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(255));
  const __m128i halves =
      _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(halves, halves));
#elif defined(__x86_64__)
  const __m128i low = _mm_and_si128((__m128i)x, _mm_set1_epi32(255));
  const __m128i halves = _mm_packs_epi32(low, low);
  const int32_t four = _mm_cvtsi128_si32(_mm_packus_epi16(halves, halves));
  memcpy(p, &four, 4);
#elif defined(SPARSE_ATTN_SVE)
  svst1b(svptrue_b32(), reinterpret_cast<int8_t*>(p), (SveInts)x);
#elif defined(__aarch64__)
  const uint8x16_t bytes = (uint8x16_t)x;
  const int32_t four = ((Ints)vuzp1q_u8(vuzp1q_u8(bytes, bytes), vuzp1q_u8(bytes, bytes)))[0];
  memcpy(p, &four, 4);
#else
  for (int i = 0; i < kWidth; ++i) p[i] = static_cast<uint8_t>(x[i]);
#endif
}

// The low four bits of every lane, as load_nibbles reads them.
SPARSE_ATTN_INLINE void store_nibbles(uint8_t* p, Ints x) {
  x &= 15;
#if defined(__AVX512F__)
  const __m512i pairs = _mm512_or_si512((__m512i)x, _mm512_srli_epi64((__m512i)x, 28));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm512_cvtepi64_epi8(pairs));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_or_si256((__m256i)x, _mm256_srli_epi64((__m256i)x, 28));
  const __m256i bytes = _mm256_shuffle_epi8(pairs, _mm256_set1_epi16(0x0800));
  const int32_t low = _mm_cvtsi128_si32(_mm256_castsi256_si128(bytes));
  const int32_t high = _mm_cvtsi128_si32(_mm256_extracti128_si256(bytes, 1));
  const int32_t four = (low & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(high) << 16);
  memcpy(p, &four, 4);
#elif defined(SPARSE_ATTN_SVE)
  typedef svint64_t SveLongs __attribute__((arm_sve_vector_bits(256)));
  typedef uint64_t Longs __attribute__((vector_size(kBytes)));
  svst1b(svptrue_b64(), reinterpret_cast<int8_t*>(p), (SveLongs)((Longs)x | (Longs)x >> 28));
#else
  for (int i = 0; i < kWidth / 2; ++i) p[i] = static_cast<uint8_t>(x[2 * i] | x[2 * i + 1] << 4);
#endif
}

constexpr int kTogether = 4;  // vectors that store_codes takes

// The low kBits bits of every lane of kTogether vectors, side by side; of 4 bits as load_nibbles
// reads them.
template <int kBits>
SPARSE_ATTN_INLINE void store_codes(uint8_t* p, const Ints* x) {
#if defined(__AVX512VBMI__)
  // Byte 4i of the first 16 lanes, then of the second.
  const __m512i lowest = _mm512_setr_epi64(0x1c1814100c080400, 0x3c3834302c282420,
                                           0x5c5854504c484440, 0x7c7874706c686460, 0, 0, 0, 0);
  const auto join = [&](Ints a, Ints b) {
    return _mm512_castsi512_si256(_mm512_permutex2var_epi8((__m512i)a, lowest, (__m512i)b));
  };
  __m512i bytes = _mm512_inserti64x4(_mm512_castsi256_si512(join(x[0], x[1])), join(x[2], x[3]), 1);
  if constexpr (kBits == 8) {
    _mm512_storeu_si512(p, bytes);
  } else {
    bytes = _mm512_and_si512(bytes, _mm512_set1_epi8(15));
    bytes = _mm512_or_si512(bytes, _mm512_srli_epi16(bytes, 4));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(bytes));
  }
#else
  for (int i = 0; i < kTogether; ++i) {
    if constexpr (kBits == 8) {
      store_bytes(p + i * kWidth, x[i]);
    } else {
      store_nibbles(p + i * kWidth / 2, x[i]);
    }
  }
#endif
}

// kWidth numbers at p as floats.
template <Number kType>
SPARSE_ATTN_INLINE Floats load_as_floats(const char* p) {
  if constexpr (kType == Number::kFp32) {
    return load(p);
  } else if constexpr (kType == Number::kBf16) {
#if defined(__AVX512F__)
    return (Floats)_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#elif defined(__AVX2__)
    return (Floats)_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#elif defined(SPARSE_ATTN_SVE)
    const Ints x = svld1uh_s32(svptrue_b32(), reinterpret_cast<const uint16_t*>(p));
    return (Floats)(x << 16);
#elif defined(__aarch64__)
    return (Floats)vshll_n_u16(vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p))),
                               16);
#else
    uint16_t x[kWidth];
    memcpy(x, p, sizeof(x));
    Floats y;
    for (int i = 0; i < kWidth; ++i) y[i] = bf16_to_float(x[i]);
    return y;
#endif
  } else if constexpr (kType == Number::kFp16) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(SPARSE_ATTN_SVE)
    const svuint32_t x = svld1uh_u32(svptrue_b32(), reinterpret_cast<const uint16_t*>(p));
    return svcvt_f32_x(svptrue_b32(), svreinterpret_f16(x));
#elif defined(__aarch64__)
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p))));
#else
    uint16_t x[kWidth];
    memcpy(x, p, sizeof(x));
    Floats y;
    for (int i = 0; i < kWidth; ++i) y[i] = half_to_float(x[i]);
    return y;
#endif
  } else if constexpr (kType == Number::kE4m3) {
    const Ints x = load_bytes(p), magnitude = x & broadcast_int(0x7f);
    const Floats normal = (Floats)((magnitude << 20) + broadcast_int(120 << 23));
    const Floats denormal = __builtin_convertvector(magnitude, Floats) * broadcast(0x1p-9f);
    Floats y = magnitude < broadcast_int(8) ? denormal : normal;
    y = magnitude == broadcast_int(0x7f) ? (Floats)broadcast_int(0x7fc00000) : y;
    return (Floats)((Ints)y | (x << 24 & broadcast_int(INT32_MIN)));
  } else if constexpr (kType == Number::kE8m0) {
    const Ints x = load_bytes(p);
    const Ints y = x == Ints{} ? broadcast_int(0x00400000) : x << 23;
    return (Floats)(x == broadcast_int(0xff) ? broadcast_int(0x7fc00000) : y);
  } else if constexpr (kType == Number::kE2m1) {
    const Ints x = load_nibbles(p);
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps(
        (__m512i)x, _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                   -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f));
#elif defined(__AVX2__)
    const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const Floats y = (Floats)_mm256_permutevar8x32_ps(magnitudes, (__m256i)x);
    return (Floats)((Ints)y | (x << 28 & broadcast_int(INT32_MIN)));
#elif defined(__aarch64__)
    const Ints places = x & broadcast_int(7), sign = x << 28 & broadcast_int(INT32_MIN);
#if defined(SPARSE_ATTN_SVE)
    const Floats magnitudes = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const Floats y = svtbl((SveFloats)magnitudes, svreinterpret_u32((SveInts)places));
#else
    const uint8x16_t halves = {0, 1, 2, 3, 4, 6, 8, 12};
    const Floats y = vcvtq_n_f32_u32((uint32x4_t)vqtbl1q_u8(halves, (uint8x16_t)places), 1);
#endif
    return (Floats)((Ints)y | sign);
#else
    Floats y;
    for (int i = 0; i < kWidth; ++i) y[i] = e2m1_to_float(static_cast<uint8_t>(x[i]));
    return y;
#endif
  } else if constexpr (kType == Number::kInt4) {
    const Ints eight = broadcast_int(8);
    return __builtin_convertvector((load_nibbles(p) ^ eight) - eight, Floats);
  } else {
    static_assert(kType == Number::kInt8, "a type of number");
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(__aarch64__)
    return __builtin_convertvector(load_bytes(p) << 24 >> 24, Floats);
#else
    Floats y;
    for (int i = 0; i < kWidth; ++i)
      y[i] = static_cast<float>(reinterpret_cast<const int8_t*>(p)[i]);
    return y;
#endif
  }
}

#if defined(SPARSE_ATTN_BF16)
// Adds products of pairs of bf16 to c. On x86 a[2i + 1] * b[2i + 1] first and then a[2i] * b[2i],
// each step rounded to the nearest float32. On Arm the sum of both products, and then that and c;
// products and both sums are rounded to odd: to the neighbour of odd significand, if inexact.
// Denormal inputs count as zero and denormal results become zero.
SPARSE_ATTN_INLINE Floats dot_bf16(Floats a, Floats b, Floats c) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#elif defined(SPARSE_ATTN_SVE)
  SPARSE_ATTN_SVE_ADD("bfdot %0.s, %1.h, %2.h", c, "w"(a), "w"(b));
#else
  return vbfdotq_f32(c, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
}

#if defined(__aarch64__)
// The same, of a one pair in every four.
template <int kLane>
SPARSE_ATTN_INLINE Floats dot_bf16_lane(Floats a, Floats b, Floats c) {
#if defined(SPARSE_ATTN_SVE)
  SPARSE_ATTN_SVE_ADD("bfdot %0.s, %1.h, %2.h[%3]", c, "w"(b), "y"(a), "i"(kLane));
#else
  return vbfdotq_laneq_f32(c, (bfloat16x8_t)b, (bfloat16x8_t)a, kLane);
#endif
}
#endif

#if defined(__aarch64__)
// Within each four lanes a and b are matrices of two rows of four bf16, and c one of two by two
// float32, to which a times the transpose of b is added: two steps of dot_bf16 for each lane.
SPARSE_ATTN_INLINE Floats multiply_bf16(Floats a, Floats b, Floats c) {
#if defined(SPARSE_ATTN_SVE)
  SPARSE_ATTN_SVE_ADD("bfmmla %0.s, %1.h, %2.h", c, "w"(a), "w"(b));
#else
  return vbfmmlaq_f32(c, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
}
#endif

// `low` and then `high`, rounded to bf16.
SPARSE_ATTN_INLINE Floats join_bf16(Floats low, Floats high) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#elif defined(SPARSE_ATTN_SVE)
  const svbool_t all = svptrue_b32();
  return svreinterpret_f32(svuzp1(svreinterpret_u16(svcvt_bf16_x(all, (SveFloats)low)),
                                  svreinterpret_u16(svcvt_bf16_x(all, (SveFloats)high))));
#else
  return (Floats)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high);
#endif
}

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
#if defined(SPARSE_ATTN_SVE)
  const svbool_t all = svptrue_b32();
  return svreinterpret_f32(svcvtnt_bf16_x(svcvt_bf16_x(all, (SveFloats)even), all, (SveFloats)odd));
#elif defined(__aarch64__)
  return interleave_first((Floats)vcvtq_low_bf16_f32(even), (Floats)vcvtq_low_bf16_f32(odd));
#else
  const Floats joined = join_bf16(even, odd);
  const Shorts x = (Shorts)joined;
  return (Floats)__builtin_shufflevector(x, x, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7,
                                         23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30,
                                         15, 31);
#endif
}
#endif

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
