#include <math.h>

#include <algorithm>
#include <functional>

#include "best.h"
#include "memory.h"
#include "merge.h"
#include "parallel.h"

namespace sparse_attn {
namespace {

// Candidates below which starting threads costs more than they save.
constexpr int64_t kLeastCandidates = 1 << 13;

// Numbers are int32, and a negative one is below others: ranks take them as unsigned.
constexpr uint32_t kSign = 0x80000000u;

uint64_t halves_swapped(uint64_t rank) { return rank << 32 | rank >> 32; }

// What the shards selected, as ranks (see best.h); how many. Numbers that do not fit into int32
// wrap, whatever the offsets are.
int64_t gather(const SelectMergeParams& p, int64_t t, int64_t list, uint64_t* ranks) {
  int64_t count = 0;
  for (int64_t s = 0; s < p.shards; ++s) {
    const int32_t* indices = p.shard_indices + s * p.index_strides[0] + t * p.index_strides[1] +
                             list * p.index_strides[2];
    const float* values = p.shard_values + s * p.value_strides[0] + t * p.value_strides[1] +
                          list * p.value_strides[2];
    const auto offset =
        static_cast<uint32_t>(p.shard_offsets[s * p.offset_strides[0] + t * p.offset_strides[1]]);
    for (int64_t i = 0; i < p.width; ++i) {
      const int64_t local = indices[i * p.index_strides[3]];
      const float value = values[i * p.value_strides[3]];
      if (local < 0 || !(value > -INFINITY)) continue;
      const int64_t whole = p.run == 1 ? local : local / p.run;
      const auto number = offset + static_cast<uint32_t>(whole) * static_cast<uint32_t>(p.stride) +
                          static_cast<uint32_t>(local - whole * p.run);
      ranks[count++] = ranked(value, number ^ kSign);
    }
  }
  return count;
}

void merge_list(const SelectMergeParams& p, int64_t t, int64_t list, uint64_t* ranks) {
  int64_t count = gather(p, t, list, ranks);
  const int64_t room = p.row_k ? std::clamp<int64_t>(p.row_k[t], 0, p.k) : p.k;
  if (count > room) {
    std::nth_element(ranks, ranks + room, ranks + count, std::greater<uint64_t>());
    count = room;
  }
  // Swapped, a larger word is a lower number.
  if (!p.by_score) std::transform(ranks, ranks + count, ranks, halves_swapped);
  std::sort(ranks, ranks + count, std::greater<uint64_t>());
  if (!p.by_score) std::transform(ranks, ranks + count, ranks, halves_swapped);

  const int64_t row = t * p.lists + list;
  int32_t* indices = p.indices + row * p.k;
  float* values = p.values + row * p.k;
  for (int64_t i = 0; i < count; ++i) {
    indices[i] = static_cast<int32_t>(static_cast<uint32_t>(number_of(ranks[i])) ^ kSign);
    values[i] = score_of(ranks[i]);
  }
  std::fill(indices + count, indices + p.k, -1);
  std::fill(values + count, values + p.k, -INFINITY);
  p.counts[row] = static_cast<int32_t>(count);
}

}  // namespace

void select_merge(const SelectMergeParams& p) {
  const int64_t rows = p.tokens * p.lists, candidates = p.shards * p.width;
  const int32_t threads = rows * candidates < kLeastCandidates ? 1 : p.threads;
  const int64_t buffer = (candidates + 7) / 8 * 8;  // no line of memory in two threads
  auto* buffers = reinterpret_cast<uint64_t*>(thread_memory(0, buffer * 8 * threads));
  parallel_for(rows, threads, [&](int64_t row, int32_t worker) {
    merge_list(p, row / p.lists, row % p.lists, buffers + worker * buffer);
  });
}

}  // namespace sparse_attn
