// Rows to and from the bytes of every codec, compiled once for each instruction set: same bits in
// all. The including file defines SPARSE_ATTN_ISA, the namespace, and SPARSE_ATTN_ROW_KERNELS, the
// name of the table of entry points.
#pragma once

#include "encode.h"
#include "encode_fp4.h"
#include "entry.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

void encode(const Codec& codec, Number from, const char* row, int64_t dim, const PartsToWrite& to) {
#if defined(__AVX512BF16__)
  if (from == Number::kBf16 && codec.element == Number::kE2m1 && codec.scale == Number::kE4m3 &&
      dim == kFp4Row) {
    return encode_fp4(row, reinterpret_cast<uint8_t*>(to.values), to.scales);
  }
#endif
  with_plain_type(from, [&](auto type) { encode_row<type>(codec, row, dim, to); });
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
    const GroupScales scales(codec.scale, parts.scales, groups, codec.group);
    scale_row(codec.element, parts.values, stored, scales, to);
  }
  convert_row(Number::kBf16, parts.rope, codec.rope, to + stored);
}

// The same, rounded to bf16.
void decode_bf16(const Codec& codec, const EntryParts& parts, int64_t dim, uint16_t* to) {
  const auto stored = static_cast<int32_t>(dim - codec.rope);
  const int32_t groups = groups_of(codec, stored), group = codec.group ? codec.group : stored;
  const GroupScales scales(codec.scale, parts.scales, groups, codec.group);
#if defined(__AVX512BF16__)
  if (groups > 0 && stored % kPair == 0 && scales.keep_normal()) {
    scale_row(codec.element, parts.values, stored, scales, to);
    if (codec.rope) memcpy(to + stored, parts.rope, static_cast<size_t>(codec.rope) * 2);
    return;
  }
#endif
  with_type(codec.element, [&](auto type) {
    constexpr Number kFrom = type;
    for (int32_t begin = 0; begin < stored; begin += group) {
      const char* row = parts.values + bytes_of(kFrom, begin);
      const Floats scale = groups ? scales.of(begin) : broadcast(1);
      int32_t i = 0;
      for (; i + kWidth <= group; i += kWidth)
        store_bf16(to + begin + i, load_as_floats<kFrom>(row + bytes_of(kFrom, i)) * scale);
      if (i == group) continue;
      uint16_t rest[kWidth];
      store_bf16(rest, load_rest<kFrom>(row + bytes_of(kFrom, i), group - i) * scale);
      memcpy(to + begin + i, rest, static_cast<size_t>(group - i) * 2);
    }
  });
  if (codec.rope) memcpy(to + stored, parts.rope, static_cast<size_t>(codec.rope) * 2);
}

// Lines of memory as a whole, past the caches; other rows as ever.
void stream(char* to, const char* from, int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0 && bytes % 64 == 0) {
    for (int64_t i = 0; i < bytes; i += kBytes) stream(to + i, load(from + i));
  } else {
    memcpy(to, from, static_cast<size_t>(bytes));
  }
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA

extern const RowKernels SPARSE_ATTN_ROW_KERNELS = {SPARSE_ATTN_ISA::encode, SPARSE_ATTN_ISA::decode,
                                                   SPARSE_ATTN_ISA::decode_bf16,
                                                   SPARSE_ATTN_ISA::stream};

}  // namespace sparse_attn
