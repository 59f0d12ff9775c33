// Parameters of `attend` on a CPU. Plain data: nothing here knows Python or torch.
// Meaning of every field: docstring of sparse_attn.ops.attend.attend. Shapes stand after the
// pointers.
#pragma once

#include <stdint.h>

#include "isa.h"
#include "plane.h"
#include "status.h"

namespace sparse_attn {

struct AttendParams {
  const char* q = nullptr;        // [T, heads, qk_dim]
  int64_t q_strides[2] = {0, 0};  // bytes
  Format q_format = Format::kFp32;
  char* out = nullptr;                    // [T, heads, v_dim], like q
  float* lse = nullptr;                   // [T, heads], or null
  const int32_t* cu_seqlens_q = nullptr;  // [B + 1]
  const int32_t* seq_lens = nullptr;      // [B]
  const float* sinks = nullptr;           // [heads], or null
  int64_t tokens = 0;
  int64_t batch = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t qk_dim = 0;
  int32_t v_dim = 0;
  double scale = 1;
  int64_t max_seqlen_q = 0;
  int64_t max_seq_len = 0;
  bool causal = true;
  PlaneParams window;
  PlaneParams main;
  int32_t threads = 1;
  Isa isa = Isa::kPortable;
};

// Fills out and lse. After an error they hold anything.
CallStatus attend(const AttendParams& p);

}  // namespace sparse_attn
