#include <algorithm>
#include <cmath>

#include "memory.h"
#include "merge.h"
#include "parallel.h"
#include "select_schedule.h"

namespace sparse_attn {
namespace {

// Candidates below which starting threads costs more than they save.
constexpr int64_t kLeastCandidates = 1 << 13;

// Numbers are int32, and a negative one is below others: ranks take them as unsigned.
constexpr uint32_t kSign = 0x80000000u;

// What `count` places of a shard's list from `first` on say, as scores and numbers; NaN: nothing.
// Numbers that do not fit into int32 wrap, whatever the offsets are.
struct Candidates {
  float scores[kBestStep];
  int64_t numbers[kBestStep];
};

void read(const SelectMergeParams& p, int64_t shard, int64_t t, int64_t list, int64_t first,
          int64_t count, Candidates* to) {
  const int64_t *at = p.index_strides, *of = p.value_strides;
  const int32_t* indices =
      p.shard_indices + shard * at[0] + t * at[1] + list * at[2] + first * at[3];
  const float* values = p.shard_values + shard * of[0] + t * of[1] + list * of[2] + first * of[3];
  const auto offset =
      static_cast<uint32_t>(p.shard_offsets[shard * p.offset_strides[0] + t * p.offset_strides[1]]);
  const auto read_all = [&](int64_t index_stride, int64_t value_stride, const auto& number) {
    for (int64_t i = 0; i < count; ++i) {
      const int32_t local = indices[i * index_stride];
      to->scores[i] = local < 0 ? NAN : values[i * value_stride];
      to->numbers[i] = (offset + number(local)) ^ kSign;
    }
  };
  const auto same = [](int32_t local) { return static_cast<uint32_t>(local); };
  const auto dealt = [&](int32_t local) {
    const int64_t whole = local / p.run;
    return static_cast<uint32_t>(whole) * static_cast<uint32_t>(p.stride) +
           static_cast<uint32_t>(local - whole * p.run);
  };
  if (p.run > 1) {
    read_all(at[3], of[3], dealt);
  } else if (p.stride > 1) {
    read_all(at[3], of[3], [&](int32_t local) { return same(local) * same(p.stride); });
  } else if (at[3] == 1 && of[3] == 1) {
    read_all(1, 1, same);
  } else {
    read_all(at[3], of[3], same);
  }
  std::fill(to->scores + count, to->scores + kBestStep, NAN);
}

// `ranks` and `spare`: room for `words` each.
void merge_list(const SelectMergeParams& p, const SelectKernels& kernels, int64_t t, int64_t list,
                uint64_t* ranks, uint64_t* spare, int64_t words) {
  const int64_t wanted = p.row_k ? std::clamp<int64_t>(p.row_k[t], 0, p.k) : p.k;
  Best best;
  open(&best, ranks, words, wanted);
  for (int64_t shard = 0; shard < p.shards; ++shard) {
    for (int64_t i = 0; i < p.width; i += kBestStep) {
      Candidates candidates;
      read(p, shard, t, list, i, std::min(p.width - i, kBestStep), &candidates);
      if (best.size + kBestStep > best.room) {
        kernels.cut(&best, spare);
        // Later numbers may be lower ones, which go before the last of equal score.
        best.threshold = std::nextafter(best.threshold, -INFINITY);
      }
      kernels.add_step(&best, candidates.scores, candidates.numbers);
    }
  }
  kernels.cut(&best, spare);
  const int64_t count = best.size;
  sort_ranks(ranks, count, p.by_score ? 64 : 32, spare);

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
  const int64_t words = (best_words(p.k, candidates) + 7) / 8 * 8;  // no line in two threads
  auto* buffers = reinterpret_cast<uint64_t*>(thread_memory(0, 2 * words * 8 * threads));
  const SelectKernels& kernels = kernels_for(p.isa, SPARSE_ATTN_ISAS(SelectKernels));
  parallel_for(rows, threads, [&](int64_t row, int32_t worker) {
    uint64_t* ranks = buffers + 2 * worker * words;
    merge_list(p, kernels, row / p.lists, row % p.lists, ranks, ranks + words, words);
  });
}

}  // namespace sparse_attn
