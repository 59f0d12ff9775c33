// One entry of `compress`, for the instruction set that the including file is compiled for.
#include <math.h>

#include "compress_entry.h"
#include "convert.h"
#include "rows.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

constexpr float kLog2E = 1.44269504f;

void round_row(Format dtype, float* x, int64_t count) {
  if (dtype == Format::kBf16) {
    for (int64_t i = 0; i < count; i += kWidth) store(x + i, round_to_bf16(load(x + i)));
  } else if (dtype == Format::kFp16) {
    for (int64_t i = 0; i < count; ++i) x[i] = half_to_float(float_to_half(x[i]));
  }
}

// Weighted sums of a vector of channels over tokens, in their order. Rows lie `padded` floats
// apart.
template <bool kGated>
Floats pool(const float* values, const float* gates, int64_t tokens, int64_t padded) {
  Floats total = load(values);
  if (!kGated) {
    for (int64_t i = 1; i < tokens; ++i) total += load(values + i * padded);
    return total / broadcast(static_cast<float>(tokens));
  }
  Floats largest = load(gates);
  for (int64_t i = 1; i < tokens; ++i) largest = max(load(gates + i * padded), largest);
  Floats sum = {};
  for (int64_t i = 0; i < tokens; ++i) {
    const Floats weight = exp2((load(gates + i * padded) - largest) * broadcast(kLog2E));
    const Floats value = load(values + i * padded);
    total = i == 0 ? weight * value : fma(weight, value, total);
    sum += weight;
  }
  return total / sum;
}

void norm_row(const float* weight, float eps, int64_t dim, float* x) {
  Floats squares = {};
  for (int64_t i = 0; i < dim; i += kWidth) {
    const Floats part = load(x + i);  // zeros past the row
    squares = fma(part, part, squares);
  }
  float sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += squares[i];
  const float factor = 1 / sqrtf(sum / static_cast<float>(dim) + eps);
  for (int64_t i = 0; i < dim; ++i) x[i] = x[i] * factor * weight[i];
}

// The first half of `angles` are cosines, the second sines.
void rotate_pairs(const float* angles, int64_t count, float* x) {
  const float* sines = angles + count / 2;
  for (int64_t i = 0; i < count / 2; ++i) {
    const float even = x[2 * i], odd = x[2 * i + 1];
    x[2 * i] = even * angles[i] - odd * sines[i];
    x[2 * i + 1] = odd * angles[i] + even * sines[i];
  }
}

void compress_entry(const CompressParams& p, const EntryTokens& tokens, float* memory,
                    float* latent, float* row) {
  const int64_t dim = p.plane.dim, padded = padded_dim(dim);
  float* const values = memory;
  float* const gates = memory + tokens.count * padded;
  for (int64_t i = 0; i < tokens.count; ++i) {
    const TokenPlace& token = tokens.places[i];
    const int64_t place = p.span - tokens.count + i;
    const int64_t channel = p.width == dim ? 0 : place / p.stride * dim;
    float* value = values + i * padded;
    convert_row(codec_of(token.row_format).element,
                token.row + channel * element_bytes(token.row_format), static_cast<int32_t>(dim),
                value);
    for (int64_t c = dim; c < padded; ++c) value[c] = 0;
    if (!p.gates.data) continue;
    float* gate = gates + i * padded;
    convert_row(codec_of(token.gate_format).element,
                token.gate + channel * element_bytes(token.gate_format), static_cast<int32_t>(dim),
                gate);
    for (int64_t c = dim; c < padded; ++c) gate[c] = 0;
    if (!p.bias) continue;
    const float* bias = p.bias + place % p.stride * p.bias_stride + channel;
    for (int64_t c = 0; c < dim; ++c) gate[c] += bias[c];
  }
  for (int64_t c = 0; c < dim; c += kWidth) {
    store(latent + c, p.gates.data ? pool<true>(values + c, gates + c, tokens.count, padded)
                                   : pool<false>(values + c, nullptr, tokens.count, padded));
  }
  round_row(p.dtype, latent, padded);
  if (p.norm) {
    norm_row(p.norm, p.eps, dim, latent);
    round_row(p.dtype, latent, padded);
  }
  memcpy(row, latent, static_cast<size_t>(dim) * 4);
  if (p.rotated == 0) return;
  const int64_t position = tokens.entry * p.rope_stride;
  rotate_pairs(p.cos_sin + position * p.cos_sin_stride, p.rotated, row + dim - p.rotated);
  round_row(p.dtype, row, padded);
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA

extern const CompressEntry SPARSE_ATTN_KERNELS = SPARSE_ATTN_ISA::compress_entry;

}  // namespace sparse_attn
