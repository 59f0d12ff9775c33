// The buffers of best.h, filled and cut with the vectors there are.
#pragma once

#include "best.h"
#include "simd.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// Copies those of some ranks that lie in [low, high] in order; how many. `to` has room for all of
// them, and may be `from`.
inline int64_t copy_between(const uint64_t* from, int64_t size, uint64_t low, uint64_t high,
                            uint64_t* to) {
  int64_t i = 0, count = 0;
#if defined(__AVX512F__)
  const __m512i lows = _mm512_set1_epi64(static_cast<int64_t>(low));
  const __m512i highs = _mm512_set1_epi64(static_cast<int64_t>(high));
  for (; i + 8 <= size; i += 8) {
    const __m512i x = _mm512_loadu_si512(from + i);
    const __mmask8 above = _mm512_cmpge_epu64_mask(x, lows);
    const __mmask8 inside = _mm512_mask_cmple_epu64_mask(above, x, highs);
    _mm512_storeu_si512(to + count, _mm512_maskz_compress_epi64(inside, x));
    count += __builtin_popcount(inside);
  }
#endif
  for (; i < size; ++i) {
    const uint64_t rank = from[i];
    to[count] = rank;
    count += rank >= low && rank <= high;
  }
  return count;
}

// The `count`-th largest of some ranks. Those that it lies among are narrowed down by a sample of
// them, which is likely to have one near it.
inline uint64_t find_last(const uint64_t* ranks, int64_t size, int64_t count, uint64_t* spare) {
  constexpr int kSamples = 16, kFew = 64, kMostPasses = 24;
  const uint64_t* from = ranks;
  for (int pass = 0; pass < kMostPasses && size > kFew; ++pass, from = spare) {
    uint64_t sample[kSamples];
    for (int i = 0; i < kSamples; ++i) {
      const uint64_t rank = from[i * size / kSamples];
      int at = i;
      for (; at > 0 && sample[at - 1] < rank; --at) sample[at] = sample[at - 1];
      sample[at] = rank;
    }
    const uint64_t pivot = sample[(count - 1) * kSamples / size];
    int64_t above = 0, from_pivot = 0;
    for (int64_t i = 0; i < size; ++i) {
      above += from[i] > pivot;
      from_pivot += from[i] >= pivot;
    }
    if (count > above && count <= from_pivot) return pivot;
    if (count <= above) {
      size = copy_between(from, size, pivot + 1, UINT64_MAX, spare);
    } else {
      size = copy_between(from, size, 0, pivot - 1, spare);
      count -= from_pivot;
    }
  }
  if (from == ranks) memcpy(spare, ranks, static_cast<size_t>(size) * sizeof(*ranks));
  return nth_largest(spare, size, count);
}

// Leaves the `count` best. `spare` has as many words as the buffer.
inline void cut(Best* best, uint64_t* spare) {
  if (best->size <= best->count) return;
  uint64_t* const ranks = best->ranks;
  const uint64_t last = find_last(ranks, best->size, best->count, spare);
  const int64_t size = copy_between(ranks, best->size, last, UINT64_MAX, ranks);
  for (int64_t i = 0, kept = 0, surplus = size - best->count; surplus > 0; ++i) {
    const bool dropped = ranks[i] == last;  // as good as another
    ranks[kept] = ranks[i];
    kept += !dropped;
    surplus -= dropped;
    if (surplus == 0) memmove(ranks + kept, ranks + i + 1, static_cast<size_t>(size - i - 1) * 8);
  }
  best->size = best->count;
  best->threshold = score_of(last);
}

inline void make_room(Best* best, uint64_t* spare) {
  if (best->size + kBestStep > best->room) cut(best, spare);
}

// Takes the scores of the lanes in `taken`, of which some exceed the threshold; there is room for
// all lanes.
inline void add(Best* best, const float* scores, const int64_t* numbers, uint32_t taken) {
  taken &= greater(load(scores), broadcast(best->threshold));
  if (!taken) return;
#if defined(__AVX512F__)
  const Ints bits = (Ints)(load(scores) + Floats{});
  const __m512i order = (__m512i)(bits ^ (bits >> 31 | broadcast_int(INT32_MIN)));
  for (int half = 0; half < 2; ++half, taken >>= 8) {
    const __m256i upper =
        half ? _mm512_extracti64x4_epi64(order, 1) : _mm512_castsi512_si256(order);
    const __m512i lower =
        _mm512_andnot_si512(_mm512_loadu_si512(numbers + 8 * half), _mm512_set1_epi64(UINT32_MAX));
    const __m512i ranks =
        _mm512_or_si512(_mm512_slli_epi64(_mm512_cvtepu32_epi64(upper), 32), lower);
    const auto in_half = static_cast<__mmask8>(taken);
    _mm512_storeu_si512(best->ranks + best->size, _mm512_maskz_compress_epi64(in_half, ranks));
    best->size += __builtin_popcount(in_half);
  }
#else
  for (; taken; taken &= taken - 1) {
    const int lane = __builtin_ctz(taken);
    best->ranks[best->size++] = ranked(scores[lane], numbers[lane]);
  }
#endif
}

// Takes kBestStep scores that exceed the threshold.
inline void add_step(Best* best, const float* scores, const int64_t* numbers) {
  for (int i = 0; i < kBestStep; i += kWidth) add(best, scores + i, numbers + i, UINT32_MAX);
}

// Takes what another has taken of other numbers. They no longer ascend.
inline void join(Best* best, const Best& other, uint64_t* spare) {
  for (int64_t i = 0; i < other.size; i += kBestStep) {
    make_room(best, spare);
    const int64_t count = other.size - i < kBestStep ? other.size - i : kBestStep;
    const uint64_t low = ranked(best->threshold, UINT32_MAX);  // equal scores, of lower numbers
    best->size += copy_between(other.ranks + i, count, low, UINT64_MAX, best->ranks + best->size);
  }
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
