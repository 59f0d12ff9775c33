// Reads numbers and rows of every codec as float32: the specification of faster readers.
#pragma once

#include "layout.h"
#include "number.h"

namespace sparse_attn {
namespace {

// Number i of those at p, which need no alignment.
inline float read_number(Number type, const void* p, int64_t i) {
  const auto* bytes = static_cast<const uint8_t*>(p);
  uint16_t half = 0;
  if (number_bits(type) == 16) memcpy(&half, bytes + 2 * i, 2);
  const auto nibble = [=] { return static_cast<uint8_t>(bytes[i / 2] >> 4 * (i % 2)); };
  switch (type) {
    case Number::kFp32: {
      float x;
      memcpy(&x, bytes + 4 * i, 4);
      return x;
    }
    case Number::kBf16:
      return bf16_to_float(half);
    case Number::kFp16:
      return half_to_float(half);
    case Number::kE4m3:
      return e4m3_to_float(bytes[i]);
    case Number::kE8m0:
      return e8m0_to_float(bytes[i]);
    case Number::kInt8:
      return static_cast<int8_t>(bytes[i]);
    case Number::kE2m1:
      return e2m1_to_float(nibble());
    case Number::kInt4:
      return static_cast<float>(int4_to_int(nibble()));
    case Number::kNone:
      break;
  }
  return 0;
}

template <Number kElement>
inline void decode_group(const char* values, int64_t at, int64_t count, float scale, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = read_number(kElement, values, at + i) * scale;
}

// A row of `dim` elements. An element is one product in float32: stored * scale.
inline void decode_row(const Codec& codec, const EntryParts& parts, int64_t dim, float* to) {
  const int64_t stored = dim - codec.rope, group = codec.group == 0 ? stored : codec.group;
  for (int64_t at = 0; at < stored; at += group) {
    const bool scaled = codec.scale != Number::kNone;
    const float scale = scaled ? read_number(codec.scale, parts.scales, at / group) : 1;
    switch (codec.element) {
#define SPARSE_ATTN_CASE(element)                                   \
  case element:                                                     \
    decode_group<element>(parts.values, at, group, scale, to + at); \
    break;
      SPARSE_ATTN_CASE(Number::kFp32)
      SPARSE_ATTN_CASE(Number::kBf16)
      SPARSE_ATTN_CASE(Number::kFp16)
      SPARSE_ATTN_CASE(Number::kE4m3)
      SPARSE_ATTN_CASE(Number::kE8m0)
      SPARSE_ATTN_CASE(Number::kInt8)
      SPARSE_ATTN_CASE(Number::kE2m1)
      SPARSE_ATTN_CASE(Number::kInt4)
#undef SPARSE_ATTN_CASE
      case Number::kNone:
        break;
    }
  }
  decode_group<Number::kBf16>(parts.rope, 0, codec.rope, 1, to + stored);
}

}  // namespace
}  // namespace sparse_attn
