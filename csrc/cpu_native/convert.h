// Rows of a plane in the type that kernels multiply.
#pragma once

#include <type_traits>

#include "simd.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// Calls use(type) with a constant of `type`.
template <class Use>
SPARSE_ATTN_INLINE void with_type(Number type, const Use& use) {
  switch (type) {
    case Number::kFp32:
      return use(std::integral_constant<Number, Number::kFp32>());
    case Number::kBf16:
      return use(std::integral_constant<Number, Number::kBf16>());
    case Number::kFp16:
      return use(std::integral_constant<Number, Number::kFp16>());
    case Number::kE4m3:
      return use(std::integral_constant<Number, Number::kE4m3>());
    case Number::kE8m0:
      return use(std::integral_constant<Number, Number::kE8m0>());
    case Number::kInt8:
      return use(std::integral_constant<Number, Number::kInt8>());
    case Number::kE2m1:
      return use(std::integral_constant<Number, Number::kE2m1>());
    case Number::kInt4:
      return use(std::integral_constant<Number, Number::kInt4>());
    case Number::kNone:
      return;
  }
}

// Of the types of rows that are not quantised.
template <class Use>
SPARSE_ATTN_INLINE void with_plain_type(Number type, const Use& use) {
  if (type == Number::kBf16) return use(std::integral_constant<Number, Number::kBf16>());
  if (type == Number::kFp16) return use(std::integral_constant<Number, Number::kFp16>());
  use(std::integral_constant<Number, Number::kFp32>());
}

// kWidth of the `count` elements that are left of a row, which it fills up with zeros.
template <Number kFrom>
SPARSE_ATTN_INLINE Floats load_rest(const char* row, int32_t count) {
  char rest[kBytes];
  store(rest, load_partial(row, (count * number_bits(kFrom) + 7) / 8));
  return load_as_floats<kFrom>(rest);
}

// kWidth of a row's numbers from element i on, or as many as are left, filled up with zeros.
template <Number kFrom>
SPARSE_ATTN_INLINE Floats load_at(const char* row, int64_t i, int64_t count) {
  const char* from = row + bytes_of(kFrom, i);
  return i + kWidth <= count ? load_as_floats<kFrom>(from)
                             : load_rest<kFrom>(from, static_cast<int32_t>(count - i));
}

template <Number kFrom>
inline void convert_row(const char* row, int32_t dim, float* to) {
  int32_t i = 0;
  for (; i + kWidth <= dim; i += kWidth)
    store(to + i, load_as_floats<kFrom>(row + bytes_of(kFrom, i)));
  if (i == dim) return;
  const Floats x = load_rest<kFrom>(row + bytes_of(kFrom, i), dim - i);
  for (int j = 0; i + j < dim; ++j) to[i + j] = x[j];
}

inline void convert_row(Number from, const char* row, int32_t dim, float* to) {
  with_type(from, [=](auto type) { convert_row<type>(row, dim, to); });
}

// Most groups of a row that have a scale each.
constexpr int kMaxGroups = 32;

// The scales of a row's groups of `size` elements, a power of two from 16 on. Formats of which
// groups have scales have no more.
class GroupScales {
 public:
  GroupScales(Number type, const char* from, int32_t groups, int32_t size)
      : GroupScales(groups, size) {
    with_type(type, [=](auto number) {
      constexpr Number kFrom = number;
      for (int32_t i = 0; i < groups; i += kWidth) {
        const char* scales = from + bytes_of(kFrom, i);
        store(at_ + i, groups - i < kWidth ? load_rest<kFrom>(scales, groups - i)
                                           : load_as_floats<kFrom>(scales));
      }
    });
  }

  GroupScales(const float* from, int32_t groups, int32_t size) : GroupScales(groups, size) {
    for (int32_t i = 0; i < groups; ++i) at_[i] = from[i];
  }

  // Of element i. Without a division, which takes longer than what is done with the scale.
  float at(int32_t i) const { return at_[i >> shift_]; }
  Floats of(int32_t i) const { return broadcast(at(i)); }

#if defined(__AVX512BF16__)
  // Whether every scale is a power of two, and such that no product leaves the normal numbers.
  bool move_exponents() const {
    return none([](Ints bits) {
      return ((bits & 0x007fffff) != 0) | (bits < kLeastScale) | (bits > 246 << 23);
    });
  }

  // Whether no product is subnormal: such count as zero where vectors of bf16 are made.
  bool keep_normal() const {
    return none([](Ints bits) {
      const Ints magnitude = bits & INT32_MAX;
      return (magnitude != 0) & (magnitude < kLeastScale);
    });
  }
#endif

  // Elements that share a scale, at least.
  int32_t size() const { return shift_ < 31 ? 1 << shift_ : INT32_MAX; }

 private:
  GroupScales(int32_t groups, int32_t size)
      : groups_(groups), shift_(size > 0 ? __builtin_ctz(static_cast<uint32_t>(size)) : 31) {}

#if defined(__AVX512BF16__)
  static constexpr int32_t kLeastScale = 10 << 23;  // times 2^-9, the least element but zero

