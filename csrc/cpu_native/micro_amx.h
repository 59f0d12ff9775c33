// The inner loop of products in AMX's tile registers, which serves keys times queries and
// probabilities times values alike.
//
// All registers hold 16 rows of 64 bytes. What does not fill them is filled up: elements of keys
// and queries, and rows of values, with zeros; keys and lanes with anything, for a row of sums
// depends on a row of the one operand only, and a column on a column of the other.
#pragma once

#include "amx.h"
#include "micro.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

constexpr int kAmxPairs = kAmxRowBytes / 4;     // pairs of elements that a product adds up
constexpr int kAmxElements = kAmxRowBytes / 2;  // and elements
constexpr int kAmxBlock = 2 * kAmxRows;         // rows and columns that are multiplied together
static_assert(kAmxBlock == kPanel && kWidth == kAmxRows, "a panel has two tiles side by side");

// Bf16, with products in tile registers: those of an op.
template <class OpProducts>
struct Bf16Amx : Bf16 {
  static constexpr bool kAmx = true;
  static constexpr int kSteps = kAmxPairs;
  typedef AmxRegisters Registers;
  typedef OpProducts Products;
};

// Tiles of one side of a product: those of the next 16 rows or columns lie `next` bytes on, those
// of the next kAmxElements elements `step` bytes.
struct AmxOperand {
  const void* at;
  int64_t stride;  // of a tile's rows, in bytes
  int64_t next, step;

  const void* tile(int i, int64_t k) const {
    return static_cast<const char*>(at) + i * next + k * step;
  }
};

// s[r * ld + i] = (adds ? s[r * ld + i] : 0) + products of kRows x kColumns tiles, `steps` of each.
// Every load of a block of 2 x 2 serves two products. `fetcher.step()` is called between products.
template <int kRows, int kColumns, class Fetcher>
SPARSE_ATTN_APART void amx_multiply(const AmxOperand a, const AmxOperand b, int64_t steps,
                                    bool adds, float* s, int64_t ld, Fetcher& fetcher) {
  static_assert(kRows <= 2 && kColumns <= 2, "registers: four sums, two tiles of each operand");
  constexpr int kA = 4, kB = 6;
  const int64_t stride = ld * 4;
  float* const below = s + kAmxRows * ld;
  if (adds) {
    amx_load<0>(s, stride);
    if (kColumns > 1) amx_load<1>(s + kAmxRows, stride);
    if (kRows > 1) amx_load<2>(below, stride);
    if (kRows > 1 && kColumns > 1) amx_load<3>(below + kAmxRows, stride);
  } else {
    amx_zero<0>();
    if (kColumns > 1) amx_zero<1>();
    if (kRows > 1) amx_zero<2>();
    if (kRows > 1 && kColumns > 1) amx_zero<3>();
  }
  for (int64_t k = 0; k < steps; ++k) {
    fetcher.step();
    amx_load<kA>(a.tile(0, k), a.stride);
    amx_load<kB>(b.tile(0, k), b.stride);
    amx_dot_bf16<0, kA, kB>();
    if (kColumns > 1) {
      amx_load<kB + 1>(b.tile(1, k), b.stride);
      amx_dot_bf16<1, kA, kB + 1>();
    }
    if (kRows > 1) {
      amx_load<kA + 1>(a.tile(1, k), a.stride);
      amx_dot_bf16<2, kA + 1, kB>();
    }
    if (kRows > 1 && kColumns > 1) amx_dot_bf16<3, kA + 1, kB + 1>();
  }
  amx_store<0>(s, stride);
  if (kColumns > 1) amx_store<1>(s + kAmxRows, stride);
  if (kRows > 1) amx_store<2>(below, stride);
  if (kRows > 1 && kColumns > 1) amx_store<3>(below + kAmxRows, stride);
}

// The same of up to 2 x 2 tiles.
template <class Fetcher>
SPARSE_ATTN_INLINE void amx_multiply(int rows, int columns, const AmxOperand& a,
                                     const AmxOperand& b, int64_t steps, bool adds, float* s,
                                     int64_t ld, Fetcher& fetcher) {
  const auto multiply =
      rows > 1 ? (columns > 1 ? &amx_multiply<2, 2, Fetcher> : &amx_multiply<2, 1, Fetcher>)
               : (columns > 1 ? &amx_multiply<1, 2, Fetcher> : &amx_multiply<1, 1, Fetcher>);
  multiply(a, b, steps, adds, s, ld, fetcher);
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
