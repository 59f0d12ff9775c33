#include "best.h"

#include <algorithm>
#include <functional>

namespace sparse_attn {
namespace {

// The `count`-th largest of some ranks, which may be reordered: counted by their first bits, then
// sought among those that share them with it.
uint64_t nth_largest(uint64_t* ranks, int64_t size, int64_t count) {
  constexpr int kBits = 11, kShift = 64 - kBits;
  int32_t counts[1 << kBits] = {};
  for (int64_t i = 0; i < size; ++i) ++counts[ranks[i] >> kShift];
  uint64_t first = (1 << kBits) - 1;
  for (; count > counts[first]; --first) count -= counts[first];
  int64_t found = 0;
  for (int64_t i = 0; i < size; ++i) {
    const uint64_t rank = ranks[i];
    ranks[found] = rank;
    found += rank >> kShift == first;
  }
  std::nth_element(ranks, ranks + count - 1, ranks + found, std::greater<uint64_t>());
  return ranks[count - 1];
}

}  // namespace

void open(Best* best, uint64_t* ranks, int64_t words, int64_t count) {
  const float infinity = __builtin_inff();
  *best = {ranks, words, count, 0, count > 0 ? -infinity : infinity};
}

void cut(Best* best, uint64_t* spare) {
  if (best->size <= best->count) return;
  std::copy(best->ranks, best->ranks + best->size, spare);
  const uint64_t last = nth_largest(spare, best->size, best->count);
  int64_t kept = 0;
  for (int64_t i = 0; i < best->size; ++i) {
    const uint64_t rank = best->ranks[i];
    best->ranks[kept] = rank;
    kept += rank >= last;
  }
  best->size = kept;
  best->threshold = score_of(last);
}

}  // namespace sparse_attn
