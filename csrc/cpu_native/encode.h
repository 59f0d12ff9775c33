// Rows of float32 to the bytes of a codec: the quantisers of sparse_attn/codecs.py, bit for bit, on
// every instruction set.
#pragma once

#include "convert.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// The largest element that a quantiser stores.
constexpr float largest_of(Number element) {
  return element == Number::kE4m3   ? 448
         : element == Number::kE2m1 ? 6
         : element == Number::kInt8 ? 127
                                    : 7;
}

// The code of the number of 1 + kExponent + kMantissa bits nearest to a magnitude that is not above
// the largest of them, ties to even, in the lowest bits.
template <int kExponent, int kMantissa>
SPARSE_ATTN_INLINE Ints float_code(Floats magnitude) {
  constexpr int32_t kShift = 23 - kMantissa, kLeastNormal = 129 - (1 << (kExponent - 1));
  // What the sum below counts too much; it is even, as a tie goes to the even sum.
  constexpr int32_t kExcess = (kLeastNormal + kShift) << kMantissa;
  // A power of two whose neighbours are as far apart as numbers of this magnitude are. To add it is
  // to round, and the last bits of the sum count numbers of this exponent.
  const Ints exponent = max((Ints)magnitude & 0x7f800000, broadcast_int(kLeastNormal << 23));
  const Ints step = exponent + (kShift << 23 | (-kExcess & 255));
  return (Ints)(magnitude + (Floats)step) + (step >> kShift);
}

// The code of the element nearest to a magnitude with a sign, ties to even, in the lowest bits.
template <Number kElement>
SPARSE_ATTN_INLINE Ints element_code(Floats magnitude, Ints sign) {
  if constexpr (kElement == Number::kE4m3) {
    return (float_code<4, 3>(magnitude) & 0x7f) | (sign >> 24 & 0x80);
  } else if constexpr (kElement == Number::kE2m1) {
    return (float_code<2, 1>(magnitude) & 7) | (sign >> 28 & 8);
  } else {
    return (Ints)((Floats)((Ints)magnitude | sign) + 0x1.8p23f);  // rounds to a whole number
  }
}

// What a group is stored with: the bytes of its scale, and what its elements are divided by. 0
// stores zeros: of a group of zeros, or of one that its scale cannot express.
struct Scale {
  uint32_t bytes;
  float divisor;
};

// Scales of several groups.
struct Scales {
  Ints bytes;
  Floats divisors;
};

constexpr int32_t kInfinityBits = 0x7f800000;  // NaN is above, numbers are below

// Of a group whose largest magnitude has the bits `amax`: rounded up, so that nothing is clipped.
template <Number kElement>
SPARSE_ATTN_INLINE Scale fp16_scale(int32_t amax) {
  const float most = float_of(static_cast<uint32_t>(amax)), largest = largest_of(kElement);
  uint16_t scale = float_to_half(most / largest);
  if (scale < 0x7c00 && half_to_float(scale) * largest < most) ++scale;
  return {scale, scale < 0x7c00 ? half_to_float(scale) : 0};
}

template <Number kElement, Number kScale>
SPARSE_ATTN_INLINE Scales scales_of(Ints amax) {
  constexpr float kLargest = largest_of(kElement);
  const auto finite = amax < kInfinityBits;
  const auto scales = [&](Ints bytes, Floats divisors, int32_t nan) {
    return Scales{finite ? bytes : broadcast_int(nan), finite ? divisors : Floats{}};
  };
  if constexpr (kElement == Number::kInt8) {
    const Floats scale = max(broadcast(0x1p-126f), (Floats)amax / kLargest);
    return {(Ints)scale, finite ? scale : Floats{}};
  } else if constexpr (kScale == Number::kE4m3) {
    const Floats scale = min(max((Floats)amax / kLargest, broadcast(0x1p-9f)), broadcast(448));
    const Ints code = float_code<4, 3>(scale) & 0x7f;
    return scales(code, (Floats)(code << 20) * 0x1p120f, 0x7f);
  } else {
    // The least power of two that is at least max(amax, floor) / largest, by its exponent.
    constexpr int32_t kLeast = kElement == Number::kE4m3 ? 127 - 22 : 1;  // 1e-4, 6 * 2^-126
    const auto largest = static_cast<int32_t>(bits_of(kLargest));
    const Ints larger = (amax & 0x7fffff) > (largest & 0x7fffff) ? Ints{} + 1 : Ints{};
    const Ints code = max((amax >> 23) + larger - (largest >> 23) + 127, broadcast_int(kLeast));
    const auto divisors = (Floats)(code << 23);
    if constexpr (kScale == Number::kE8m0) return scales(code, divisors, 0xff);
    if constexpr (kScale == Number::kBf16) return scales(code << 7, divisors, 0x7fc0);
    return scales(code << 23, divisors, 0x7fc00000);
  }
}

