#include "limits.h"

#include <string.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "parallel.h"

namespace sparse_attn {
namespace {

constexpr int64_t kRounds = 1 << 20;  // of products in a task

// Shares the halves of the memory out: each thread copies its part of the first to the second.
double copy(const LimitParams& p) {
  constexpr int64_t kPart = int64_t{1} << 20;
  const int64_t half = p.bytes / 2, parts = half / kPart;
  parallel_for(parts, p.threads, [&](int64_t i, int32_t) {
    memcpy(p.memory + half + i * kPart, p.memory + i * kPart, kPart);
  });
  return 2.0 * static_cast<double>(parts * kPart);
}

double blocks(const LimitParams& p, const LimitKernels& kernels) {
  constexpr int64_t kTaskBlocks = 64;
  const int64_t count = p.bytes / kLimitBlock, tasks = count / kTaskBlocks;
  // A step that shares no divisor with the count comes upon every block once, far from the last.
  int64_t step = count * 5 / 8 | 1;
  while (std::gcd(step, count) != 1) step += 2;
  const auto at = [&](int64_t i) { return p.memory + i * step % count * kLimitBlock; };
  parallel_for(tasks, p.threads, [&](int64_t task, int32_t) {
    const int64_t first = task * kTaskBlocks;
    for (int64_t i = first; i < first + kTaskBlocks; ++i) kernels.read(at(i), at(i + 1));
  });
  return static_cast<double>(tasks * kTaskBlocks * kLimitBlock);
}

}  // namespace

void move_rows(const MoveParams& p) {
  constexpr int64_t kTaskBytes = int64_t{1} << 17, kAhead = 4;
  const LimitKernels& kernels = kernels_for(p.isa, SPARSE_ATTN_ISAS(LimitKernels));
  const int64_t task_rows = std::max<int64_t>(1, kTaskBytes / (p.read + p.written));
  const auto row = [&](int64_t i) {
    return Move{p.from + p.from_rows[i] * p.read, p.read, p.to + p.to_rows[i] * p.written,
                p.written};
  };
  parallel_for((p.rows + task_rows - 1) / task_rows, p.threads, [&](int64_t task, int32_t) {
    const int64_t begin = task * task_rows, end = std::min(begin + task_rows, p.rows);
    for (int64_t i = begin - kAhead; i < end; ++i) {
      if (i + kAhead < end) kernels.fetch(row(i + kAhead));
      if (i >= begin) kernels.move(row(i));
    }
  });
}

double work_at_limit(const LimitParams& p) {
  const LimitKernels& kernels = kernels_for(p.isa, SPARSE_ATTN_ISAS(LimitKernels));
  if (p.limit == Limit::kCopy) return copy(p);
  if (p.limit == Limit::kBlocks) return blocks(p, kernels);
  double (*multiply)(int64_t) = p.limit == Limit::kFp32   ? kernels.fp32
                                : p.limit == Limit::kBf16 ? kernels.bf16
                                                          : kernels.int8;
  if (!multiply) return 0;
  std::vector<double> done(static_cast<size_t>(4 * p.threads));
  parallel_for(static_cast<int64_t>(done.size()), p.threads,
               [&](int64_t i, int32_t) { done[static_cast<size_t>(i)] = multiply(kRounds); });
  return std::accumulate(done.begin(), done.end(), 0.0);
}

}  // namespace sparse_attn
