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
  Number type = Number::kFp32;
};

struct PlaneParams {
  bool given = false;
  PagedRows k;
  PagedRows rope;     // last elements of each key, where they are not stored like the others
  PagedRows v;        // absent: values are the first elements of the keys
  PagedRows k_scale;  // of the elements of k, in formats with scales
  PagedRows v_scale;  // of the values, one for each row, where they are not among the keys
  int32_t group = 0;  // elements of k that share a scale; 0: one scale for each row
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

// Sets where the parts of the entries of a packed format lie, in a plane whose pages start
// `page_stride` bytes apart, and whose entries, unless the format is planar, `entry_stride`.
static inline void set_packed(PlaneParams* plane, Format format, const char* data,
                              int64_t page_size, int64_t page_stride, int64_t entry_stride) {
  const Codec& codec = codec_of(format);
  const auto part = [&](Part which, Number type, int32_t dim) {
    PagedRows rows;
    const PartPlace place = place_of(format, which, page_size, entry_stride);
    rows.data = data + place.first;
    rows.page_stride = page_stride;
    rows.entry_stride = place.step;
    rows.dim = dim;
    rows.type = type;
    return rows;
  };
  const int32_t groups = groups_of(codec, codec.dim);
  plane->k = part(Part::kValues, codec.element, codec.dim);
  plane->k_scale = part(Part::kScales, codec.scale, groups);
  if (codec.rope > 0) plane->rope = part(Part::kRope, Number::kBf16, codec.rope);
  plane->group = groups > 1 ? codec.group : 0;
}

}  // namespace sparse_attn
