#include "store.h"

#include <string.h>

#include <algorithm>

#include "memory.h"
#include "parallel.h"

namespace sparse_attn {
namespace {

// Elements below which starting threads costs more than they save.
constexpr int64_t kLeastElements = 1 << 16;

// Rows that a task moves.
constexpr int64_t kTaskRows = 64;

// Calls work(begin, end, buffer) for parts of [0, rows) that cover it; the buffer holds a row of
// one head.
template <class Work>
void for_rows(int64_t rows, const EntryPlane& plane, int32_t threads, const Work& work) {
  if (rows * plane.heads * plane.dim < kLeastElements) threads = 1;
  const int64_t row_bytes = (plane.dim * 4 + 63) / 64 * 64;  // no line of memory in two threads
  char* buffers = thread_memory(0, row_bytes * threads);
  parallel_for((rows + kTaskRows - 1) / kTaskRows, threads, [&](int64_t task, int32_t worker) {
    const int64_t begin = task * kTaskRows;
    auto* buffer = reinterpret_cast<float*>(buffers + worker * row_bytes);
    work(begin, std::min(begin + kTaskRows, rows), buffer);
  });
}

const RowKernels& row_kernels(Isa isa) { return kernels_for(isa, SPARSE_ATTN_ISAS(RowKernels)); }

const float* as_floats(const RowKernels& kernels, const char* row, Format format, int64_t dim,
                       float* buffer) {
  if (format == Format::kFp32) return reinterpret_cast<const float*>(row);
  kernels.decode(codec_of(format), {row, nullptr, nullptr}, dim, buffer);
  return buffer;
}

int64_t largest(const int64_t* slots, int64_t count) {
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) last = std::max(last, slots[i]);
  return last;
}

void store_row(const StoreParams& p, const RowKernels& kernels, int64_t t, float* buffer) {
  const int64_t slot = p.slots[t];
  if (slot < 0) return;
  const EntryPlane& plane = p.plane;
  const char* row = p.rows + t * p.row_strides[0];
  for (int64_t h = 0; h < plane.heads; ++h, row += p.row_strides[1]) {
    if (p.row_format == plane.format) {
      memcpy(plane.values.at(slot / plane.page_size, slot % plane.page_size, h), row,
             static_cast<size_t>(plane.values.bytes));
    } else {
      write_row(kernels, plane, slot, h, as_floats(kernels, row, p.row_format, plane.dim, buffer));
    }
  }
}

void load_row(const LoadParams& p, const RowKernels& kernels, int64_t t) {
  const int64_t slot = p.slots[t], count = p.plane.heads * p.plane.dim;
  char* out = p.out + t * count * element_bytes(p.out_format);
  if (slot < 0) {
    memset(out, 0, static_cast<size_t>(count * element_bytes(p.out_format)));
    return;
  }
  for (int64_t h = 0; h < p.plane.heads; ++h) {
    if (p.out_format == p.plane.format) {
      const PartRows& values = p.plane.values;
      memcpy(out + h * values.bytes,
             values.at(slot / p.plane.page_size, slot % p.plane.page_size, h),
             static_cast<size_t>(values.bytes));
      continue;
    }
    const EntryParts parts = parts_of(p.plane, slot, h);
    const Codec& codec = codec_of(p.plane.format);
    if (p.out_format == Format::kFp32) {
      kernels.decode(codec, parts, p.plane.dim, reinterpret_cast<float*>(out) + h * p.plane.dim);
    } else {
      kernels.decode_bf16(codec, parts, p.plane.dim,
                          reinterpret_cast<uint16_t*>(out) + h * p.plane.dim);
    }
  }
}

bool same(const Codec& a, const Codec& b) {
  return a.element == b.element && a.scale == b.scale && a.group == b.group && a.dim == b.dim &&
         a.rope == b.rope;
}

int64_t slot_of(const int64_t* slots, int64_t i) { return slots ? slots[i] : i; }

// Copies a part of `count` entries that follow each other in one page of each plane.
void copy_part(const PartRows& src, int64_t src_page, int64_t src_offset, const PartRows& dst,
               int64_t dst_page, int64_t dst_offset, int64_t heads, int64_t count) {
  const int64_t bytes = src.bytes, row = heads * bytes;
  const bool heads_together = src.strides[2] == bytes && dst.strides[2] == bytes;
  const bool all_together = heads_together && src.strides[1] == row && dst.strides[1] == row;
  const int64_t entry_step = all_together ? count : 1, head_step = heads_together ? heads : 1;
  for (int64_t e = 0; e < count; e += entry_step) {
    for (int64_t h = 0; h < heads; h += head_step) {
      memcpy(dst.at(dst_page, dst_offset + e, h), src.at(src_page, src_offset + e, h),
             static_cast<size_t>(entry_step * head_step * bytes));
    }
  }
}

// Moves entry `i` and those up to `end` that follow it in both planes; how many.
int64_t move_entries(const ConvertParams& p, int64_t i, int64_t end) {
  const int64_t from = slot_of(p.src_slots, i), to = slot_of(p.dst_slots, i);
  if (from < 0 || to < 0) return 1;
  const EntryPlane &src = p.src, &dst = p.dst;
  const int64_t src_offset = from % src.page_size, dst_offset = to % dst.page_size;
  end = std::min({end, i + src.page_size - src_offset, i + dst.page_size - dst_offset});
  int64_t count = 1;
  while (i + count < end && slot_of(p.src_slots, i + count) == from + count &&
         slot_of(p.dst_slots, i + count) == to + count) {
    ++count;
  }
  const auto copy = [&](const PartRows& a, const PartRows& b) {
    copy_part(a, from / src.page_size, src_offset, b, to / dst.page_size, dst_offset, src.heads,
              count);
  };
  copy(src.values, dst.values);
  if (src.scales.bytes > 0) copy(src.scales, dst.scales);
  if (src.rope.bytes > 0) copy(src.rope, dst.rope);
  for (int64_t e = 0; e < count; ++e) clear_pad(dst, to + e);
  return count;
}

void convert_entry(const ConvertParams& p, const RowKernels& kernels, int64_t i, float* buffer) {
  const int64_t from = slot_of(p.src_slots, i), to = slot_of(p.dst_slots, i);
  if (from < 0 || to < 0) return;
  for (int64_t h = 0; h < p.src.heads; ++h) {
    read_row(kernels, p.src, from, h, buffer);
    write_row(kernels, p.dst, to, h, buffer);
  }
}

}  // namespace

