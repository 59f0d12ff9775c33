#include "best.h"

#include <string.h>

#include <algorithm>
#include <functional>

namespace sparse_attn {

void open(Best* best, uint64_t* ranks, int64_t words, int64_t count) {
  const float infinity = __builtin_inff();
  *best = {ranks, words, count, 0, count > 0 ? -infinity : infinity};
}

uint64_t nth_largest(uint64_t* ranks, int64_t size, int64_t count) {
  std::nth_element(ranks, ranks + count - 1, ranks + size, std::greater<uint64_t>());
  return ranks[count - 1];
}

// By one byte after the other, the lowest first.
void sort_ranks(uint64_t* ranks, int64_t size, int bits, uint64_t* spare) {
  constexpr int kByte = 8, kValues = 1 << kByte;
  uint64_t *from = ranks, *to = spare;
  for (int shift = 0; shift < bits; shift += kByte) {
    const auto digit = [=](uint64_t rank) { return kValues - 1 - (rank >> shift) % kValues; };
    int64_t starts[kValues + 1] = {};
    for (int64_t i = 0; i < size; ++i) ++starts[digit(from[i]) + 1];
    if (size == 0 || starts[digit(from[0]) + 1] == size) continue;  // all have the same
    for (int i = 1; i < kValues; ++i) starts[i] += starts[i - 1];
    for (int64_t i = 0; i < size; ++i) to[starts[digit(from[i])]++] = from[i];
    std::swap(from, to);
  }
  if (from != ranks) memcpy(ranks, from, static_cast<size_t>(size) * sizeof(*ranks));
}

}  // namespace sparse_attn
