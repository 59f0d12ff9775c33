// `store` on a CPU: rows into a paged plane. Meaning of every field: docstring of
// sparse_attn.ops.store.store.
#pragma once

#include <stdint.h>

#include "../common/layout.h"

namespace sparse_attn {

// Strides are in bytes; elements of a row lie side by side.
struct StoreParams {
  const char* rows = nullptr;  // [T, heads, dim]
  int64_t row_strides[2] = {0, 0};
  Format row_format = Format::kFp32;
  char* plane = nullptr;  // [pages, page_size, heads, dim]
  int64_t plane_strides[3] = {0, 0, 0};
  char* scale = nullptr;  // fp16 [pages, page_size, heads], or null in formats without scales
  int64_t scale_strides[3] = {0, 0, 0};
  Format format = Format::kFp32;
  const int64_t* slots = nullptr;  // [T], negative: skip the row
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t dim = 0;
  int64_t pages = 0;
  int64_t page_size = 1;
  int32_t threads = 1;
};

// Writes the rows and returns -1; or writes nothing and returns the largest slot, which lies past
// the plane.
int64_t store(const StoreParams& p);

}  // namespace sparse_attn