// How elements are divided by their scale, so that the quotient is what a division rounds to, in a
// fraction of its time.
enum class Division {
  kProduct,    // with the inverse: of a power of two whose inverse is a normal number
  kCorrected,  // product and what it leaves: of numbers of few bits
  kQuotient
};

constexpr Division division_by(Number element, Number scale) {
  return scale == Number::kE8m0 || scale == Number::kBf16 ||
                 (scale == Number::kFp32 && element == Number::kE4m3)
             ? Division::kProduct
         : kFusedProducts && (scale == Number::kE4m3 || scale == Number::kFp16)
             ? Division::kCorrected
             : Division::kQuotient;
}

// x / by; `inverse` is 1 / by.
template <Division kDivision>
SPARSE_ATTN_INLINE Floats divide(Floats x, Floats by, Floats inverse) {
  if constexpr (kDivision == Division::kQuotient) return x / by;
  const Floats product = x * inverse;
  if constexpr (kDivision == Division::kProduct) return product;
  return fma(fma(-product, by, x), inverse, product);
}

// In each lane the largest of the magnitudes that fall on it, as bits.
template <Number kFrom>
SPARSE_ATTN_INLINE Ints largest_magnitudes(const char* row, int64_t count) {
  Ints largest = {};
  int64_t i = 0;
#if defined(__AVX512BW__)
  if constexpr (kFrom ==
                Number::kBf16) {  // bits of magnitudes are in their order, so two in a lane
    __m512i pairs = _mm512_setzero_si512();
    for (; i + 2 * kWidth <= count; i += 2 * kWidth) {
      const __m512i x = _mm512_loadu_si512(row + 2 * i);
      pairs = _mm512_max_epu16(pairs, _mm512_and_si512(x, _mm512_set1_epi16(INT16_MAX)));
    }
    largest = max((Ints)pairs << 16, (Ints)pairs & ~0xffff);
  }
#endif
  for (; i + kWidth <= count; i += kWidth)
    largest = max((Ints)load_as_floats<kFrom>(row + bytes_of(kFrom, i)) & INT32_MAX, largest);
  return i == count ? largest : max((Ints)load_at<kFrom>(row, i, count) & INT32_MAX, largest);
}

// Quantises elements of which each kGroup (0: all) have a divisor.
template <Number kFrom, Number kElement, Division kDivision, int32_t kGroup>
inline void encode_elements(const char* row, int64_t count, const float* divisors,
                            const float* inverses, uint8_t* values) {
  const auto encode = [=](Floats x, int64_t i) {
    const int64_t group = kGroup ? i / kGroup : 0;
    Floats magnitude = divide<kDivision>((Floats)((Ints)x & INT32_MAX), broadcast(divisors[group]),
                                         broadcast(inverses[group]));
    // Scales of e4m3 are no larger than 448, and may be rounded down.
    if constexpr (kElement == Number::kE2m1) magnitude = min(magnitude, broadcast(6));
    return element_code<kElement>(magnitude, (Ints)x & INT32_MIN);
  };
  int64_t i = 0;
  for (; i + kTogether * kWidth <= count; i += kTogether * kWidth) {
    Ints codes[kTogether];
    for (int j = 0; j < kTogether; ++j) {
      const int64_t at = i + j * kWidth;
      codes[j] = encode(load_as_floats<kFrom>(row + bytes_of(kFrom, at)), at);
    }
    store_codes<number_bits(kElement)>(values + bytes_of(kElement, i), codes);
  }
  for (; i < count; i += kWidth) {
    const Ints codes[kTogether] = {encode(load_at<kFrom>(row, i, count), i)};
    uint8_t part[kTogether * kWidth];
    store_codes<number_bits(kElement)>(part, codes);
    const int64_t rest = count - i < kWidth ? count - i : kWidth;
    memcpy(values + bytes_of(kElement, i), part, static_cast<size_t>(bytes_of(kElement, rest)));
  }
}

// Groups of kGroup elements, or one of the whole row if that is 0, with scales of fp16.
template <Number kFrom, Number kElement, int32_t kGroup>
inline void encode_fp16_groups(const char* row, int64_t count, uint8_t* values, char* scales) {
  const int64_t group = kGroup ? kGroup : count;
  for (int64_t i = 0; i < count; i += group, scales += 2) {
    const char* from = row + bytes_of(kFrom, i);
    uint8_t* to = values + bytes_of(kElement, i);
    const Scale scale = fp16_scale<kElement>(highest(largest_magnitudes<kFrom>(from, group)));
    memcpy(scales, &scale.bytes, 2);  // little-endian
    if (scale.divisor == 0) {
      memset(to, 0, static_cast<size_t>(bytes_of(kElement, group)));
    } else {
      const float inverse = 1 / scale.divisor;
      encode_elements<kFrom, kElement, division_by(kElement, Number::kFp16), 0>(
          from, group, &scale.divisor, &inverse, to);
    }
  }
}

