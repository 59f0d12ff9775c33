// Rows to and from the bytes of every codec, compiled once for each instruction set: same bits in
// all. The including file defines SPARSE_ATTN_ISA, the namespace, and SPARSE_ATTN_ROW_KERNELS, the
// name of the table of entry points.
#pragma once

#include "encode.h"
#include "entry.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

void encode(const Codec& codec, const float* row, int64_t dim, const PartsToWrite& to) {
  encode_row(codec, row, dim, to);
}

// An element is one product in float32: stored * scale.
void decode(const Codec& codec, const EntryParts& parts, int64_t dim, float* to) {
  const auto stored = static_cast<int32_t>(dim - codec.rope);
  const int32_t groups = groups_of(codec, stored);
  if (groups <= 1) {
    convert_row(codec.element, parts.values, stored, to);
    float scale = 1;
    if (groups == 1) convert_row(codec.scale, parts.scales, 1, &scale);
    for (int32_t i = 0; groups == 1 && i < stored; ++i) to[i] *= scale;
  } else {
    const GroupScales scales(codec.scale, parts.scales, groups);
    scale_row(codec.element, parts.values, stored, codec.group, scales, to);
  }
  convert_row(Number::kBf16, parts.rope, codec.rope, to + stored);
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA

extern const RowKernels SPARSE_ATTN_ROW_KERNELS = {SPARSE_ATTN_ISA::encode,
                                                   SPARSE_ATTN_ISA::decode};

}  // namespace sparse_attn
