// `compress` on a CPU: rows of tokens into the entries that stand for them. Meaning of every field:
// docstring of sparse_attn.ops.compress.compress.
#pragma once

#include <stdint.h>

#include "../common/layout.h"
#include "entry.h"
#include "isa.h"
#include "status.h"

namespace sparse_attn {

struct PageTable {
  const int32_t* pages = nullptr;  // [B, columns]
  int64_t stride = 0;              // elements
  int64_t columns = 0;
};

// [T, heads, width]; absent without data. Strides are in bytes; elements of a row lie side by side.
struct TokenRows {
  const char* data = nullptr;
  int64_t strides[2] = {0, 0};
  Format format = Format::kFp32;
};

struct CompressParams {
  TokenRows rows, gates;
  int64_t tokens = 0;
  int64_t heads = 1;
  int64_t width = 0;
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* seq_lens = nullptr;
  int64_t batch = 0;
  int64_t max_seqlen_q = 0;
  int64_t max_seq_len = 0;
  EntryPlane plane;
  PageTable page_table;
  EntryPlane state;  // fp32, rows of values, then of gates
  PageTable state_page_table;
  int64_t stride = 1;
  int64_t span = 1;
  int64_t kept = 0;             // last tokens that the state holds after the step; 0: there is none
  const float* bias = nullptr;  // [stride, width]
  int64_t bias_stride = 0;      // elements
  const float* norm = nullptr;  // [plane.dim]
  float eps = 0;
  const float* cos_sin = nullptr;  // [positions, rotated]
  int64_t cos_sin_stride = 0;      // elements
  int64_t positions = 0;
  int64_t rotated = 0;
  int64_t rope_stride = 1;
  Format dtype = Format::kFp32;  // the model's
  char* latent = nullptr;        // [latents, heads, plane.dim] of dtype
  int64_t latents = 0;
  int32_t threads = 1;
  Isa isa = Isa::kPortable;
};

// Writes entries, state and latents; or writes nothing and says why.
CallStatus compress(const CompressParams& p);

}  // namespace sparse_attn