  template <class Test>
  bool none(const Test& test) const {
    __mmask16 found = 0;
    for (int32_t i = 0; i < groups_; i += kWidth) {
      const auto failed = (__m512i)test((Ints)load(at_ + i));
      const uint32_t scales = groups_ - i < kWidth ? (1u << (groups_ - i)) - 1 : 0xffff;
      found |= _mm512_mask_test_epi32_mask(static_cast<__mmask16>(scales), failed, failed);
    }
    return found == 0;
  }
#endif

  float at_[kMaxGroups];  // in whole vectors
  int32_t groups_, shift_;
};

// Elements times the scales of their groups, each product rounded to float32.
inline void scale_row(Number from, const char* row, int32_t dim, const GroupScales& scales,
                      float* to) {
  with_type(from, [&](auto type) {
    constexpr Number kFrom = type;
    for (int32_t i = 0; i < dim; i += kWidth)
      store(to + i, load_as_floats<kFrom>(row + bytes_of(kFrom, i)) * scales.of(i));
  });
}

#if defined(SPARSE_ATTN_BF16)
constexpr int kPair = 2 * kWidth;  // elements of bf16 in a vector

// Upper halves of numbers that all are numbers of bf16: of `low`, then of `high`.
template <int... kElement>
SPARSE_ATTN_INLINE Floats upper_halves(Floats low, Floats high,
                                       std::integer_sequence<int, kElement...>) {
  return (Floats)__builtin_shufflevector((Shorts)low, (Shorts)high, (2 * kElement + 1)...);
}

SPARSE_ATTN_INLINE Floats upper_halves(Floats low, Floats high) {
  return upper_halves(low, high, std::make_integer_sequence<int, kPair>());
}

#if defined(__AVX512BF16__)
// Magnitudes of e4m3 as bf16, by their code: the low and the high bytes. In `marked` ones the last
// bit, which none of them needs, marks those that a power of two multiplies by moving the exponent:
// neither zero nor NaN.
struct E4m3Magnitudes {
  constexpr explicit E4m3Magnitudes(int mark) : low(), high() {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> 3, mantissa = code & 7;
      if (exponent == 0 && mantissa > 0) {  // denormal
        for (exponent = 1; mantissa < 8; --exponent) mantissa *= 2;
        mantissa -= 8;
      }
      const int number = code == 0     ? 0
                         : code == 127 ? 0x7fc0
                                       : ((exponent + 120) << 7 | mantissa << 4 | mark);
      low[code] = static_cast<uint8_t>(number & 255);
      high[code] = static_cast<uint8_t>(number >> 8);
    }
  }

  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

constexpr E4m3Magnitudes kE4m3(0), kMarkedE4m3(1);

// Two vectors of bf16 from 64 codes.
SPARSE_ATTN_INLINE void look_up_e4m3(const E4m3Magnitudes& magnitudes, const char* codes,
                                     __m512i* x) {
  // Interleaving works within 16 bytes: then numbers come in order.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i c = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes));
  const auto look_up = [&](const uint8_t* table) {  // the sign bit does not count
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), c, _mm512_load_si512(table + 64));
  };
  const __m512i low = look_up(magnitudes.low), sign = _mm512_set1_epi8(INT8_MIN);
  const __m512i high = _mm512_or_si512(look_up(magnitudes.high), _mm512_and_si512(c, sign));
  x[0] = _mm512_unpacklo_epi8(low, high);
  x[1] = _mm512_unpackhi_epi8(low, high);
}

// Numbers of int4 as bf16, by their code.
alignas(64) constexpr uint16_t kInt4[kPair] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                                               0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0,
                                               0xc080, 0xc040, 0xc000, 0xbf80};

// Numbers of a table by the kPair codes of four bits at p, the one of even index in the low half of
// each byte.
SPARSE_ATTN_INLINE __m512i look_up_nibbles(const char* p, __m512i table) {
  __m512i x = (__m512i)load_bytes(p);
  x = _mm512_or_si512(x, _mm512_slli_epi32(x, 12));
  return _mm512_permutexvar_epi16(_mm512_and_si512(x, _mm512_set1_epi16(15)), table);
}

#endif

// To bf16, from a type whose numbers all are numbers of bf16.
template <Number kFrom>
inline void convert_row(const char* row, int32_t dim, uint16_t* to) {
  if constexpr (kFrom == Number::kBf16) {
    memcpy(to, row, static_cast<size_t>(dim) * 2);
    return;
  }
  const auto load = [=](int32_t i) { return load_as_floats<kFrom>(row + bytes_of(kFrom, i)); };
  int32_t i = 0;
#if defined(__AVX512BF16__)
  if constexpr (kFrom == Number::kInt4) {
    const __m512i table = _mm512_load_si512(kInt4);
    for (; i + kPair <= dim; i += kPair)
      _mm512_storeu_si512(to + i, look_up_nibbles(row + i / 2, table));
  }
  for (; kFrom == Number::kE4m3 && i + 2 * kPair <= dim; i += 2 * kPair) {
    __m512i x[2];
    look_up_e4m3(kE4m3, row + i, x);
    for (int j = 0; j < 2; ++j) _mm512_storeu_si512(to + i + j * kPair, x[j]);
  }
#endif
  for (; i + kPair <= dim; i += kPair) store(to + i, upper_halves(load(i), load(i + kWidth)));
  for (; i < dim; i += kWidth) {
    const Floats x =
        load_rest<kFrom>(row + bytes_of(kFrom, i), dim - i < kWidth ? dim - i : kWidth);
    for (int j = 0; j < kWidth && i + j < dim; ++j) to[i + j] = float_to_bf16(x[j]);
  }
}

