// Mirrors sparse_attn/layout.py: the KV formats that kernels here read. A test compares the two.
#pragma once

#include <stdint.h>

namespace sparse_attn {

enum class Format : int32_t { kFp32 = 0, kBf16 = 1, kFp16 = 2, kInt8 = 3, kInt8IndexH = 4 };

struct FormatInfo {
  const char* name;
  Format format;
  int32_t bits;        // of an element of a row
  int32_t scale_bits;  // of the scale of each entry and head; 0: the format has no scales
};

constexpr FormatInfo kFormats[] = {
    {"fp32", Format::kFp32, 32, 0},
    {"bf16", Format::kBf16, 16, 0},
    {"fp16", Format::kFp16, 16, 0},
    {"int8", Format::kInt8, 8, 16},
    {"int8_index_h", Format::kInt8IndexH, 8, 16},
};

static constexpr int32_t element_bytes(Format format) {
  return kFormats[static_cast<int32_t>(format)].bits / 8;
}

}  // namespace sparse_attn
