// Conversions of single numbers between float32 and shorter types: round to nearest even, exact on
// denormals, NaN stays NaN. Functions have internal linkage, so that no copy built for another
// instruction set is shared.
#pragma once

#include <stdint.h>
#include <string.h>

namespace sparse_attn {
namespace {

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float bf16_to_float(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float half_to_float(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(x & 0x7fff) << 13;
  if (rest >= 0x0f800000u) return float_of(sign | rest | 0x7f800000u);  // infinity, NaN
  return float_of(sign | bits_of(float_of(rest) * 0x1p112f));
}

// No branches, and signed comparisons, so that loops of it become vectors.
inline uint16_t float_to_half(float x) {
  const uint32_t sign = (bits_of(x) >> 16) & 0x8000;
  const int32_t rest = static_cast<int32_t>(bits_of(x) & 0x7fffffffu);
  // Below the smallest normal half: the addition rounds to its spacing.
  const float sum = float_of(static_cast<uint32_t>(rest)) + 0.5f;
  const int32_t subnormal = static_cast<int32_t>(bits_of(sum)) - 0x3f000000;
  const int32_t normal = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
  int32_t half = rest < 0x38800000 ? subnormal : normal;
  half = rest >= 0x477ff000 ? 0x7c00 : half;  // 65520 and more
  half = rest > 0x7f800000 ? 0x7e00 : half;
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(half));
}

inline float e4m3_to_float(uint8_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x80) << 24;
  const uint32_t rest = x & 0x7f;
  if (rest == 0x7f) return float_of(sign | 0x7fc00000u);
  return float_of(sign | bits_of(float_of(rest << 20) * 0x1p120f));
}

inline float e8m0_to_float(uint8_t x) {
  if (x == 0) return 0x1p-127f;
  return float_of(x == 0xff ? 0x7fc00000u : static_cast<uint32_t>(x) << 23);
}

inline float e2m1_to_float(uint8_t code) {  // the low half of `code`
  constexpr float kNumbers[] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  return kNumbers[code & 15];
}

inline int32_t int4_to_int(uint8_t code) { return ((code & 15) ^ 8) - 8; }  // the low half

}  // namespace
}  // namespace sparse_attn
