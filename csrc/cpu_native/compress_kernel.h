// One entry of `compress`, for the instruction set that the including file is compiled for.
#include <math.h>

#include <algorithm>

#include "compress_entry.h"
#include "convert.h"
#include "rows.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

constexpr float kLog2E = 1.44269504f;

// Numbers as the model's type has them.
template <Number kType>
SPARSE_ATTN_INLINE Floats rounded(Floats x) {
  if constexpr (kType == Number::kBf16) return round_to_bf16(x);
  if constexpr (kType == Number::kFp16) {
    for (int i = 0; i < kWidth; ++i) x[i] = half_to_float(float_to_half(x[i]));
  }
  return x;
}

// A token's numbers of an entry's channels.
struct Channels {
  const char* values;
  const char* gates;
  const float* bias;           // or null
  int64_t ahead, gates_ahead;  // as in TokenPlace
};

// What the tokens up to now come to, by channel.
struct Pooled {
  float* total;
  float* sum;      // of weights
  float* largest;  // of gates
};

// Adds some tokens, which all have numbers of one type, in their order. The weights are right if
// they are divided by their sum: they are relative to the largest gate up to now.
template <Number kFrom, bool kGated, class Count>
void pool(const Channels* tokens, Count count, int64_t dim, bool first, const Pooled& pooled) {
  for (int64_t c = 0; c < dim; c += kWidth) {
    const int64_t at = bytes_of(kFrom, c);
    const bool line = at % 64 == 0;
    const auto value = [&](int64_t i) {
      if (line) __builtin_prefetch(tokens[i].values + tokens[i].ahead + at);
      return load_at<kFrom>(tokens[i].values, c, dim);
    };
    Floats total = first ? Floats{} : load(pooled.total + c);
    if constexpr (!kGated) {
      for (int64_t i = 0; i < count; ++i) total += value(i);
      store(pooled.total + c, total);
      continue;
    }
    const Floats before = first ? broadcast(kNoScore) : load(pooled.largest + c);
    Floats gates[kTokensTogether], largest = before;
    for (int64_t i = 0; i < count; ++i) {
      if (line) __builtin_prefetch(tokens[i].gates + tokens[i].gates_ahead + at);
      gates[i] = load_at<kFrom>(tokens[i].gates, c, dim);
      if (tokens[i].bias) {
        const auto* bias = reinterpret_cast<const char*>(tokens[i].bias);
        gates[i] += load_at<Number::kFp32>(bias, c, dim);
      }
      largest = max(gates[i], largest);
    }
    Floats sum = {};
    if (!first) {
      const Floats less = exp2((before - largest) * broadcast(kLog2E));
      total *= less;
      sum = load(pooled.sum + c) * less;
    }
    for (int64_t i = 0; i < count; ++i) {
      const Floats weight = exp2((gates[i] - largest) * broadcast(kLog2E));
      total = fma(weight, value(i), total);
      sum += weight;
    }
    store(pooled.total + c, total);
    store(pooled.sum + c, sum);
    store(pooled.largest + c, largest);
  }
}

template <class Use>
void with_count(int64_t count, const Use& use) {
  if (count == 2) return use(std::integral_constant<int64_t, 2>());
  if (count == 8) return use(std::integral_constant<int64_t, 8>());
  use(count);
}

