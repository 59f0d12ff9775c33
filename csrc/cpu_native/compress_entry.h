// What compress.cpp asks of the kernel of each instruction set.
#pragma once

#include "compress.h"

namespace sparse_attn {

// Rows of one token and head: of this step, or of the state.
struct TokenPlace {
  const char* row = nullptr;
  const char* gate = nullptr;
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

// Floats of working memory for one entry.
static inline int64_t entry_memory(const CompressParams& p) {
  return p.span * (p.gates.data ? 2 : 1) * padded_dim(p.plane.dim);
}

// Computes one head of an entry: `latent` and `row` are padded rows.
using CompressEntry = void (*)(const CompressParams& p, const EntryTokens& tokens, float* memory,
                               float* latent, float* row);

extern const CompressEntry SPARSE_ATTN_ISAS(Compress);

}  // namespace sparse_attn
