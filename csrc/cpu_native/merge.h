// `merge` and `select_merge` on a CPU: results over parts of the entries, joined. Meaning of every
// field: docstrings of sparse_attn.ops.
#pragma once

#include <stdint.h>

#include "../common/layout.h"
#include "isa.h"

namespace sparse_attn {

constexpr const char* kBaseNames[] = {"e", "2"};

struct MergeParams {
  const char* outs = nullptr;          // [S, T, heads, dim], elements side by side
  int64_t out_strides[3] = {0, 0, 0};  // bytes
  Format format = Format::kFp32;       // of outs and out: fp32, bf16 or fp16
  const float* lses = nullptr;         // [S, T, heads]
  int64_t lse_strides[3] = {0, 0, 0};  // elements
  const float* sinks = nullptr;        // [heads], or null
  bool base_2 = false;
  bool inf_is_empty = false;
  int64_t parts = 0;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t dim = 0;
  char* out = nullptr;   // [T, heads, dim], contiguous
  float* lse = nullptr;  // [T, heads], contiguous
  int32_t threads = 1;
};

void merge(const MergeParams& p);

struct SelectMergeParams {
  const int32_t* shard_indices = nullptr;  // [S, T, lists, width]
  int64_t index_strides[4] = {0, 0, 0, 0};
  const float* shard_values = nullptr;
  int64_t value_strides[4] = {0, 0, 0, 0};
  const int32_t* shard_offsets = nullptr;  // [S, T]
  int64_t offset_strides[2] = {0, 0};      // all strides in elements
  int64_t shards = 0;
  int64_t tokens = 0;
  int64_t lists = 0;
  int64_t width = 0;
  int64_t k = 0;
  int64_t run = 1;
  int64_t stride = 1;
  const int32_t* row_k = nullptr;  // [T], or null
  bool by_score = false;           // else by number
  int32_t* indices = nullptr;      // [T, lists, k], contiguous, as are counts [T, lists] and values
  int32_t* counts = nullptr;
  float* values = nullptr;
  int32_t threads = 1;
  Isa isa = Isa::kPortable;
};

void select_merge(const SelectMergeParams& p);

}  // namespace sparse_attn
