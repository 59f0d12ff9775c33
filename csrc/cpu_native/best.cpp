#include "best.h"

#include <algorithm>
#include <functional>

namespace sparse_attn {

void open(Best* best, uint64_t* ranks, int64_t words, int64_t count) {
  const float infinity = __builtin_inff();
  *best = {ranks, words, count, 0, count > 0 ? -infinity : infinity};
}

void cut(Best* best, uint64_t* spare) {
  if (best->size <= best->count) return;
  std::copy(best->ranks, best->ranks + best->size, spare);
  std::nth_element(spare, spare + best->count - 1, spare + best->size, std::greater<uint64_t>());
  const uint64_t last = spare[best->count - 1];
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
