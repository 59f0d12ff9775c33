// Parameters of `attend` on a CPU. Plain data: nothing here knows Python or torch.
// Meaning of every field: docstring of sparse_attn.ops.attend.attend. Shapes stand after the
// pointers.
#pragma once

#include <stdint.h>

#include "../common/layout.h"
#include "isa.h"

namespace sparse_attn {

// Rows of one paged tensor; absent if dim is 0. Strides are in bytes; elements of a row lie side by
// side.
struct PagedRows {
  const char* data = nullptr;  // [pages, page_size, heads, dim]
  int64_t page_stride = 0;
  int64_t entry_stride = 0;
  int64_t head_stride = 0;
  int32_t dim = 0;
  Format format = Format::kFp32;
};

struct PlaneParams {
  bool given = false;
  PagedRows k;
  PagedRows rope;     // last elements of each key, where they are stored apart
  PagedRows v;        // absent: values are the first elements of k
  PagedRows k_scale;  // fp16 [pages, page_size, heads], in formats with scales
  PagedRows v_scale;  // of the values, wherever they are
  int64_t pages = 0;
  int64_t page_size = 1;
  const int32_t* page_table = nullptr;  // [B, max_pages]
  int64_t page_table_stride = 0;        // elements
  int64_t max_pages = 0;
  const int32_t* range = nullptr;    // [T, 2]; null: from `ratio` and `window`
  bool listed = false;               // false: every visible entry, no indices
  const int32_t* indices = nullptr;  // [T, index_heads, selected]
  int64_t index_strides[3] = {0, 0, 0};
  int64_t index_heads = 1;
  int64_t selected = 0;
  const int32_t* counts = nullptr;  // [T, index_heads]; null: `selected`
  int64_t select_block = 1;
  int64_t ratio = 1;
  int64_t window = 0;  // 0: from the first token
};

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

enum class AttendError : int32_t {
  kNone,
  kFirstStart,    // cu_seqlens_q[0] is values[0]
  kLastStart,     // cu_seqlens_q[B] is values[0], beyond T
  kDescending,    // cu_seqlens_q descends
  kTooManyRows,   // a sequence has values[0] rows, more than max_seqlen_q
  kTooLong,       // a sequence has values[0] tokens, more than max_seq_len
  kEntryUnpaged,  // entry values[0] of sequence values[1] lies past the page table
  kPageOutside,   // sequence values[0] uses page values[1], which the plane lacks
};

struct AttendStatus {
  AttendError error = AttendError::kNone;
  bool in_window = false;  // the plane that the page errors are about
  int64_t values[2] = {0, 0};
};

// Fills out and lse. After an error they hold anything.
AttendStatus attend(const AttendParams& p);

}  // namespace sparse_attn
