// Reads numbers and rows of every codec as float32, one by one: the specification of faster
// readers.
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

// The parts of an entry; those that its codec lacks are not read.
struct EntryParts {
  const char* values;
  const char* rope;
  const char* scales;
};

// A row of `dim` elements. An element is one product in float32: stored * scale.
inline void decode_row(const Codec& codec, const EntryParts& parts, int32_t dim, float* to) {
  const int32_t stored = dim - codec.rope, group = codec.group == 0 ? stored : codec.group;
  for (int32_t i = 0; i < stored; ++i) {
    to[i] = read_number(codec.element, parts.values, i);
    if (codec.scale != Number::kNone) to[i] *= read_number(codec.scale, parts.scales, i / group);
  }
  for (int32_t i = 0; i < codec.rope; ++i)
    to[stored + i] = read_number(Number::kBf16, parts.rope, i);
}

}  // namespace
}  // namespace sparse_attn