int64_t store(const StoreParams& p) {
  const int64_t last = largest(p.slots, p.tokens);
  if (last >= p.plane.slots()) return last;
  const RowKernels& kernels = row_kernels(p.isa);
  for_rows(p.tokens, p.plane, p.threads, [&](int64_t begin, int64_t end, float* buffer) {
    for (int64_t t = begin; t < end; ++t) store_row(p, kernels, t, buffer);
  });
  return -1;
}

int64_t load(const LoadParams& p) {
  const int64_t last = largest(p.slots, p.tokens);
  if (last >= p.plane.slots()) return last;
  const RowKernels& kernels = row_kernels(p.isa);
  for_rows(p.tokens, p.plane, p.threads, [&](int64_t begin, int64_t end, float*) {
    for (int64_t t = begin; t < end; ++t) load_row(p, kernels, t);
  });
  return -1;
}

PastPlane convert(const ConvertParams& p) {
  int64_t src_last = -1, dst_last = -1;
  for (int64_t i = 0; i < p.entries; ++i) {
    const int64_t from = slot_of(p.src_slots, i), to = slot_of(p.dst_slots, i);
    if (from < 0 || to < 0) continue;
    src_last = std::max(src_last, from);
    dst_last = std::max(dst_last, to);
  }
  if (src_last >= p.src.slots()) return {false, src_last};
  if (dst_last >= p.dst.slots()) return {true, dst_last};
  const RowKernels& kernels = row_kernels(p.isa);
  const bool moves = same(codec_of(p.src.format), codec_of(p.dst.format));
  for_rows(p.entries, p.src, p.threads, [&](int64_t begin, int64_t end, float* buffer) {
    for (int64_t i = begin; i < end;) {
      if (moves) {
        i += move_entries(p, i, end);
      } else {
        convert_entry(p, kernels, i++, buffer);
      }
    }
  });
  return {false, -1};
}

}  // namespace sparse_attn
