// What the tests of attend and select share: random numbers, and a check that says where it failed.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <random>

inline std::mt19937_64 generator(1);

inline int64_t below(int64_t n) {
  return static_cast<int64_t>(generator() % static_cast<uint64_t>(n));
}
inline int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
inline float normal() { return std::normal_distribution<float>()(generator); }

#define CHECK(condition, ...)                                \
  do {                                                       \
    if (!(condition)) {                                      \
      printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      printf(__VA_ARGS__);                                   \
      printf("\n");                                          \
      exit(1);                                               \
    }                                                        \
  } while (0)
