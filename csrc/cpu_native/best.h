// The best of a stream of scored numbers, in a bounded buffer. Functions that may be inlined have
// internal linkage, so that no copy built for another instruction set is shared.
#pragma once

#include <stdint.h>

#include "../common/number.h"

namespace sparse_attn {

// Most numbers that are added between two calls of `make_room`.
constexpr int64_t kBestStep = 128;

// Numbers come in ascending order and stay in it: a buffer that is full is cut down to the `count`
// best in place (best_cut.h), and what does not exceed the last of them is not taken any more.
struct Best {
  uint64_t* ranks;
  int64_t room;
  int64_t count;
  int64_t size;
  float threshold;  // scores up to it are not taken
};

// Words of a buffer for the `count` best of `numbers`: room for so many again, so that cuts are
// few, and for a step.
static inline int64_t best_words(int64_t count, int64_t numbers) {
  return (count > numbers / 2 ? numbers : 2 * count) + kBestStep;
}

void open(Best* best, uint64_t* ranks, int64_t words, int64_t count);

// The `count`-th largest of some ranks, which it reorders.
uint64_t nth_largest(uint64_t* ranks, int64_t size, int64_t count);

// Sorts ranks by their last `bits` bits, a multiple of 8, the largest first. `spare` has as many
// words.
void sort_ranks(uint64_t* ranks, int64_t size, int bits, uint64_t* spare);

// A score and its number as one word: a larger word is a larger score or, of equal scores, a lower
// number. Zeros of either sign are equal; a score is no NaN.
static inline uint64_t ranked(float score, int64_t number) {
  const uint32_t bits = bits_of(score + 0.0f);
  const uint32_t order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(order) << 32 | (0xffffffffu - static_cast<uint32_t>(number));
}

static inline int64_t number_of(uint64_t rank) { return 0xffffffffu - static_cast<uint32_t>(rank); }

static inline float score_of(uint64_t rank) {
  const uint32_t order = static_cast<uint32_t>(rank >> 32);
  return float_of(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// Takes the number if its score exceeds the threshold; a NaN does not.
static inline void add(Best* best, float score, int64_t number) {
  if (score > best->threshold) best->ranks[best->size++] = ranked(score, number);
}

}  // namespace sparse_attn
