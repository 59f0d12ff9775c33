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

// Entries of planes lie anywhere: how many rows before it is their memory is asked for.
constexpr int64_t kAhead = 4;

// What is at least as large as the last caches is not there when it is read: written past them.
constexpr int64_t kLeastStreamed = 1 << 25;

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

// Calls work(i) for rows [begin, end), and fetch(i) earlier.
template <class Fetch, class Work>
void in_order(int64_t begin, int64_t end, const Fetch& fetch, const Work& work) {
  for (int64_t i = begin - kAhead; i < end; ++i) {
    if (i + kAhead < end) fetch(i + kAhead);
    if (i >= begin) work(i);
  }
}

const RowKernels& row_kernels(Isa isa) { return kernels_for(isa, SPARSE_ATTN_ISAS(RowKernels)); }

using Copy = void (*)(char* to, const char* from, int64_t bytes);

void copy_cached(char* to, const char* from, int64_t bytes) {
  memcpy(to, from, static_cast<size_t>(bytes));
}

// How to copy what is `bytes` together.
Copy copy_for(const RowKernels& kernels, int64_t bytes) {
  return bytes < kLeastStreamed ? copy_cached : kernels.stream;
}

// Before others are told that all is written.
void finish_streams() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

int64_t largest(const int64_t* slots, int64_t count) {
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) last = std::max(last, slots[i]);
  return last;
}

inline __attribute__((always_inline)) void fetch_rows(const StoreParams& p, int64_t t) {
  const char* row = p.rows + t * p.row_strides[0];
  for (int64_t h = 0; h < p.plane.heads; ++h, row += p.row_strides[1]) {
    const char* end = row + p.plane.dim * element_bytes(p.row_format);
    for (const char* line = row; line < end; line += 64) __builtin_prefetch(line);
  }
}

void store_row(const StoreParams& p, const RowKernels& kernels, Copy copy, int64_t t) {
  const int64_t slot = p.slots[t];
  if (slot < 0) return;
  const EntryPlane& plane = p.plane;
  const char* row = p.rows + t * p.row_strides[0];
  for (int64_t h = 0; h < plane.heads; ++h, row += p.row_strides[1]) {
    if (p.row_format == plane.format) {
      copy(plane.values.at(slot / plane.page_size, slot % plane.page_size, h), row,
           plane.values.bytes);
    } else {
      write_row(kernels, plane, slot, h, codec_of(p.row_format).element, row);
    }
  }
}

// What is streamed is decoded into the buffer first.
void load_row(const LoadParams& p, const RowKernels& kernels, Copy copy, int64_t t, float* buffer) {
  const int64_t slot = p.slots[t], row_bytes = p.plane.dim * element_bytes(p.out_format);
  char* out = p.out + t * p.plane.heads * row_bytes;
  if (slot < 0) {
    memset(out, 0, static_cast<size_t>(p.plane.heads * row_bytes));
    return;
  }
  const Codec& codec = codec_of(p.plane.format);
  const bool streamed = copy == kernels.stream;
  for (int64_t h = 0; h < p.plane.heads; ++h, out += row_bytes) {
    const EntryParts parts = parts_of(p.plane, slot, h);
    if (p.out_format == p.plane.format) {
      copy(out, parts.values, row_bytes);
      continue;
    }
    char* to = streamed ? reinterpret_cast<char*>(buffer) : out;
    if (p.out_format == Format::kFp32) {
      kernels.decode(codec, parts, p.plane.dim, reinterpret_cast<float*>(to));
    } else {
      kernels.decode_bf16(codec, parts, p.plane.dim, reinterpret_cast<uint16_t*>(to));
    }
    if (streamed) copy(out, to, row_bytes);
  }
}

bool same(const Codec& a, const Codec& b) {
  return a.element == b.element && a.scale == b.scale && a.group == b.group && a.dim == b.dim &&
         a.rope == b.rope;
}

int64_t slot_of(const int64_t* slots, int64_t i) { return slots ? slots[i] : i; }

