// Scores of `softmax_sum`: probabilities of attention, normalised over all that a row scores.
//
// Keys are read once. The products of a tile become e = 2^(x - m), m the largest x of the tile, and
// sums of them are merged; a score is then a sum of e times 2^(m - M) / Z, M and Z those of the
// row.
#pragma once

#include "select_lanes.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// Of each lane: a maximum m of scores, in base 2, and the sum of 2^(score - m).
struct Sums {
  float* maximum;
  float* sum;
};

inline Sums sums_at(float* at, int64_t lanes) { return {at, at + lanes}; }

// Lanes come in whole vectors.
inline void clear(const Sums& sums, int64_t lanes) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
    sums.maximum[lane] = kNoScore;
    sums.sum[lane] = 0;
  }
}

// Sums of no score change nothing.
inline void merge_into(const Sums& into, const Sums& from, int64_t lanes) {
  for (int64_t lane = 0; lane < lanes; lane += kWidth) {
    const Floats m0 = load(into.maximum + lane), m1 = load(from.maximum + lane), m = max(m0, m1);
    store(into.sum + lane,
          load(into.sum + lane) * exp2(m0 - m) + load(from.sum + lane) * exp2(m1 - m));
    store(into.maximum + lane, m);
  }
}

// The products of four lanes with a tile become 2^(x - m), x = `factor` times the product. Lane i
// sees places seen[i] of [begin, end), multiples of kWidth. A NaN stays, and does not count.
template <bool kMixed>
inline void softmax_four(float* products, float factor, int begin, int end, const EntryRange* seen,
                         float* maximum, float* sum) {
  const Floats hidden = broadcast(-kInfinity);
  Ints first;
  for (int i = 0; i < kWidth; ++i) first[i] = i;
  const auto sees = [&](int lane, int n) {
    const Ints place = first + broadcast_int(n);
    return (place >= broadcast_int(static_cast<int32_t>(seen[lane].low))) &
           (place < broadcast_int(static_cast<int32_t>(seen[lane].high)));
  };
  Floats maxima[kFour] = {hidden, hidden, hidden, hidden};
  for (int n = begin; n < end; n += kWidth) {
#pragma GCC unroll 4
    for (int lane = 0; lane < kFour; ++lane) {
      float* at = products + lane * kTile + n;
      const Floats x = load(at) * broadcast(factor);
      store(at, x);
      maxima[lane] = max(kMixed ? (sees(lane, n) ? x : hidden) : x, maxima[lane]);
    }
  }
  transpose_fours(maxima);
  const FourFloats m = max_fours(FourFloats{kNoScore, kNoScore, kNoScore, kNoScore},
                                 max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3])));
  Floats sums[kFour] = {};
  for (int n = begin; n < end; n += kWidth) {
#pragma GCC unroll 4
    for (int lane = 0; lane < kFour; ++lane) {
      float* at = products + lane * kTile + n;
      const Floats e = exp2(load(at) - broadcast(m[lane]));
      store(at, e);
      Floats counted = e == e ? e : Floats{};
      if (kMixed) counted = sees(lane, n) ? counted : Floats{};
      sums[lane] += counted;
    }
  }
  transpose_fours(sums);
  const FourFloats total = add_fours(FourFloats{}, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  memcpy(maximum, &m, sizeof(m));
  memcpy(sum, &total, sizeof(total));
}

// What the e of a tile with such maxima are multiplied by: weights, which are divided by Z, times
// 2^(m - M). An infinite M leaves probabilities of 0 and NaN.
inline void scale_weights(const float* weights, const float* tile_maximum, const float* maximum,
                          int64_t lanes, float* factors) {
  for (int64_t lane = 0; lane < lanes; lane += kWidth) {
    const Floats m = load(tile_maximum + lane), row = load(maximum + lane);
    const Floats shift = m == row ? broadcast(1.0f) : exp2(m - row);
    store(factors + lane, load(weights + lane) * shift);
  }
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
