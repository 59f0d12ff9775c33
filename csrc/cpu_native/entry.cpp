#include "entry.h"

#include <string.h>

#include <initializer_list>

#include "memory.h"

namespace sparse_attn {
namespace {

int64_t bytes_of_part(Format format, Part part) {
  for (const Section& section : info_of(format).sections) {
    for (const PartSize& size : section.parts) {
      if (size.part == part) return size.bytes;
    }
  }
  return 0;
}

constexpr int64_t kLine = 64;

// Calls fetch(p) for every line of memory of an entry. Inline, as a function that does nothing but
// prefetch counts as one without effect.
template <class Fetch>
inline __attribute__((always_inline)) void for_lines(const EntryPlane& plane, int64_t slot,
                                                     const Fetch& fetch) {
  if (slot < 0) return;
  const int64_t page = slot / plane.page_size, offset = slot % plane.page_size;
  for (const PartRows* part : {&plane.values, &plane.scales, &plane.rope, &plane.pad}) {
    for (int64_t h = 0; part->bytes > 0 && h < plane.heads; ++h) {
      const char* row = part->at(page, offset, h);
      const char* line = row - reinterpret_cast<uintptr_t>(row) % kLine;
      for (; line < row + part->bytes; line += kLine) fetch(line);
    }
  }
}

}  // namespace

void place_parts(EntryPlane* plane, char* data, const int64_t strides[3], char* scale,
                 const int64_t scale_strides[3]) {
  const Format format = plane->format;
  const Codec& codec = codec_of(format);
  const auto rows = [](char* first, const int64_t* steps, int64_t bytes) {
    return PartRows{first, {steps[0], steps[1], steps[2]}, bytes};
  };
  if (!packed(format)) {
    plane->values = rows(data, strides, bytes_of(codec.element, plane->dim));
    if (scale) plane->scales = rows(scale, scale_strides, bytes_of(codec.scale, 1));
    return;
  }
  const auto place = [&](Part part) {
    const PartPlace at = place_of(format, part, plane->page_size, strides[1]);
    const int64_t steps[3] = {strides[0], at.step, 0};
    return rows(data + at.first, steps, bytes_of_part(format, part));
  };
  plane->values = place(Part::kValues);
  plane->scales = place(Part::kScales);
  plane->rope = place(Part::kRope);
  plane->pad = place(Part::kPad);
}

void write_row(const RowKernels& kernels, const EntryPlane& plane, int64_t slot, int64_t head,
               Number from, const char* row) {
  const int64_t page = slot / plane.page_size, offset = slot % plane.page_size;
  kernels.encode(codec_of(plane.format), from, row, plane.dim,
                 {plane.values.at(page, offset, head), plane.rope.at(page, offset, head),
                  plane.scales.at(page, offset, head)});
  clear_pad(plane, slot);
}

void read_row(const RowKernels& kernels, const EntryPlane& plane, int64_t slot, int64_t head,
              float* row) {
  kernels.decode(codec_of(plane.format), parts_of(plane, slot, head), plane.dim, row);
}

EntryParts parts_of(const EntryPlane& plane, int64_t slot, int64_t head) {
  const int64_t page = slot / plane.page_size, offset = slot % plane.page_size;
  return {plane.values.at(page, offset, head), plane.rope.at(page, offset, head),
          plane.scales.at(page, offset, head)};
}

void fetch_to_read(const EntryPlane& plane, int64_t slot) {
  for_lines(plane, slot, [](const char* line) { __builtin_prefetch(line); });
}

void fetch_to_write(const EntryPlane& plane, int64_t slot) {
  for_lines(plane, slot, [](const char* line) { prefetch_to_write(line); });
}

void clear_pad(const EntryPlane& plane, int64_t slot) {
  if (plane.pad.bytes == 0) return;
  memset(plane.pad.at(slot / plane.page_size, slot % plane.page_size, 0), 0,
         static_cast<size_t>(plane.pad.bytes));
}

}  // namespace sparse_attn
