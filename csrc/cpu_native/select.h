// Parameters of `select` on a CPU. Plain data: nothing here knows Python or torch.
// Meaning of every field: docstring of sparse_attn.ops.select.select. Shapes stand after the
// pointers.
#pragma once

#include <stdint.h>

#include "isa.h"
#include "plane.h"
#include "status.h"

namespace sparse_attn {

enum class Score : int32_t { kReluSum, kDot, kMax, kSoftmaxSum };
enum class Pool : int32_t { kNone, kMean, kMax, kSum };
enum class Tail : int32_t { kNone, kCounted, kReserved };

constexpr const char* kScoreNames[] = {"relu_sum", "dot", "max", "softmax_sum"};
constexpr const char* kScoreTypeNames[] = {"fp32", "bf16"};
constexpr const char* kOrderNames[] = {"any", "index", "score"};
constexpr const char* kPoolNames[] = {"none", "mean", "max", "sum"};
constexpr const char* kTailNames[] = {"none", "counted", "reserved"};

struct SelectParams {
  const char* q = nullptr;        // [T, heads, dim]
  int64_t q_strides[2] = {0, 0};  // bytes
  Format q_format = Format::kFp32;
  const char* q_scale = nullptr;        // [T, heads], of queries that are int8
  int64_t q_scale_strides[2] = {0, 0};  // bytes
  Format q_scale_format = Format::kFp32;
  const char* weights = nullptr;       // [T, heads], or null
  int64_t weight_strides[2] = {0, 0};  // bytes
  Format weight_format = Format::kFp32;
  const int32_t* cu_seqlens_q = nullptr;  // [B + 1]
  const int32_t* seq_lens = nullptr;      // [B]
  PlaneParams keys;                       // k, k_scale, pages, range and ratio
  int64_t tokens = 0;
  int64_t batch = 0;
  int32_t heads = 0;
  int32_t key_heads = 0;
  int32_t lists = 1;  // of a row: out_heads
  int32_t dim = 0;
  int64_t k = 0;
  const int32_t* row_k = nullptr;  // [T], or null
  double scale = 1;
  int64_t max_seqlen_q = 0;
  int64_t max_seq_len = 0;
  bool causal = true;
  Score score = Score::kReluSum;
  bool rounded = false;  // scores, products and their weighted terms are rounded to bf16
  bool bounds = false;   // keys are lower and upper bounds, side by side
  int64_t strides = 1;   // of `ratio` tokens that an entry covers
  int64_t block = 1;
  Pool pool = Pool::kNone;
  int64_t keep_first = 0;
  int64_t keep_last = 0;
  Tail tail = Tail::kNone;
  const int32_t* candidates = nullptr;  // [T, candidate_heads, candidate_count]
  bool takes_candidates = false;
  int64_t candidate_strides[3] = {0, 0, 0};  // elements
  int64_t candidate_heads = 1;
  int64_t candidate_count = 0;
  int64_t candidate_block = 1;
  int64_t candidate_k = 0;              // blocks to return; 0: none are made
  bool by_score = false;                // lists descend by score, else ascend by index
  int32_t* indices = nullptr;           // [T, lists, k]
  int32_t* counts = nullptr;            // [T, lists]
  float* values = nullptr;              // [T, lists, k], or null
  bool has_values = false;              // null with k = 0 too
  int32_t* candidate_blocks = nullptr;  // [T, lists, candidate_k], or null
  int32_t threads = 1;
  Isa isa = Isa::kPortable;
};

// Fills the outputs. After an error they hold anything.
CallStatus select(const SelectParams& p);

}  // namespace sparse_attn
