// Rows of float32 to the bytes of a codec: the quantisers of sparse_attn/codecs.py, bit for bit, on
// every instruction set.
#pragma once

#include "convert.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
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

SPARSE_ATTN_INLINE int32_t as_ints(float x) { return static_cast<int32_t>(bits_of(x)); }
SPARSE_ATTN_INLINE Ints as_ints(Floats x) { return (Ints)x; }
SPARSE_ATTN_INLINE float as_floats(int32_t x) { return float_of(static_cast<uint32_t>(x)); }
SPARSE_ATTN_INLINE Floats as_floats(Ints x) { return (Floats)x; }

// The code of the nearest number of 1 + kExponent + kMantissa bits, ties to even, saturated at
// `largest`; of a float, or in every lane.
template <int kExponent, int kMantissa, class Float>
SPARSE_ATTN_INLINE auto float_code(Float x, float largest) {
  constexpr int32_t kShift = 23 - kMantissa, kBias = (1 << (kExponent - 1)) - 1;
  constexpr int32_t kLeastNormal = (128 - kBias) << 23;
  // A float whose neighbours are as far apart as subnormals are: adding it rounds to one of them.
  constexpr int32_t kSpacing = (127 + kShift + 1 - kBias) << 23;
  const auto bits = as_ints(x), top = as_ints(Float{} + largest);
  auto rest = bits & INT32_MAX;
  rest = rest > top ? top : rest;
  const auto rounded = rest + ((1 << (kShift - 1)) - 1) + (rest >> kShift & 1);
  const auto normal = (rounded >> kShift) - ((127 - kBias) << kMantissa);
  const auto subnormal = as_ints(as_floats(rest) + as_floats(kSpacing)) - kSpacing;
  const auto code = rest < kLeastNormal ? subnormal : normal;
  return code | (bits >> 31 & 1 << (kExponent + kMantissa));
}

// The code of the element nearest to x, ties to even, in the lowest bits.
template <Number kElement, class Float>
SPARSE_ATTN_INLINE auto element_code(Float x) {
  if constexpr (kElement == Number::kE4m3) {
    return float_code<4, 3>(x, largest_of(kElement));
  } else if constexpr (kElement == Number::kE2m1) {
    return float_code<2, 1>(x, largest_of(kElement));
  } else {
    return as_ints(x + 0x1.8p23f);  // the addition rounds to a whole number
  }
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
SPARSE_ATTN_INLINE Scale scale_of(uint32_t amax) {
  constexpr float kLargest = largest_of(kElement);
  const bool finite = amax < 0x7f800000u;
  if constexpr (kElement == Number::kInt8 && kScale == Number::kFp32) {
    float scale = float_of(amax) / kLargest;
    scale = scale < 0x1p-126f ? 0x1p-126f : scale;
    return {bits_of(scale), finite ? scale : 0};
  } else if constexpr (kScale == Number::kFp16) {  // rounded up, so that nothing is clipped
    uint16_t scale = float_to_half(float_of(amax) / kLargest);
    if (scale < 0x7c00 && half_to_float(scale) * kLargest < float_of(amax)) ++scale;
    return {scale, scale < 0x7c00 ? half_to_float(scale) : 0};
  } else if constexpr (kScale == Number::kE4m3) {  // without branches: a row has many
    float scale = float_of(amax) / kLargest;
    scale = scale < 0x1p-9f ? 0x1p-9f : scale;
    scale = scale < 448 ? scale : 448;  // NaN too
    const auto code = static_cast<uint32_t>(element_code<Number::kE4m3>(scale));
    const float divisor = float_of(bits_of(float_of(code << 20) * 0x1p120f));
    return {finite ? code : 0x7f, finite ? divisor : 0};
  } else {
    // The least power of two that is at least max(amax, floor) / largest, by its exponent.
    constexpr uint32_t kLeast = kElement == Number::kE4m3 ? 127 - 22 : 1;  // 1e-4, 6 * 2^-126
    const uint32_t largest = bits_of(kLargest);
    const uint32_t larger = (amax & 0x7fffff) > (largest & 0x7fffff);
    const uint32_t least = kLeast + (largest >> 23) - 127;
    uint32_t code = (amax >> 23) + larger;
    code = (code < least ? least : code) - (largest >> 23) + 127;
    const float divisor = finite ? float_of(code << 23) : 0;
    if constexpr (kScale == Number::kE8m0) return {finite ? code : 0xff, divisor};
    if constexpr (kScale == Number::kBf16) return {finite ? code << 7 : 0x7fc0, divisor};
    return {finite ? code << 23 : 0x7fc00000u, divisor};
  }
}

// Whether scales are powers of two whose inverse is a normal number. A product with that is the
// quotient, and takes a fraction of its time.
constexpr bool has_inverse(Number element, Number scale) {
  return scale == Number::kE8m0 || scale == Number::kBf16 ||
         (scale == Number::kFp32 && element == Number::kE4m3);
}

// Calls use(i, x) for vectors of `count` elements, the last filled up with zeros.
template <class Use>
SPARSE_ATTN_INLINE void for_vectors(const float* row, int64_t count, const Use& use) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) use(i, load(row + i));
  if (i < count) use(i, load_partial(row + i, (count - i) * 4));
}

// Bits of the largest magnitude.
SPARSE_ATTN_INLINE uint32_t largest_magnitude(const float* row, int64_t count) {
  Ints largest = {};
  for_vectors(row, count, [&](int64_t, Floats x) {
    const Ints magnitude = (Ints)x & INT32_MAX;
    largest = magnitude > largest ? magnitude : largest;
  });
  return static_cast<uint32_t>(highest(largest));
}

template <Number kElement, bool kInverse>
SPARSE_ATTN_INLINE void encode_group(const float* row, int64_t count, float divisor,
                                     uint8_t* values) {
  if (divisor == 0) {
    memset(values, 0, static_cast<size_t>(bytes_of(kElement, count)));
    return;
  }
  const Floats by = broadcast(kInverse ? 1 / divisor : divisor);
  for_vectors(row, count, [&](int64_t i, Floats x) {
    const Ints codes = element_code<kElement>(kInverse ? x * by : x / by);
    uint8_t* to = values + bytes_of(kElement, i);
    uint8_t part[kWidth];
    const bool whole = i + kWidth <= count;
    if constexpr (number_bits(kElement) == 8) {
      store_bytes(whole ? to : part, codes);
    } else {
      store_nibbles(whole ? to : part, codes);
    }
    if (!whole) memcpy(to, part, static_cast<size_t>(bytes_of(kElement, count - i)));
  });
}

// kGroup as in Codec. Scales of all groups are found first: they do not wait for each other.
template <Number kElement, Number kScale, int32_t kGroup>
inline void encode_groups(const float* row, int64_t count, uint8_t* values, uint8_t* scales) {
  const int64_t group = kGroup ? kGroup : count, groups = kGroup ? count / kGroup : 1;
  uint32_t magnitudes[kMaxGroups];
  Scale found[kMaxGroups];
  for (int64_t g = 0; g < groups; ++g) magnitudes[g] = largest_magnitude(row + g * group, group);
  for (int64_t g = 0; g < groups; ++g) found[g] = scale_of<kElement, kScale>(magnitudes[g]);
  for (int64_t g = 0; g < groups; ++g) {
    memcpy(scales + g * (number_bits(kScale) / 8), &found[g].bytes,
           number_bits(kScale) / 8);  // little-endian
    encode_group<kElement, has_inverse(kElement, kScale)>(row + g * group, group, found[g].divisor,
                                                          values + g * bytes_of(kElement, group));
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
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
