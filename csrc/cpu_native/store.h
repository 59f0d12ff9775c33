// Ops that move rows between paged planes and plain tensors: `store`, `load` and `convert`. Meaning
// of every field: docstrings of sparse_attn.ops.
#pragma once

#include <stdint.h>

#include "../common/layout.h"
#include "entry.h"

namespace sparse_attn {

struct StoreParams {
  EntryPlane plane;
  const char* rows = nullptr;       // [T, heads, dim], elements side by side
  int64_t row_strides[2] = {0, 0};  // bytes
  Format row_format = Format::kFp32;
  const int64_t* slots = nullptr;  // [T], negative: skip the row
  int64_t tokens = 0;
  int32_t threads = 1;
  Isa isa = Isa::kPortable;
};

struct LoadParams {
  EntryPlane plane;
  char* out = nullptr;                // [T, heads, dim], contiguous
  Format out_format = Format::kFp32;  // or kBf16
  const int64_t* slots = nullptr;     // [T], negative: zeros
  int64_t tokens = 0;
  int32_t threads = 1;
  Isa isa = Isa::kPortable;
};

struct ConvertParams {
  EntryPlane src, dst;
  const int64_t* src_slots = nullptr;  // [N], negative: skip the entry; null: every entry
  const int64_t* dst_slots = nullptr;
  int64_t entries = 0;
  int32_t threads = 1;
  Isa isa = Isa::kPortable;
};

// Each does its work and returns -1; or writes nothing and returns the largest slot that it would
// use, which lies past the plane.
int64_t store(const StoreParams& p);
int64_t load(const LoadParams& p);

struct PastPlane {
  bool in_dst;
  int64_t slot;  // -1: none
};

// Likewise, for slots of either plane.
PastPlane convert(const ConvertParams& p);

}  // namespace sparse_attn
