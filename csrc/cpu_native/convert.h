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

// kWidth of the `count` elements that are left of a row, which it fills up with zeros.
template <Number kFrom>
SPARSE_ATTN_INLINE Floats load_rest(const char* row, int32_t count) {
  char rest[4 * kWidth] = {};
  memcpy(rest, row, static_cast<size_t>((count * number_bits(kFrom) + 7) / 8));
  return load_as_floats<kFrom>(rest);
}

inline void convert_row(Number from, const char* row, int32_t dim, float* to) {
  with_type(from, [=](auto type) {
    constexpr Number kFrom = type;
    int32_t i = 0;
    for (; i + kWidth <= dim; i += kWidth)
      store(to + i, load_as_floats<kFrom>(row + bytes_of(kFrom, i)));
    if (i == dim) return;
    const Floats x = load_rest<kFrom>(row + bytes_of(kFrom, i), dim - i);
    for (int j = 0; i + j < dim; ++j) to[i + j] = x[j];
  });
}

// Most groups of a row that have a scale each.
constexpr int kMaxGroups = 32;

// The scales of a row's groups. Formats of which groups have scales have no more.
struct GroupScales {
  GroupScales(Number type, const char* from, int32_t groups) {
    convert_row(type, from, groups, at);
  }

  Floats of(int32_t group) const { return broadcast(at[group]); }

  float at[kMaxGroups];
};

// Elements times the scales of their groups, each product rounded to float32. Groups are of 16
// elements or a multiple.
inline void scale_row(Number from, const char* row, int32_t dim, int32_t group,
                      const GroupScales& scales, float* to) {
  with_type(from, [&](auto type) {
    constexpr Number kFrom = type;
    for (int32_t i = 0; i < dim; i += kWidth)
      store(to + i, load_as_floats<kFrom>(row + bytes_of(kFrom, i)) * scales.of(i / group));
  });
}

#if defined(__AVX512BF16__)
constexpr int kPair = 2 * kWidth;  // elements of bf16 in a vector

// To bf16, from a type whose numbers all are numbers of bf16.
inline void convert_row(Number from, const char* row, int32_t dim, uint16_t* to) {
  with_type(from, [=](auto type) {
    constexpr Number kFrom = type;
    const auto load = [=](int32_t i) { return load_as_floats<kFrom>(row + bytes_of(kFrom, i)); };
    int32_t i = 0;
    for (; i + kPair <= dim; i += kPair) store(to + i, join_bf16(load(i), load(i + kWidth)));
    for (; i < dim; i += kWidth) {
      const Floats x =
          load_rest<kFrom>(row + bytes_of(kFrom, i), dim - i < kWidth ? dim - i : kWidth);
      for (int j = 0; j < kWidth && i + j < dim; ++j) to[i + j] = float_to_bf16(x[j]);
    }
  });
}

// As above, products rounded to bf16. Exact if elements are e4m3 and scales are powers of two, or
// if elements are e2m1.
inline void scale_row(Number from, const char* row, int32_t dim, int32_t group,
                      const GroupScales& scales, uint16_t* to) {
  with_type(from, [&](auto type) {
    constexpr Number kFrom = type;
    const auto scaled = [&](int32_t i) {
      return load_as_floats<kFrom>(row + bytes_of(kFrom, i)) * scales.of(i / group);
    };
    for (int32_t i = 0; i < dim; i += kPair)
      store(to + i, join_bf16(scaled(i), scaled(i + kWidth)));
  });
}
#endif

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
