#include "merge.h"

#include <math.h>
#include <string.h>

#include "../common/number.h"
#include "memory.h"
#include "parallel.h"

namespace sparse_attn {
namespace {

// Elements of all parts below which starting threads costs more than they save.
constexpr int64_t kLeastElements = 1 << 16;

// Rows of one head that a task joins.
constexpr int64_t kTaskRows = 64;

constexpr double kEmpty = -1;  // the weight of an empty part: what it holds is not read

template <Format kFormat>
void add_part(const char* row, int64_t dim, double weight, double* sums) {
  const auto* floats = reinterpret_cast<const float*>(row);
  const auto* halves = reinterpret_cast<const uint16_t*>(row);
  for (int64_t i = 0; i < dim; ++i) {
    const float x = kFormat == Format::kFp32   ? floats[i]
                    : kFormat == Format::kBf16 ? bf16_to_float(halves[i])
                                               : half_to_float(halves[i]);
    sums[i] += weight * x;
  }
}

// `weights` holds a number for each part, `sums` one for each element.
template <Format kFormat>
void merge_row(const MergeParams& p, int64_t t, int64_t h, double* weights, double* sums) {
  const float* lses = p.lses + t * p.lse_strides[1] + h * p.lse_strides[2];
  double maximum = -INFINITY;
  for (int64_t s = 0; s < p.parts; ++s) {
    const double lse = lses[s * p.lse_strides[0]] * (p.base_2 ? 0.69314718055994530942 : 1.0);
    weights[s] = p.inf_is_empty && lse == INFINITY ? -INFINITY : lse;
    maximum = weights[s] <= maximum || isnan(maximum) ? maximum : weights[s];
  }
  double sum = 0;
  for (int64_t s = 0; s < p.parts; ++s) {
    const bool empty = weights[s] == -INFINITY;
    weights[s] = empty ? kEmpty : exp(weights[s] - maximum);
    if (!empty) sum += weights[s];
  }
  const int64_t row = t * p.heads + h;
  p.lse[row] = static_cast<float>(isfinite(maximum) ? maximum + log(sum) : maximum);
  if (p.sinks) sum += exp(p.sinks[h] - maximum);

  memset(sums, 0, static_cast<size_t>(p.dim) * sizeof(double));
  const char* outs = p.outs + t * p.out_strides[1] + h * p.out_strides[2];
  for (int64_t s = 0; s < p.parts; ++s) {
    if (weights[s] != kEmpty)
      add_part<kFormat>(outs + s * p.out_strides[0], p.dim, weights[s] / sum, sums);
  }
  char* out = p.out + row * p.dim * element_bytes(kFormat);
  auto* floats = reinterpret_cast<float*>(out);
  auto* halves = reinterpret_cast<uint16_t*>(out);
  for (int64_t i = 0; i < p.dim; ++i) {
    const auto x = static_cast<float>(sums[i]);
    if (kFormat == Format::kFp32) floats[i] = x;
    if (kFormat == Format::kBf16) halves[i] = float_to_bf16(x);
    if (kFormat == Format::kFp16) halves[i] = float_to_half(x);
  }
}

}  // namespace

void merge(const MergeParams& p) {
  const int64_t rows = p.tokens * p.heads;
  const int32_t threads = p.parts * rows * p.dim < kLeastElements ? 1 : p.threads;
  const int64_t buffer = (p.parts + p.dim + 7) / 8 * 8;  // no line of memory in two threads
  auto* buffers = reinterpret_cast<double*>(thread_memory(0, buffer * 8 * threads));
  const auto join = p.format == Format::kFp32   ? merge_row<Format::kFp32>
                    : p.format == Format::kBf16 ? merge_row<Format::kBf16>
                                                : merge_row<Format::kFp16>;
  parallel_for((rows + kTaskRows - 1) / kTaskRows, threads, [&](int64_t task, int32_t worker) {
    double* weights = buffers + worker * buffer;
    const int64_t begin = task * kTaskRows;
    const int64_t end = begin + kTaskRows < rows ? begin + kTaskRows : rows;
    for (int64_t row = begin; row < end; ++row) {
      join(p, row / p.heads, row % p.heads, weights, weights + p.parts);
    }
  });
}

}  // namespace sparse_attn
