#include "merge.h"

#include <math.h>

#include "../common/number.h"
#include "memory.h"
#include "parallel.h"

namespace sparse_attn {
namespace {

// Elements of all parts below which starting threads costs more than they save.
constexpr int64_t kLeastElements = 1 << 16;

// Rows of one head that a task joins.
constexpr int64_t kTaskRows = 64;

// Elements that are summed at a time: enough for loops to become vectors, few enough for registers.
constexpr int kStep = 32;

constexpr double kEmpty = -1;  // the weight of an empty part: what it holds is not read

template <Format kFormat>
inline float element(const char* row, int64_t i) {
  if (kFormat == Format::kFp32) return reinterpret_cast<const float*>(row)[i];
  const uint16_t half = reinterpret_cast<const uint16_t*>(row)[i];
  return kFormat == Format::kBf16 ? bf16_to_float(half) : half_to_float(half);
}

template <Format kFormat>
inline void put(char* row, int64_t i, float x) {
  if (kFormat == Format::kFp32) {
    reinterpret_cast<float*>(row)[i] = x;
  } else {
    reinterpret_cast<uint16_t*>(row)[i] =
        kFormat == Format::kBf16 ? float_to_bf16(x) : float_to_half(x);
  }
}

// At most kStep elements of a row, from the weighted rows of the parts, `step` bytes apart.
template <Format kFormat>
inline void join(const char* outs, int64_t step, const double* weights, int64_t parts, int count,
                 char* out) {
  float sums[kStep] = {};
  for (int64_t s = 0; s < parts; ++s) {
    if (weights[s] == kEmpty) continue;
    const auto weight = static_cast<float>(weights[s]);
    float x[kStep];  // apart, so that both loops become vectors
    for (int i = 0; i < count; ++i) x[i] = element<kFormat>(outs + s * step, i);
    for (int i = 0; i < count; ++i) sums[i] += weight * x[i];
  }
  for (int i = 0; i < count; ++i) put<kFormat>(out, i, sums[i]);
}

// `weights` has room for a number of each part.
template <Format kFormat>
void merge_row(const MergeParams& p, int64_t t, int64_t h, double* weights) {
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

  for (int64_t s = 0; s < p.parts; ++s) weights[s] /= weights[s] == kEmpty ? 1 : sum;

  constexpr int64_t kBytes = element_bytes(kFormat);
  const char* outs = p.outs + t * p.out_strides[1] + h * p.out_strides[2];
  char* out = p.out + row * p.dim * kBytes;
  int64_t d = 0;
  for (; d + kStep <= p.dim; d += kStep) {
    join<kFormat>(outs + d * kBytes, p.out_strides[0], weights, p.parts, kStep, out + d * kBytes);
  }
  join<kFormat>(outs + d * kBytes, p.out_strides[0], weights, p.parts, static_cast<int>(p.dim - d),
                out + d * kBytes);
}

}  // namespace

void merge(const MergeParams& p) {
  const int64_t rows = p.tokens * p.heads;
  const int32_t threads = p.parts * rows * p.dim < kLeastElements ? 1 : p.threads;
  const int64_t buffer = (p.parts + 7) / 8 * 8;  // no line of memory in two threads
  auto* buffers = reinterpret_cast<double*>(thread_memory(0, buffer * 8 * threads));
  const auto merge_one = p.format == Format::kFp32   ? merge_row<Format::kFp32>
                         : p.format == Format::kBf16 ? merge_row<Format::kBf16>
                                                     : merge_row<Format::kFp16>;
  parallel_for((rows + kTaskRows - 1) / kTaskRows, threads, [&](int64_t task, int32_t worker) {
    double* weights = buffers + worker * buffer;
    const int64_t begin = task * kTaskRows;
    const int64_t end = begin + kTaskRows < rows ? begin + kTaskRows : rows;
    for (int64_t row = begin; row < end; ++row) {
      merge_one(p, row / p.heads, row % p.heads, weights);
    }
  });
}

}  // namespace sparse_attn
