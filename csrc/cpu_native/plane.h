// A paged plane, as the ops that read one take it.
#pragma once

#include <stdint.h>

#include "../common/layout.h"

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

}  // namespace sparse_attn