inline void convert_row(Number from, const char* row, int32_t dim, uint16_t* to) {
  with_type(from, [=](auto type) { convert_row<type>(row, dim, to); });
}

#if defined(__AVX512BF16__)
// e4m3 times powers of two, as a sum in the exponent. Rows are of a multiple of 64 elements.
inline void move_e4m3(const char* row, int32_t dim, const GroupScales& scales, uint16_t* to) {
  for (int32_t i = 0; i < dim; i += 2 * kPair) {
    __m512i x[2];
    look_up_e4m3(kMarkedE4m3, row + i, x);
    for (int j = 0; j < 2; ++j) {
      const int32_t at = i + j * kPair;
      const int32_t exponent = static_cast<int32_t>(bits_of(scales.at(at)) >> 23) - 127;
      const __m512i move = _mm512_set1_epi16(static_cast<int16_t>(exponent * 128 - 1));
      const __mmask32 moved = _mm512_test_epi16_mask(x[j], _mm512_set1_epi16(1));
      _mm512_storeu_si512(to + at, _mm512_mask_add_epi16(x[j], moved, x[j], move));
    }
  }
}

// e4m3 times any scales, products rounded to float32 and then to bf16.
inline void scale_e4m3(const char* row, int32_t dim, const GroupScales& scales, uint16_t* to) {
  for (int32_t i = 0; i < dim; i += 2 * kPair) {
    __m512i x[2];
    look_up_e4m3(kE4m3, row + i, x);
    for (int j = 0; j < 2; ++j) {
      const Floats even = (Floats)_mm512_slli_epi32(x[j], 16);
      const Floats odd = (Floats)_mm512_and_si512(x[j], _mm512_set1_epi32(~0xffff));
      const Floats scale = scales.of(i + j * kPair);
      store(to + i + j * kPair, pair_bf16(even * scale, odd * scale));
    }
  }
}

// e2m1 times the scales of groups: a table of all products for each 16 elements, or for each kPair
// of wider groups.
inline void scale_e2m1(const char* row, int32_t dim, const GroupScales& scales, uint16_t* to) {
  const char codes[] = "\x10\x32\x54\x76\x98\xba\xdc\xfe";
  const Floats numbers = load_as_floats<Number::kE2m1>(codes);
  const __m512i upper = _mm512_set1_epi16(16);  // the second half of a table
  const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  const auto look_up = [&](int32_t i, __m512i half,
                           Floats products) __attribute__((always_inline)) {
    __m512i x = (__m512i)load_bytes(row + i / 2);
    x = _mm512_or_si512(x, _mm512_slli_epi32(x, 12));
    x = _mm512_or_si512(_mm512_and_si512(x, _mm512_set1_epi16(15)), half);
    _mm512_storeu_si512(to + i, _mm512_permutexvar_epi16(x, (__m512i)products));
  };
  int32_t i = 0;
  for (; scales.size() >= kPair && i + 2 * kPair <= dim; i += 2 * kPair) {
    const Floats products = join_bf16(numbers * scales.of(i), numbers * scales.of(i + kPair));
    look_up(i, _mm512_setzero_si512(), products);
    look_up(i + kPair, upper, products);
  }
  for (; i < dim; i += kPair)
    look_up(i, second, join_bf16(numbers * scales.of(i), numbers * scales.of(i + kWidth)));
}

#endif

// As above, products rounded to bf16. Exact if elements are e4m3 and scales are powers of two, or
// if elements are e2m1.
inline void scale_row(Number from, const char* row, int32_t dim, const GroupScales& scales,
                      uint16_t* to) {
#if defined(__AVX512BF16__)
  if (from == Number::kE2m1) return scale_e2m1(row, dim, scales, to);
  if (from == Number::kE4m3 && dim % (2 * kPair) == 0) {
    return scales.move_exponents() ? move_e4m3(row, dim, scales, to)
                                   : scale_e4m3(row, dim, scales, to);
  }
#endif
  with_type(from, [&](auto type) {
    constexpr Number kFrom = type;
    const auto scaled = [&](int32_t i) {
      return load_as_floats<kFrom>(row + bytes_of(kFrom, i)) * scales.of(i);
    };
    for (int32_t i = 0; i < dim; i += kPair)
      store(to + i, join_bf16(scaled(i), scaled(i + kWidth)));
  });
}
#endif

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
