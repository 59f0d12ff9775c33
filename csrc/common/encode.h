// Rows of float32 to the bytes of a codec: the quantisers of sparse_attn/codecs.py, bit for bit.
// Loops are plain and of constant length where the codec has one, for compilers to vectorise.
// Functions have internal linkage, so that no copy built for another instruction set is shared.
#pragma once

#include <stdint.h>
#include <string.h>

#include "layout.h"
#include "number.h"

namespace sparse_attn {
namespace {

// Parts of an entry start anywhere.
typedef uint16_t UnalignedHalf __attribute__((aligned(1), may_alias));

// The largest element that a quantiser stores.
constexpr float largest_of(Number element) {
  return element == Number::kE4m3   ? 448
         : element == Number::kE2m1 ? 6
         : element == Number::kInt8 ? 127
                                    : 7;
}

// The code of the nearest number of 1 + kExponent + kMantissa bits, ties to even, saturated at
// `largest`. No branches, and signed comparisons: every instruction set has vectors of these.
template <int kExponent, int kMantissa>
inline uint32_t float_code(float x, float largest) {
  constexpr int32_t kShift = 23 - kMantissa, kBias = (1 << (kExponent - 1)) - 1;
  constexpr int32_t kLeastNormal = (128 - kBias) << 23;
  // A float whose neighbours are as far apart as subnormals are: adding it rounds to one of them.
  constexpr int32_t kSpacing = (127 + kShift + 1 - kBias) << 23;
  const int32_t bits = static_cast<int32_t>(bits_of(x)),
                top = static_cast<int32_t>(bits_of(largest));
  int32_t rest = bits & 0x7fffffff;
  rest = rest > top ? top : rest;
  const int32_t rounded = rest + (1 << (kShift - 1)) - 1 + (rest >> kShift & 1);
  const int32_t normal = (rounded >> kShift) - ((127 - kBias) << kMantissa);
  const float sum = float_of(static_cast<uint32_t>(rest)) + float_of(kSpacing);
  const int32_t subnormal = static_cast<int32_t>(bits_of(sum)) - kSpacing;
  const int32_t chosen = -(rest < kLeastNormal);  // bits of a mask
  const int32_t code = (subnormal & chosen) | (normal & ~chosen);
  return static_cast<uint32_t>(code) | (bits_of(x) >> 31 << (kExponent + kMantissa));
}

// The code of the element nearest to x, ties to even.
template <Number kElement>
inline uint32_t element_code(float x) {
  if (kElement == Number::kE4m3) return float_code<4, 3>(x, largest_of(kElement));
  if (kElement == Number::kE2m1) return float_code<2, 1>(x, largest_of(kElement));
  return bits_of(x + 0x1.8p23f);  // the addition rounds to a whole number, in its lowest bits
}

// The scale of a group: its bytes, and what its elements are divided by. A divisor of 0 stores
// zeros: those of a group of zeros, or of one that its scale cannot express.
struct Scale {
  uint32_t bytes;
  float divisor;
};

// Of a group whose largest magnitude has the bits `amax`: NaN is above infinity, which is above all
// numbers.
template <Number kElement, Number kScale>
inline Scale scale_of(uint32_t amax) {
  constexpr float kLargest = largest_of(kElement);
  const bool finite = amax < 0x7f800000u;
  if (kElement == Number::kInt8 && kScale == Number::kFp32) {
    float scale = float_of(amax) / kLargest;
    scale = scale < 0x1p-126f ? 0x1p-126f : scale;
    return {bits_of(scale), finite ? scale : 0};
  }
  if (kScale == Number::kFp16) {  // rounded up, so that nothing is clipped
    uint16_t scale = float_to_half(float_of(amax) / kLargest);
    if (scale < 0x7c00 && half_to_float(scale) * kLargest < float_of(amax)) ++scale;
    return {scale, scale < 0x7c00 ? half_to_float(scale) : 0};
  }
  if (kScale == Number::kE4m3) {
    if (!finite) return {0x7f, 0};
    float scale = float_of(amax) / kLargest;
    scale = scale < 0x1p-9f ? 0x1p-9f : scale > 448 ? 448 : scale;
    const uint32_t code = element_code<Number::kE4m3>(scale);
    return {code, e4m3_to_float(static_cast<uint8_t>(code))};
  }
  // The least power of two that is at least max(amax, floor) / largest, by its exponent.
  constexpr uint32_t kLeast = kElement == Number::kE4m3 ? 127 - 22 : 1;  // floor 1e-4, 6 * 2^-126
  const uint32_t largest = bits_of(kLargest);
  const uint32_t larger = (amax & 0x7fffff) > (largest & 0x7fffff);
  const uint32_t least = kLeast + (largest >> 23) - 127;
  uint32_t code = (amax >> 23) + larger;
  code = (code < least ? least : code) - (largest >> 23) + 127;
  const float divisor = finite ? float_of(code << 23) : 0;
  if (kScale == Number::kE8m0) return {finite ? code : 0xff, divisor};
  if (kScale == Number::kBf16) return {finite ? code << 7 : 0x7fc0, divisor};
  return {finite ? code << 23 : 0x7fc00000u, divisor};
}

template <Number kElement, Number kScale>
inline void encode_group(const float* x, int64_t count, uint8_t* values, uint8_t* scale_to) {
  int32_t amax = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = static_cast<int32_t>(bits_of(x[i]) & 0x7fffffffu);
    amax = magnitude > amax ? magnitude : amax;
  }
  const Scale scale = scale_of<kElement, kScale>(static_cast<uint32_t>(amax));
  memcpy(scale_to, &scale.bytes, number_bits(kScale) / 8);  // little-endian
  if (scale.divisor == 0) {
    memset(values, 0, static_cast<size_t>(bytes_of(kElement, count)));
  } else if (number_bits(kElement) == 8) {
    for (int64_t i = 0; i < count; ++i) {
      values[i] = static_cast<uint8_t>(element_code<kElement>(x[i] / scale.divisor));
    }
  } else {
    constexpr int64_t kStep = 16;  // codes first, then pairs of them: both loops become vectors
    for (int64_t at = 0; at < count; at += kStep) {
      const int64_t step = count - at < kStep ? count - at : kStep;
      uint8_t codes[kStep];
      for (int64_t i = 0; i < step; ++i) {
        codes[i] = static_cast<uint8_t>(element_code<kElement>(x[at + i] / scale.divisor) & 15);
      }
      for (int64_t i = 0; i < step / 2; ++i) {
        values[at / 2 + i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
      }
    }
  }
}

// kGroup as in Codec.
template <Number kElement, Number kScale, int32_t kGroup>
inline void encode_groups(const float* row, int64_t count, uint8_t* values, uint8_t* scales) {
  const int64_t group = kGroup ? kGroup : count;
  for (int64_t at = 0; at < count; at += group) {
    encode_group<kElement, kScale>(row + at, group, values, scales);
    values += bytes_of(kElement, group);
    scales += number_bits(kScale) / 8;
  }
}

template <Number kType>
inline void encode_halves(const float* row, int64_t count, char* to) {
  UnalignedHalf* halves = reinterpret_cast<UnalignedHalf*>(to);
  for (int64_t i = 0; i < count; ++i) {
    halves[i] = kType == Number::kBf16 ? float_to_bf16(row[i]) : float_to_half(row[i]);
  }
}

constexpr int32_t kind(Number element, Number scale, int32_t group) {
  return static_cast<int32_t>(element) | static_cast<int32_t>(scale) << 4 | group << 8;
}

// Quantises a row of `dim` floats.
inline void encode_row(const Codec& codec, const float* row, int64_t dim, const PartsToWrite& to) {
  const int64_t count = dim - codec.rope;
  auto* values = reinterpret_cast<uint8_t*>(to.values);
  auto* scales = reinterpret_cast<uint8_t*>(to.scales);
  encode_halves<Number::kBf16>(row + count, codec.rope, to.rope);
  switch (kind(codec.element, codec.scale, codec.group)) {
    case kind(Number::kFp32, Number::kNone, 0):
      memcpy(values, row, static_cast<size_t>(count) * 4);
      return;
    case kind(Number::kBf16, Number::kNone, 0):
      return encode_halves<Number::kBf16>(row, count, to.values);
    case kind(Number::kFp16, Number::kNone, 0):
      return encode_halves<Number::kFp16>(row, count, to.values);
#define SPARSE_ATTN_CASE(element, scale, group) \
  case kind(element, scale, group):             \
    return encode_groups<element, scale, group>(row, count, values, scales);
      SPARSE_ATTN_CASE(Number::kInt8, Number::kFp16, 0)
      SPARSE_ATTN_CASE(Number::kInt8, Number::kFp16, 128)
      SPARSE_ATTN_CASE(Number::kInt8, Number::kFp32, 128)
      SPARSE_ATTN_CASE(Number::kInt4, Number::kFp16, 0)
      SPARSE_ATTN_CASE(Number::kE4m3, Number::kFp32, 128)
      SPARSE_ATTN_CASE(Number::kE4m3, Number::kE8m0, 64)
      SPARSE_ATTN_CASE(Number::kE4m3, Number::kBf16, 64)
      SPARSE_ATTN_CASE(Number::kE4m3, Number::kE8m0, 32)
      SPARSE_ATTN_CASE(Number::kE2m1, Number::kE4m3, 16)
      SPARSE_ATTN_CASE(Number::kE2m1, Number::kE8m0, 32)
#undef SPARSE_ATTN_CASE
  }
}

}  // namespace
}  // namespace sparse_attn