template <bool kGated>
void pool(Number type, const Channels* tokens, int64_t count, int64_t dim, bool first,
          const Pooled& pooled) {
  with_plain_type(type, [&](auto from) {
    with_count(count, [&](auto n) { pool<from, kGated>(tokens, n, dim, first, pooled); });
  });
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

Channels channels_of(const CompressParams& p, const EntryTokens& tokens, int64_t i) {
  const TokenPlace& token = tokens.places[i];
  const int64_t place = p.span - tokens.count + i;
  const int64_t channel = p.width == p.plane.dim ? 0 : place / p.stride * p.plane.dim;
  Channels found = {};
  found.values = token.row + channel * element_bytes(token.row_format);
  found.ahead = token.ahead;
  if (!p.gates.data) return found;
  found.gates = token.gate + channel * element_bytes(token.gate_format);
  found.gates_ahead = token.gate_ahead;
  if (p.bias) found.bias = p.bias + place % p.stride * p.bias_stride + channel;
  return found;
}

// The type of the numbers of some tokens. Those of different types are converted first.
Number join_types(const CompressParams& p, const TokenPlace* places, int64_t count, float* memory,
                  Channels* tokens) {
  const Number type = codec_of(places[0].row_format).element;
  bool same = true;
  for (int64_t i = 0; i < count; ++i) {
    same = same && codec_of(places[i].row_format).element == type &&
           (!p.gates.data || codec_of(places[i].gate_format).element == type);
  }
  if (same) return type;
  const auto dim = static_cast<int32_t>(p.plane.dim);
  const auto convert = [&](Format format, const char** row, int64_t* ahead) {
    convert_row(codec_of(format).element, *row, dim, memory);
    *row = reinterpret_cast<const char*>(memory);
    *ahead = 0;
    memory += padded_dim(dim);
  };
  for (int64_t i = 0; i < count; ++i) {
    convert(places[i].row_format, &tokens[i].values, &tokens[i].ahead);
    if (p.gates.data) convert(places[i].gate_format, &tokens[i].gates, &tokens[i].gates_ahead);
  }
  return Number::kFp32;
}

void pool_tokens(const CompressParams& p, const EntryTokens& tokens, const Pooled& pooled,
                 float* memory) {
  const int64_t dim = p.plane.dim;
  for (int64_t begin = 0; begin < tokens.count; begin += kTokensTogether) {
    const int64_t count = std::min(kTokensTogether, tokens.count - begin);
    Channels some[kTokensTogether];
    for (int64_t i = 0; i < count; ++i) some[i] = channels_of(p, tokens, begin + i);
    const Number type = join_types(p, tokens.places + begin, count, memory, some);
    const auto add = p.gates.data ? pool<true> : pool<false>;
    add(type, some, count, dim, begin == 0, pooled);
  }
}

// The mean over tokens, in the model's type. Returns the sum of squares.
template <Number kType>
float average(const Pooled& pooled, bool gated, int64_t tokens, int64_t dim, float* latent) {
  const Floats count = broadcast(static_cast<float>(tokens));
  Floats squares[4] = {};  // which do not wait for each other
  for (int64_t c = 0; c < dim; c += kWidth) {
    const Floats weights = gated ? load(pooled.sum + c) : count;
    const Floats x = rounded<kType>(load(pooled.total + c) / weights);  // zeros past the row
    Floats& sum = squares[c / kWidth % 4];
    sum = fma(x, x, sum);
    store(latent + c, x);
  }
  const Floats sum = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  const FourFloats four = add_fours(FourFloats{}, sum);
  return (four[0] + four[1]) + (four[2] + four[3]);
}

template <Number kType>
void normalise(const float* weight, float factor, int64_t dim, float* x) {
  const auto* weights = reinterpret_cast<const char*>(weight);
  for (int64_t c = 0; c < dim; c += kWidth) {
    const Floats by = load_at<Number::kFp32>(weights, c, dim);
    store(x + c, rounded<kType>(load(x + c) * factor * by));
  }
}

// Stores a vector of a row that entry_type says.
template <Number kType>
SPARSE_ATTN_INLINE void store_number(float* row, int64_t i, Floats x) {
  if constexpr (kType == Number::kBf16) {
    store_bf16(reinterpret_cast<uint16_t*>(row) + i, x);
  } else {
    store(row + i, x);
  }
}

template <Number kType>
void compress_entry(const CompressParams& p, const EntryTokens& tokens, float* memory,
                    float* latent, float* row) {
  const int64_t dim = p.plane.dim, padded = padded_dim(dim);
  const int64_t position = tokens.entry * p.rope_stride;
  const float* const angles = p.cos_sin + position * p.cos_sin_stride;
  for (int64_t i = 0; i < p.rotated; i += 16) __builtin_prefetch(angles + i);
  const Pooled pooled = {latent, memory, memory + padded};
  pool_tokens(p, tokens, pooled, memory + 2 * padded);
  for (int64_t c = dim; c < padded; ++c) latent[c] = 0;
  const float squares = average<kType>(pooled, p.gates.data, tokens.count, dim, latent);
  if (p.norm) {
    const float factor = 1 / sqrtf(squares / static_cast<float>(dim) + p.eps);
    normalise<kType>(p.norm, factor, dim, latent);
  }
  const int64_t kept = (dim - p.rotated) / kWidth * kWidth;  // vectors without a rotated number
  float* const turned = memory;
  for (int64_t c = kept; c < padded; c += kWidth) store(turned + c, load(latent + c));
  if (p.rotated > 0) rotate_pairs(angles, p.rotated, turned + dim - p.rotated);
  for (int64_t c = 0; c < kept; c += kWidth) store_number<kType>(row, c, load(latent + c));
  for (int64_t c = kept; c < padded; c += kWidth)
    store_number<kType>(row, c, rounded<kType>(load(turned + c)));
  if (kType != Number::kBf16 || !p.latent) return;
  for (int64_t c = 0; c < padded; c += kWidth) store_number<kType>(latent, c, load(latent + c));
}

void compress_entry(const CompressParams& p, const EntryTokens& tokens, float* memory,
                    float* latent, float* row) {
  with_plain_type(codec_of(p.dtype).element,
                  [&](auto type) { compress_entry<type>(p, tokens, memory, latent, row); });
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA

extern const CompressEntry SPARSE_ATTN_KERNELS = SPARSE_ATTN_ISA::compress_entry;

}  // namespace sparse_attn
