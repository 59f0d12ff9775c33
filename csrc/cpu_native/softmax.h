// One tile's step of the running softmax: scores become probabilities relative to the running
// maximum, in place, and the maximum and the sum of each lane move on. Scores are in base 2: the
// factor holds 1 / ln 2.
#pragma once

#include "micro.h"
#include "tiles.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

// Running state of a vector of lanes, or of one lane. `alpha` is what earlier sums of the chunk are
// to be scaled by.
struct LaneState {
  float* maximum;
  float* sum;
  float* alpha;
};

// kWidth lanes side by side: `s` is their column of [kTile][ld]. Lanes see rows [low, high) if
// kMixed, else every row in [first, last). Leaves groups of probabilities, times the scale of the
// value's row, for pv.
template <class Mode, bool kMixed>
inline void softmax_lanes(const Tile& tile, const float* factors, float* s, int64_t ld, Ints low,
                          Ints high, LaneState state) {
  const Floats before = load(state.maximum);
  Floats maximum = before;
  for (int n = tile.first; n < tile.last; ++n) {
    Floats x = load(s + n * ld) * broadcast(factors[n]);
    if (kMixed)
      x = (broadcast_int(n) >= low) & (broadcast_int(n) < high) ? x : broadcast(-kInfinity);
    store(s + n * ld, x);
    maximum = max(x, maximum);
  }
  const Floats alpha = exp2(before - maximum);
  Floats sum = load(state.sum) * alpha;
  const auto probability = [&](int n) {
    if (n < tile.first || n >= tile.last) return Floats{};
    const Floats p = exp2(load(s + n * ld) - maximum);
    if (!kMixed) {
      sum += p;
      return p * broadcast(tile.v_scale[n]);
    }
    const Ints seen = (broadcast_int(n) >= low) & (broadcast_int(n) < high);
    sum += seen ? p : Floats{};
    return seen ? p * broadcast(tile.v_scale[n]) : Floats{};
  };
  if constexpr (Mode::kGroup == 1) {
    for (int n = tile.first; n < tile.last; ++n) store(s + n * ld, probability(n));
  } else {
#if defined(__AVX512BF16__)
    for (int n = tile.first & ~1; n < tile.last; n += 2) {
      const Floats even = probability(n), odd = probability(n + 1);
      store(s + n / 2 * ld, pair_bf16(even, odd));
    }
#endif
  }
  store(state.maximum, maximum);
  store(state.sum, sum);
  store(state.alpha, alpha);
}

// One lane, whose scores lie side by side: `s` is [kTile]. All rows in [first, last) are seen.
template <class Mode>
inline void softmax_lane(const Tile& tile, const float* factors, float* s, LaneState state) {
  Ints places;
  for (int i = 0; i < kWidth; ++i) places[i] = i;
  const Ints first = broadcast_int(tile.first), last = broadcast_int(tile.last);
  const int begin = tile.first / (2 * kWidth) * (2 * kWidth);
  Floats maxima = broadcast(-kInfinity);
  for (int n = begin; n < tile.last; n += kWidth) {
    const Ints place = places + broadcast_int(n);
    Floats x = load(s + n) * load(factors + n);
    x = (place >= first) & (place < last) ? x : broadcast(-kInfinity);
    store(s + n, x);
    maxima = max(x, maxima);
  }
  const float before = *state.maximum;
  const float maximum = max(largest(maxima), before);
  Floats sum_of_lanes = {};
  const auto probability = [&](int n) {
    if (n >= tile.last) return Floats{};
    const Floats p = exp2(load(s + n) - broadcast(maximum));
    sum_of_lanes += p;
    return p * load(tile.v_scale + n);
  };
  for (int n = begin; n < tile.last; n += Mode::kGroup * kWidth) {
    if constexpr (Mode::kGroup == 1) {
      store(s + n, probability(n));
    } else {
#if defined(__AVX512BF16__)
      const Floats low = probability(n), high = probability(n + kWidth);
      store(s + n / 2, join_bf16(low, high));
#endif
    }
  }
  *state.alpha = exp2(before - maximum);
  *state.sum = *state.sum * *state.alpha + sum(sum_of_lanes);
  *state.maximum = maximum;
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
