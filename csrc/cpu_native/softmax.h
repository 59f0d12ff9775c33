// One tile's step of the running softmax: scores become probabilities relative to the running
// maximum, in place, and the maximum and the sum of each lane move on. Scores are in base 2: the
// factor holds 1 / ln 2.
#pragma once

#include "micro.h"
#include "tiles.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// Running state of a vector of lanes, or of one lane. `alpha` is what earlier sums of the chunk are
// to be scaled by.
struct LaneState {
  float* maximum;
  float* sum;
  float* alpha;
};

// Probabilities of a tile are summed as four sums, of rows whose numbers agree modulo 4, each from
// its first row on.

// kWidth lanes side by side: `s` is their column of [kTile][ld]. Lanes see rows [low, high) if
// kMixed, else every row in [first, last). Leaves groups of probabilities, times the scale of the
// value's row, for pv.
template <class Mode, bool kMixed>
inline void softmax_lanes(const Tile& tile, const float* factors, float* s, int64_t ld, Ints low,
                          Ints high, LaneState state) {
  const int begin = tile.first / 4 * 4, end = (tile.last + 3) / 4 * 4;
  const Floats hidden = broadcast(-kInfinity);
  for (int n = begin; n < tile.first; ++n) store(s + n * ld, hidden);
  for (int n = tile.last; n < end; ++n) store(s + n * ld, hidden);
  const auto seen = [&](int n) { return (broadcast_int(n) >= low) & (broadcast_int(n) < high); };

  const Floats before = load(state.maximum);
  Floats maximum = before;
  for (int n = tile.first; n < tile.last; ++n) {
    Floats x = load(s + n * ld) * broadcast(factors[n]);
    if (kMixed) x = seen(n) ? x : hidden;
    store(s + n * ld, x);
    maximum = max(x, maximum);
  }
  const Floats alpha = exp2(before - maximum);
  Floats sums[4] = {};
  for (int n = begin; n < end; n += 4) {
    Floats p[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      p[i] = exp2(load(s + (n + i) * ld) - maximum);
      if (kMixed) p[i] = seen(n + i) ? p[i] : Floats{};
      sums[i] += p[i];
      p[i] *= broadcast(tile.v_scale[n + i]);
      if (kMixed) p[i] = seen(n + i) ? p[i] : Floats{};  // whatever the scale is
    }
    if constexpr (Mode::kGroup == 1) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) store(s + (n + i) * ld, p[i]);
    } else {
#if defined(SPARSE_ATTN_MATRICES)  // as pv_matrices takes them
      const Floats first = pair_bf16(p[0], p[1]), second = pair_bf16(p[2], p[3]);
      store(s + n / 2 * ld, zip<Floats, 0>(first, second));
      store(s + (n / 2 + 1) * ld, zip<Floats, 1>(first, second));
#elif defined(SPARSE_ATTN_BF16)
      store(s + n / 2 * ld, pair_bf16(p[0], p[1]));
      store(s + (n / 2 + 1) * ld, pair_bf16(p[2], p[3]));
#endif
    }
  }
  store(state.maximum, maximum);
  store(state.sum, fma(load(state.sum), alpha, (sums[0] + sums[1]) + (sums[2] + sums[3])));
  store(state.alpha, alpha);
}

// The same for one lane, which sees rows [low, high): `s` is [kTile]. Gives the same bits.
template <class Mode>
inline void softmax_lane(const Tile& tile, const float* factors, float* s, int low, int high,
                         LaneState state) {
  Ints places;
  for (int i = 0; i < kWidth; ++i) places[i] = i;
  const auto seen = [&](int n) {
    const Ints place = places + broadcast_int(n);
    return (place >= broadcast_int(low)) & (place < broadcast_int(high));
  };
  const int step = Mode::kGroup * kWidth;
  const int begin = tile.first / step * step, end = (tile.last + step - 1) / step * step;

  Floats maxima = broadcast(-kInfinity);
  for (int n = begin; n < end; n += kWidth) {
    const Floats x = seen(n) ? load(s + n) * load(factors + n) : broadcast(-kInfinity);
    store(s + n, x);
    maxima = max(x, maxima);
  }
  const float before = *state.maximum;
  const float maximum = max(largest(maxima), before);
  FourFloats sums = {};
  const auto probability = [&](int n) {
    const Floats p = exp2(load(s + n) - broadcast(maximum));
    sums = add_fours(sums, p);
    return seen(n) ? p * load(tile.v_scale + n) : Floats{};
  };
  for (int n = begin; n < end; n += step) {
    if constexpr (Mode::kGroup == 1) {
      store(s + n, probability(n));
    } else {
#if defined(SPARSE_ATTN_BF16)
      const Floats p = probability(n);
      store(s + n / 2, join_bf16(p, probability(n + kWidth)));
#endif
    }
  }
  const float alpha = exp2(before - maximum);
  const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  *state.sum = fma(broadcast(*state.sum), broadcast(alpha), broadcast(sum))[0];
  *state.alpha = alpha;
  *state.maximum = maximum;
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
