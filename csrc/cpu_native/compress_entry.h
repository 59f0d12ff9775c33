// What compress.cpp asks of the kernel of each instruction set.
#pragma once

#include "compress.h"

namespace sparse_attn {

// Tokens whose weights are found together.
constexpr int64_t kTokensTogether = 8;

// Rows of one token and head: of this step, or of the state.
struct TokenPlace {
  const char* row = nullptr;
  const char* gate = nullptr;
  int64_t ahead = 0, gate_ahead = 0;  // bytes from them to what will be read soon
  Format row_format = Format::kFp32;
  Format gate_format = Format::kFp32;
};

// The last `count` tokens of an entry's span; those before do not exist.
struct EntryTokens {
  int64_t entry = 0;
  int64_t count = 0;
  const TokenPlace* places = nullptr;
};

// Floats of a row in working memory, which vectors of every width may read to the end.
static inline int64_t padded_dim(int64_t dim) { return (dim + 15) / 16 * 16; }

// Floats of working memory for one entry: rows and gates of some tokens, and what tokens come to.
static inline int64_t entry_memory(const CompressParams& p) {
  return (2 * kTokensTogether + 3) * padded_dim(p.plane.dim);
}

// Computes one head of an entry: `latent` and `row` are padded rows of floats, or of bf16 where the
// model's numbers are.
using CompressEntry = void (*)(const CompressParams& p, const EntryTokens& tokens, float* memory,
                               float* latent, float* row);

// The type of these rows.
static inline Number entry_type(const CompressParams& p) {
  return p.dtype == Format::kBf16 ? Number::kBf16 : Number::kFp32;
}

extern const CompressEntry SPARSE_ATTN_ISAS(Compress);

}  // namespace sparse_attn
