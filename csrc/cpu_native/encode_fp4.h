// Rows of bf16 to e2m1 with scales of e4m3, of 16 elements each: 32 elements to a vector.
#pragma once

#include "encode.h"

#if defined(__AVX512BF16__)
namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

constexpr int32_t kFp4Group = 16;
constexpr int32_t kFp4Row = kFp4Group * kMaxGroups;  // elements that are quantised together

// Codes by where a number lies among those of bf16, 32 of them to a step, the first up to 0.25. The
// number between two steps counts to that whose code is even.
alignas(64) constexpr uint16_t kFp4Codes[kPair] = {0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5,
                                                   6, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};
constexpr int16_t kFirstStep = 0x3e61, kLargestFp4 = 0x40c0;  // bits of bf16: 0.25 - 31 of them, 6

template <int... kLane>
SPARSE_ATTN_INLINE __m512i max_of_pairs(__m512i x, __m512i y,
                                        std::integer_sequence<int, kLane...>) {
  return _mm512_max_epu16(
      (__m512i)__builtin_shufflevector((Shorts)x, (Shorts)y, (2 * kLane)...),
      (__m512i)__builtin_shufflevector((Shorts)x, (Shorts)y, (2 * kLane + 1)...));
}

// Magnitudes of the largest of each group of a row.
SPARSE_ATTN_INLINE __m512i largest_of_groups(const char* row) {
  const __m512i magnitude = _mm512_set1_epi16(INT16_MAX);
  __m512i x[kWidth];
  for (int i = 0; i < kWidth; ++i)
    x[i] = _mm512_and_si512(_mm512_loadu_si512(row + i * kBytes), magnitude);
  for (int count = kWidth / 2; count > 0; count /= 2) {
    for (int i = 0; i < count; ++i)
      x[i] = max_of_pairs(x[2 * i], x[2 * i + 1], std::make_integer_sequence<int, kPair>());
  }
  return x[0];
}

// Two numbers of bf16 are no tie, or their quotient is one to the last bit: the nearest number of
// bf16 to it lies on the same side of all ties. So does that to the product with an inverse.
SPARSE_ATTN_INLINE __m512i fp4_codes(const char* row, Floats inverse, Floats next_inverse) {
  const Floats x = load_as_floats<Number::kBf16>(row);
  const Floats y = load_as_floats<Number::kBf16>(row + kPair);
  const auto quotient = (__m512i)join_bf16(x * inverse, y * next_inverse);
  __m512i magnitude = _mm512_and_si512(quotient, _mm512_set1_epi16(INT16_MAX));
  magnitude = _mm512_min_epu16(magnitude, _mm512_set1_epi16(kLargestFp4));
  // The lower of two codes is odd where this bit is set: the tie counts to the next step.
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(magnitude, 6), _mm512_set1_epi16(1));
  const __m512i past =
      _mm512_subs_epu16(_mm512_add_epi16(magnitude, odd), _mm512_set1_epi16(kFirstStep));
  const __m512i code =
      _mm512_permutexvar_epi16(_mm512_srli_epi16(past, 5), _mm512_load_si512(kFp4Codes));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(quotient, 12), _mm512_set1_epi16(8));
  return _mm512_or_si512(code, sign);
}

inline void encode_fp4(const char* row, uint8_t* values, char* scales) {
  const __m512i largest = largest_of_groups(row);
  float inverses[kMaxGroups];
  uint32_t finite = 0;
  for (int half = 0; half < 2; ++half) {
    const __m256i part =
        half ? _mm512_extracti64x4_epi64(largest, 1) : _mm512_castsi512_si256(largest);
    const Ints amax = (Ints)_mm512_cvtepu16_epi32(part) << 16;
    const Scales found = scales_of<Number::kE2m1, Number::kE4m3>(amax);
    store_bytes(reinterpret_cast<uint8_t*>(scales) + half * kWidth, found.bytes);
    const __mmask16 some = _mm512_cmplt_epi32_mask((__m512i)amax, _mm512_set1_epi32(kInfinityBits));
    store(inverses + half * kWidth, 1 / found.divisors);
    finite |= static_cast<uint32_t>(some) << half * kWidth;
  }
  for (int g = 0; g < kMaxGroups; g += 2) {
    const __m512i codes =
        fp4_codes(row + g * kFp4Group * 2, broadcast(inverses[g]), broadcast(inverses[g + 1]));
    const __m512i pairs = _mm512_or_si512(codes, _mm512_srli_epi32(codes, 12));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + g * kFp4Group / 2),
                     _mm512_cvtepi32_epi8(pairs));
  }
  for (int g = 0; finite != UINT32_MAX && g < kMaxGroups; ++g) {
    if ((finite >> g & 1) == 0) memset(values + g * kFp4Group / 2, 0, kFp4Group / 2);
  }
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
#endif