// Groups of kGroup elements. Scales of kWidth of them are found together.
template <Number kFrom, Number kElement, Number kScale, int32_t kGroup>
inline void encode_groups(const char* row, int64_t count, uint8_t* values, char* scales) {
  constexpr int64_t kScaleBytes = number_bits(kScale) / 8;
  for (int64_t begin = 0; begin < count; begin += kWidth * kGroup) {
    const int64_t elements = count - begin < kWidth * kGroup ? count - begin : kWidth * kGroup;
    const int64_t groups = elements / kGroup;
    const char* from = row + bytes_of(kFrom, begin);
    Ints x[kWidth];
    for (int64_t g = 0; g < kWidth; ++g) {
      x[g] = g < groups ? largest_magnitudes<kFrom>(from + bytes_of(kFrom, g * kGroup), kGroup)
                        : Ints{};
    }
    const Ints amax = highest_of_each(x);
    const Scales found = scales_of<kElement, kScale>(amax);
    char bytes[kBytes];
    store(bytes, (Floats)found.bytes);
    for (int64_t g = 0; g < groups; ++g, scales += kScaleBytes)
      memcpy(scales, bytes + 4 * g, kScaleBytes);  // little-endian
    float divisors[kWidth], inverses[kWidth];
    store(divisors, found.divisors);
    store(inverses, found.divisors == 0 ? Floats{} : 1 / found.divisors);
    uint8_t* to = values + bytes_of(kElement, begin);
    encode_elements<kFrom, kElement, division_by(kElement, kScale), kGroup>(from, elements,
                                                                            divisors, inverses, to);
    if (highest(amax) < kInfinityBits) continue;
    for (int64_t g = 0; g < groups; ++g) {
      if (divisors[g] != 0) continue;
      memset(to + bytes_of(kElement, g * kGroup), 0,
             static_cast<size_t>(bytes_of(kElement, kGroup)));
    }
  }
}

template <Number kFrom, Number kType>
inline void encode_halves(const char* row, int64_t count, char* to) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const Floats x = load_at<kFrom>(row, i, count);
    uint16_t halves[kWidth];
    if constexpr (kType == Number::kBf16) {
      store_bf16(halves, x);
    } else {
      for (int j = 0; j < kWidth; ++j) halves[j] = float_to_half(x[j]);
    }
    const int64_t rest = count - i < kWidth ? count - i : kWidth;
    memcpy(to + 2 * i, halves, static_cast<size_t>(2 * rest));
  }
}

constexpr int32_t kind(Number element, Number scale, int32_t group) {
  return static_cast<int32_t>(element) | static_cast<int32_t>(scale) << 4 | group << 8;
}

// Quantises a row of `dim` numbers.
template <Number kFrom>
inline void encode_row(const Codec& codec, const char* row, int64_t dim, const PartsToWrite& to) {
  const int64_t count = dim - codec.rope;
  auto* values = reinterpret_cast<uint8_t*>(to.values);
  encode_halves<kFrom, Number::kBf16>(row + bytes_of(kFrom, count), codec.rope, to.rope);
  switch (kind(codec.element, codec.scale, codec.group)) {
    case kind(Number::kFp32, Number::kNone, 0):
      return convert_row<kFrom>(row, static_cast<int32_t>(count),
                                reinterpret_cast<float*>(to.values));
    case kind(Number::kBf16, Number::kNone, 0):
      return encode_halves<kFrom, Number::kBf16>(row, count, to.values);
    case kind(Number::kFp16, Number::kNone, 0):
      return encode_halves<kFrom, Number::kFp16>(row, count, to.values);
    case kind(Number::kInt8, Number::kFp16, 0):
      return encode_fp16_groups<kFrom, Number::kInt8, 0>(row, count, values, to.scales);
    case kind(Number::kInt8, Number::kFp16, 128):
      return encode_fp16_groups<kFrom, Number::kInt8, 128>(row, count, values, to.scales);
    case kind(Number::kInt4, Number::kFp16, 0):
      return encode_fp16_groups<kFrom, Number::kInt4, 0>(row, count, values, to.scales);
#define SPARSE_ATTN_CASE(element, scale, group) \
  case kind(element, scale, group):             \
    return encode_groups<kFrom, element, scale, group>(row, count, values, to.scales);
      SPARSE_ATTN_CASE(Number::kInt8, Number::kFp32, 128)
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