// Copies a part of `count` entries that follow each other in one page of each plane.
void copy_part(const PartRows& src, int64_t src_page, int64_t src_offset, const PartRows& dst,
               int64_t dst_page, int64_t dst_offset, int64_t heads, int64_t count, Copy copy) {
  const int64_t bytes = src.bytes, row = heads * bytes;
  const bool heads_together = src.strides[2] == bytes && dst.strides[2] == bytes;
  const bool all_together = heads_together && src.strides[1] == row && dst.strides[1] == row;
  const int64_t entry_step = all_together ? count : 1, head_step = heads_together ? heads : 1;
  for (int64_t e = 0; e < count; e += entry_step) {
    for (int64_t h = 0; h < heads; h += head_step) {
      copy(dst.at(dst_page, dst_offset + e, h), src.at(src_page, src_offset + e, h),
           entry_step * head_step * bytes);
    }
  }
}

// Moves entry `i` and those up to `end` that follow it in both planes; how many.
int64_t move_entries(const ConvertParams& p, Copy copy, int64_t i, int64_t end) {
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
  const auto move = [&](const PartRows& a, const PartRows& b) {
    copy_part(a, from / src.page_size, src_offset, b, to / dst.page_size, dst_offset, src.heads,
              count, copy);
  };
  move(src.values, dst.values);
  if (src.scales.bytes > 0) move(src.scales, dst.scales);
  if (src.rope.bytes > 0) move(src.rope, dst.rope);
  for (int64_t e = 0; e < count; ++e) clear_pad(dst, to + e);
  return count;
}

void convert_entry(const ConvertParams& p, const RowKernels& kernels, int64_t i, float* buffer) {
  const int64_t from = slot_of(p.src_slots, i), to = slot_of(p.dst_slots, i);
  if (from < 0 || to < 0) return;
  for (int64_t h = 0; h < p.src.heads; ++h) {
    if (!packed(p.src.format) && codec_of(p.src.format).scale == Number::kNone) {
      write_row(kernels, p.dst, to, h, codec_of(p.src.format).element,
                parts_of(p.src, from, h).values);
    } else {
      read_row(kernels, p.src, from, h, buffer);
      write_row(kernels, p.dst, to, h, Number::kFp32, reinterpret_cast<const char*>(buffer));
    }
  }
}

}  // namespace

int64_t store(const StoreParams& p) {
  const int64_t last = largest(p.slots, p.tokens);
  if (last >= p.plane.slots()) return last;
  const RowKernels& kernels = row_kernels(p.isa);
  const bool copies = p.row_format == p.plane.format;  // whole lines, which nobody reads
  const Copy copy = copy_for(kernels, p.tokens * p.plane.heads * p.plane.values.bytes);
  for_rows(p.tokens, p.plane, p.threads, [&](int64_t begin, int64_t end, float*) {
    const auto fetch = [&](int64_t t) {
      if (copies) return;
      fetch_rows(p, t);
      fetch_to_write(p.plane, p.slots[t]);
    };
    in_order(begin, end, fetch, [&](int64_t t) { store_row(p, kernels, copy, t); });
    finish_streams();
  });
  return -1;
}

int64_t load(const LoadParams& p) {
  const int64_t last = largest(p.slots, p.tokens);
  if (last >= p.plane.slots()) return last;
  const RowKernels& kernels = row_kernels(p.isa);
  const int64_t elements = p.tokens * p.plane.heads * p.plane.dim;
  const Copy copy = copy_for(kernels, elements * element_bytes(p.out_format));
  for_rows(p.tokens, p.plane, p.threads, [&](int64_t begin, int64_t end, float* buffer) {
    const auto fetch = [&](int64_t t) { fetch_to_read(p.plane, p.slots[t]); };
    in_order(begin, end, fetch, [&](int64_t t) { load_row(p, kernels, copy, t, buffer); });
    finish_streams();
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
  const Copy copy = copy_for(kernels, p.entries * p.dst.heads * p.dst.values.bytes);
  for_rows(p.entries, p.src, p.threads, [&](int64_t begin, int64_t end, float* buffer) {
    if (moves) {
      for (int64_t i = begin; i < end;) i += move_entries(p, copy, i, end);
      finish_streams();
      return;
    }
    const auto fetch = [&](int64_t i) {
      fetch_to_read(p.src, slot_of(p.src_slots, i));
      fetch_to_write(p.dst, slot_of(p.dst_slots, i));
    };
    in_order(begin, end, fetch, [&](int64_t i) { convert_entry(p, kernels, i, buffer); });
  });
  return {false, -1};
}

}  // namespace sparse_attn
