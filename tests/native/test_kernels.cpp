// The kernels of csrc/cpu_native on random hostile calls, against plain loops in double precision.
//
// Every tensor is an allocation of exactly its size. Rows that no lane attends are poisoned for the
// address sanitizer (reading one ends the program) and hold NaN; so does the padding between
// strided rows. Page tables hold rubbish outside of what is attended, index lists hold rubbish
// everywhere.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "common/decode.h"
#include "common/layout.h"
#include "common/number.h"
#include "cpu_native/attend.h"
#include "cpu_native/entry.h"
#include "cpu_native/merge.h"
#include "cpu_native/store.h"
#include "hostile.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(p, bytes) __asan_poison_memory_region(p, bytes)
#define UNPOISON(p, bytes) __asan_unpoison_memory_region(p, bytes)
#else
#define POISON(p, bytes) (void)(p), (void)(bytes)
#define UNPOISON(p, bytes) (void)(p), (void)(bytes)
#endif

namespace {

using namespace sparse_attn;

bool chance(int percent) { return below(100) < percent; }

double read(const char* p, Format format) {
  float x;
  uint16_t half;
  switch (format) {
    case Format::kFp32:
      memcpy(&x, p, 4);
      return x;
    case Format::kBf16:
      memcpy(&half, p, 2);
      return bf16_to_float(half);
    case Format::kFp16:
      memcpy(&half, p, 2);
      return half_to_float(half);
    default:
      return *reinterpret_cast<const int8_t*>(p);
  }
}

void write(char* p, Format format, float x) {
  const uint16_t half = format == Format::kBf16 ? float_to_bf16(x) : float_to_half(x);
  switch (format) {
    case Format::kFp32:
      memcpy(p, &x, 4);
      return;
    case Format::kBf16:
    case Format::kFp16:
      memcpy(p, &half, 2);
      return;
    default:
      *reinterpret_cast<int8_t*>(p) = static_cast<int8_t>(x);
  }
}

// A paged tensor in an allocation of its size, with gaps between its rows.
struct Plane {
  std::vector<char> memory;
  std::vector<std::vector<float>> read_rows;
  Format format;
  PagedRows rows;
  int64_t pages, page_size, heads;

  Plane(Format format_, int64_t pages_, int64_t page_size_, int64_t heads_, int64_t dim)
      : format(format_), pages(pages_), page_size(page_size_), heads(heads_) {
    if (packed(format)) {
      pack();
      return;
    }
    const int64_t element = element_bytes(format);
    rows.type = codec_of(format).element;
    rows.dim = static_cast<int32_t>(dim);
    rows.head_stride = (dim + below(3)) * element;
    rows.entry_stride = heads * rows.head_stride + below(3) * element;
    rows.page_stride = page_size * rows.entry_stride + below(3) * element;
    const int64_t bytes = (pages - 1) * rows.page_stride + (page_size - 1) * rows.entry_stride +
                          (heads - 1) * rows.head_stride + dim * element;
    memory.resize(static_cast<size_t>(bytes));
    memory.shrink_to_fit();
    for (int64_t i = 0; i + element <= bytes; i += element) {
      write(memory.data() + i, format, format == Format::kInt8 ? 127 : NAN);
    }
    rows.data = memory.data();
  }

  // Memory of a packed plane, all bytes 0xff: NaN in each of its types but int8.
  void pack() {
    const FormatInfo& info = info_of(format);
    const int64_t entry = width(info.sections[0]) + (planar(format) ? 0 : below(9));
    const int64_t bytes = page_size * (entry + width(info.sections[1]));
    const int64_t page = (bytes + info.page_multiple - 1) / info.page_multiple * info.page_multiple;
    rows.page_stride = page + below(9);
    rows.entry_stride = entry;
    memory.assign(static_cast<size_t>((pages - 1) * rows.page_stride + page), '\xff');
    memory.shrink_to_fit();
  }

  void set(PlaneParams* params) {
    if (packed(format)) {
      set_packed(params, format, memory.data(), page_size, rows.page_stride, rows.entry_stride);
    } else {
      params->k = rows;
    }
  }

  struct Bytes {
    Part part;
    char* from;
    int64_t size;
  };

  // Where an entry lies.
  std::vector<Bytes> bytes_at(int64_t page, int64_t offset, int64_t head) {
    if (!packed(format)) return {{Part::kValues, at(page, offset, head), row_bytes()}};
    std::vector<Bytes> result;
    for (const Section& section : info_of(format).sections) {
      for (const PartSize& size : section.parts) {
        if (size.part == Part::kNone) continue;
        const PartPlace place = place_of(format, size.part, page_size, rows.entry_stride);
        const int64_t step = planar(format) ? place.step : rows.entry_stride;
        result.push_back({size.part,
                          memory.data() + page * rows.page_stride + place.first + offset * step,
                          size.bytes});
      }
    }
    return result;
  }

  // An entry's elements, read once: the rows of a case do not change.
  const std::vector<float>& numbers(int64_t page, int64_t offset, int64_t head) {
    const Codec& codec = codec_of(format);
    read_rows.resize(static_cast<size_t>(pages * page_size * heads));
    std::vector<float>& row =
        read_rows[static_cast<size_t>((page * page_size + offset) * heads + head)];
    if (!row.empty()) return row;
    EntryParts parts = {};
    for (const Bytes& bytes : bytes_at(page, offset, head)) {
      if (bytes.part == Part::kValues) parts.values = bytes.from;
      if (bytes.part == Part::kRope) parts.rope = bytes.from;
      if (bytes.part == Part::kScales) parts.scales = bytes.from;
    }
    const Codec read = packed(format) ? codec : Codec{codec.element};
    row.resize(static_cast<size_t>(packed(format) ? codec.dim + codec.rope : rows.dim));
    decode_row(read, parts, static_cast<int32_t>(row.size()), row.data());
    return row;
  }

  char* at(int64_t page, int64_t offset, int64_t head) {
    return memory.data() + page * rows.page_stride + offset * rows.entry_stride +
           head * rows.head_stride;
  }

  void fill(int64_t page, int64_t offset, int64_t head, bool positive) {
    if (packed(format)) return fill_packed(page, offset);
    for (int64_t d = 0; d < rows.dim; ++d) {
      const bool whole = format == Format::kInt8;
      const float x = positive ? 0.01f + 0.02f * fabsf(normal())
                      : whole  ? static_cast<float>(between(-127, 127))
                               : normal();
      write(at(page, offset, head) + d * element_bytes(format), format, x);
    }
  }

  // Any numbers of sensible size.
  void fill_packed(int64_t page, int64_t offset) {
    const Codec& codec = codec_of(format);
    for (const Bytes& bytes : bytes_at(page, offset, 0)) {
      const Number type = bytes.part == Part::kScales   ? codec.scale
                          : bytes.part == Part::kRope   ? Number::kBf16
                          : bytes.part == Part::kValues ? codec.element
                                                        : Number::kNone;
      for (int64_t i = 0; i < bytes.size * 8 / std::max(number_bits(type), 8); ++i) {
        const float size =
            bytes.part == Part::kScales ? 0.001f + 0.02f * fabsf(normal()) : normal();
        char* to = bytes.from + i * number_bits(type) / 8;
        if (type == Number::kFp32) write(to, Format::kFp32, size);
        if (type == Number::kBf16) write(to, Format::kBf16, size);
        if (type == Number::kE8m0) *to = static_cast<char>(between(118, 126));
        if (type == Number::kE4m3 && bytes.part == Part::kScales)
          *to = static_cast<char>(between(1, 0x38));
        if (type == Number::kE4m3 && bytes.part == Part::kValues)
          *to = static_cast<char>(below(2) << 7 | between(0, 0x48));
        if (type == Number::kInt8) *to = static_cast<char>(between(-127, 127));
        if (type == Number::kE2m1) *to = static_cast<char>(below(256));
      }
    }
  }

  int64_t row_bytes() const { return bytes_of(rows.type, rows.dim); }
};

struct PlaneCase {
  std::vector<Plane> tensors;  // k, then those that are given of rope, v, k_scale, v_scale
  int k = -1, rope = -1, v = -1, k_scale = -1, v_scale = -1;
  std::vector<int32_t> table, range, indices, counts;
  PlaneParams params;

  int add(Format format, int64_t pages, int64_t page_size, int64_t heads, int64_t dim) {
    tensors.emplace_back(format, pages, page_size, heads, dim);
    return static_cast<int>(tensors.size()) - 1;
  }
};

struct Case {
  AttendParams p;
  std::vector<char> q, out;
  std::vector<float> lse, sinks;
  std::vector<int32_t> starts, lengths;
  PlaneCase window, main;
  std::string words;
};

constexpr Format kKvFormats[] = {Format::kFp32, Format::kBf16, Format::kFp16, Format::kInt8};

// Whether a case has but numbers that bf16 products take.
bool in_bf16 = false;

// One of the first `count` formats.
Format any_format(int64_t count) {
  if (in_bf16) return count > 3 && chance(40) ? Format::kInt8 : Format::kBf16;
  return kKvFormats[below(count)];
}

// Packed formats that attend reads have rows of these sizes.
bool packed_dim(int32_t dim) { return dim == 512 || dim == 576; }

Format any_packed(int32_t dim) {
  for (;;) {
    const FormatInfo& info = kFormats[below(sizeof(kFormats) / sizeof(kFormats[0]))];
    if (packed(info.format) && info.codec.dim + info.codec.rope == dim) return info.format;
  }
}

// Chooses formats, sizes and memory of a plane. Its rows hold NaN until `show` fills what is
// attended.
void make_plane(Case& c, PlaneCase& plane, bool is_window, int64_t page_size) {
  AttendParams& p = c.p;
  PlaneParams& params = plane.params;
  const int64_t longest = p.max_seq_len;
  params.given = true;
  params.page_size = page_size;
  params.max_pages = longest / page_size + 1;
  params.pages = p.batch * params.max_pages + 1;
  const bool packs = packed_dim(p.qk_dim);
  const Format format = packs ? any_packed(p.qk_dim) : is_window ? any_format(3) : any_format(4);
  const int64_t rope = !packs && !is_window && chance(30) ? between(1, p.qk_dim - 1) : 0;
  const bool apart = !packs && !is_window && (p.v_dim > p.qk_dim - rope || chance(50));
  plane.k = plane.add(format, params.pages, page_size, p.kv_heads, p.qk_dim - rope);
  if (rope) plane.rope = plane.add(any_format(3), params.pages, page_size, p.kv_heads, rope);
  const Format v_format = apart ? any_format(4) : format;
  if (apart) plane.v = plane.add(v_format, params.pages, page_size, p.kv_heads, p.v_dim);
  if (format == Format::kInt8)
    plane.k_scale = plane.add(Format::kFp16, params.pages, page_size, p.kv_heads, 1);
  if (apart && v_format == Format::kInt8) {
    plane.v_scale = plane.add(Format::kFp16, params.pages, page_size, p.kv_heads, 1);
  }
  plane.tensors[plane.k].set(&params);
  if (rope) params.rope = plane.tensors[plane.rope].rows;
  if (apart) params.v = plane.tensors[plane.v].rows;
  if (plane.k_scale >= 0) params.k_scale = plane.tensors[plane.k_scale].rows;
  if (!apart && !packs) params.v_scale = params.k_scale;
  if (plane.v_scale >= 0) params.v_scale = plane.tensors[plane.v_scale].rows;

  plane.table.assign(static_cast<size_t>(p.batch * params.max_pages), 0);
  for (size_t i = 0; i < plane.table.size(); ++i) plane.table[i] = static_cast<int32_t>(i);
  std::shuffle(plane.table.begin(), plane.table.end(), generator);
  params.page_table = plane.table.data();
  params.page_table_stride = params.max_pages;

  params.ratio = is_window ? 1 : between(1, 4);
  if (is_window) params.window = between(1, 90);
  if (chance(30) || (is_window && !p.causal)) {
    for (int64_t t = 0; t < p.tokens; ++t) {
      const int64_t low = between(-5, longest);
      plane.range.push_back(static_cast<int32_t>(low));
      plane.range.push_back(static_cast<int32_t>(chance(10) ? low - 3 : between(low, longest + 1)));
    }
    params.range = plane.range.data();
  }
  if (!chance(50)) return;
  params.listed = true;
  params.index_heads = is_window || chance(30) ? 1 : chance(50) ? p.kv_heads : p.heads;
  params.select_block = is_window || chance(50) ? 1 : between(2, 70);
  params.selected = chance(10) ? 0 : between(1, 700 / params.select_block + 2);
  params.index_strides[2] = between(1, 2);
  params.index_strides[1] = params.selected * params.index_strides[2] + below(2);
  params.index_strides[0] = params.index_heads * params.index_strides[1] + below(2);
  const int64_t blocks = longest / params.select_block + 1;
  if (params.selected > 0 && p.tokens > 0) {
    plane.indices.resize(static_cast<size_t>((p.tokens - 1) * params.index_strides[0] +
                                             (params.index_heads - 1) * params.index_strides[1] +
                                             (params.selected - 1) * params.index_strides[2] + 1));
  }
  for (int32_t& index : plane.indices) {
    constexpr int32_t kRubbish[] = {-1, -7, INT32_MIN, INT32_MAX, INT32_MAX / 64};
    index = chance(20) ? kRubbish[below(5)] : static_cast<int32_t>(below(blocks + 1));
  }
  params.indices = plane.indices.data();
  if (!is_window && chance(30)) {
    for (int64_t i = 0; i < p.tokens * params.index_heads; ++i) {
      plane.counts.push_back(
          static_cast<int32_t>(chance(10) ? -5 : between(0, params.selected + 3)));
    }
    params.counts = plane.counts.data();
  }
}

Case make_case() {
  constexpr int32_t kHeads[][2] = {{1, 1},  {3, 1},  {4, 2},  {8, 8},  {9, 3},
                                   {12, 1}, {16, 1}, {40, 1}, {128, 1}};
  constexpr int32_t kPages[] = {1, 16, 53, 64};
  Case c;
  AttendParams& p = c.p;
  in_bf16 = chance(40);
  const int32_t* heads = kHeads[in_bf16 ? between(4, 8) : below(9)];
  p.heads = heads[0];
  p.kv_heads = heads[1];
  const bool packs = heads[1] == 1 && heads[0] <= 12 && chance(40);
  p.qk_dim = static_cast<int32_t>(packs        ? (chance(70) ? 512 : 576)
                                  : chance(30) ? 64
                                               : between(2, 80));
  p.batch = below(4);
  p.scale = 1 / sqrt(p.qk_dim) * (chance(10) ? -1 : 1);
  p.causal = !chance(20);
  p.q_format = any_format(3);
  const bool both = chance(30), window = both || chance(40);
  p.v_dim = static_cast<int32_t>(between(1, packs || window ? p.qk_dim : 80));
  if (chance(30) && p.qk_dim >= 32) p.v_dim = 32;
  const int64_t longest = packs ? 70 : p.heads > 40 ? 100 : 700;

  c.starts.push_back(0);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t rows = chance(50) ? 1 : between(0, p.heads > 40 ? 2 : packs ? 4 : 60);
    c.starts.push_back(c.starts.back() + static_cast<int32_t>(rows));
    c.lengths.push_back(static_cast<int32_t>(chance(15) ? -below(3) : between(1, longest)));
    p.max_seqlen_q = std::max(p.max_seqlen_q, rows);
    p.max_seq_len = std::max<int64_t>(p.max_seq_len, c.lengths.back());
  }
  p.tokens = c.starts.back() + below(3);
  p.cu_seqlens_q = c.starts.data();
  p.seq_lens = c.lengths.data();
  if (chance(40)) {
    for (int32_t h = 0; h < p.heads; ++h) {
      constexpr float kSinks[] = {0, 1, -INFINITY, INFINITY, 1e30f, -1e30f};
      c.sinks.push_back(kSinks[below(6)]);
    }
    p.sinks = c.sinks.data();
  }
  const int64_t element = element_bytes(p.q_format);
  p.q_strides[1] = (p.qk_dim + below(2)) * element;
  p.q_strides[0] = p.heads * p.q_strides[1] + below(2) * element;
  if (p.tokens > 0) {
    c.q.resize(static_cast<size_t>((p.tokens - 1) * p.q_strides[0] +
                                   (p.heads - 1) * p.q_strides[1] + p.qk_dim * element));
  }
  for (size_t i = 0; i + 1 < c.q.size(); i += element) write(c.q.data() + i, p.q_format, normal());
  p.q = c.q.data();
  if (window) make_plane(c, c.window, true, kPages[below(4)]);
  if (both || !window) make_plane(c, c.main, false, kPages[below(4)]);
  p.window = c.window.params;
  p.main = c.main.params;
  c.out.resize(static_cast<size_t>(p.tokens * p.heads * p.v_dim * element));
  c.lse.resize(static_cast<size_t>(p.tokens * p.heads));
  p.out = c.out.data();
  p.lse = c.lse.data();
  c.words = "heads " + std::to_string(p.heads) + "/" + std::to_string(p.kv_heads) + " dims " +
            std::to_string(p.qk_dim) + "/" + std::to_string(p.v_dim) + " window " +
            std::to_string(p.window.given) + " listed " + std::to_string(p.main.listed) +
            " block " + std::to_string(p.main.select_block) + " q " +
            std::to_string(static_cast<int>(p.q_format)) + " k " +
            (c.main.k < 0 ? "" : info_of(c.main.tensors[0].format).name) + " window " +
            (c.window.k < 0 ? "" : info_of(c.window.tensors[0].format).name);
  return c;
}

// Entries of a plane that a row attends, by the words of the contract.
std::vector<int64_t> attended(const AttendParams& p, const PlaneParams& plane, int64_t b,
                              int64_t row, int64_t position, int64_t head) {
  std::vector<int64_t> entries;
  if (!plane.given) return entries;
  int64_t low = 0, high = (p.causal ? position + 1 : p.seq_lens[b]) / plane.ratio;
  if (plane.window) low = position + 1 - plane.window;
  if (plane.range) {
    low = plane.range[2 * row];
    high = plane.range[2 * row + 1];
  }
  low = std::max<int64_t>(low, 0);
  if (!plane.listed) {
    for (int64_t entry = low; entry < high; ++entry) entries.push_back(entry);
    return entries;
  }
  const int64_t index_head = head * plane.index_heads / p.heads;
  int64_t count = plane.selected;
  if (plane.counts)
    count = std::min<int64_t>(count, plane.counts[row * plane.index_heads + index_head]);
  for (int64_t j = 0; j < count; ++j) {
    const int64_t index =
        plane.indices[row * plane.index_strides[0] + index_head * plane.index_strides[1] +
                      j * plane.index_strides[2]];
    for (int64_t o = 0; o < plane.select_block && index >= 0; ++o) {
      const int64_t entry = index * plane.select_block + o;
      if (entry >= low && entry < high) entries.push_back(entry);
    }
  }
  return entries;
}

template <class Visit>
void for_each_row(const AttendParams& p, Visit visit) {
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t row = p.cu_seqlens_q[b]; row < p.cu_seqlens_q[b + 1]; ++row) {
      const int64_t position = p.seq_lens[b] - (p.cu_seqlens_q[b + 1] - row);
      if (position >= 0) visit(b, row, position);
    }
  }
}

// Fills the rows that are attended, poisons all others, and spoils the unused columns of the page
// table.
void show(Case& c, PlaneCase& plane) {
  PlaneParams& params = plane.params;
  if (!params.given) return;
  const AttendParams& p = c.p;
  const size_t rows = static_cast<size_t>(params.pages * params.page_size * p.kv_heads);
  std::vector<bool> seen(rows), used(plane.table.size());
  for_each_row(p, [&](int64_t b, int64_t row, int64_t position) {
    for (int64_t head = 0; head < p.heads; ++head) {
      for (int64_t entry : attended(p, params, b, row, position, head)) {
        const size_t column = static_cast<size_t>(b * params.max_pages + entry / params.page_size);
        const int64_t slot = plane.table[column] * params.page_size + entry % params.page_size;
        seen[static_cast<size_t>(slot * p.kv_heads + head * p.kv_heads / p.heads)] = true;
        used[column] = true;
      }
    }
  });
  for (size_t i = 0; i < rows; ++i) {
    const int64_t slot = static_cast<int64_t>(i) / p.kv_heads,
                  head = static_cast<int64_t>(i) % p.kv_heads;
    for (int which : {plane.k, plane.rope, plane.v, plane.k_scale, plane.v_scale}) {
      if (which < 0) continue;
      Plane& tensor = plane.tensors[static_cast<size_t>(which)];
      const int64_t page = slot / params.page_size, offset = slot % params.page_size;
      if (seen[i]) {
        tensor.fill(page, offset, head, which == plane.k_scale || which == plane.v_scale);
      } else {
        for (const Plane::Bytes& bytes : tensor.bytes_at(page, offset, head))
          POISON(bytes.from, static_cast<size_t>(bytes.size));
      }
    }
  }
  for (size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) plane.table[i] = chance(50) ? -3 : INT32_MAX;
  }
}

void hide(PlaneCase& plane) {
  for (Plane& tensor : plane.tensors) UNPOISON(tensor.memory.data(), tensor.memory.size());
}

// One plane's share of a row: scores and values.
struct Value {
  double score;
  const float* row;
  double scale;
};

void collect(Case& c, PlaneCase& plane, int64_t b, int64_t row, int64_t position, int64_t head,
             std::vector<Value>* values) {
  const AttendParams& p = c.p;
  const PlaneParams& params = plane.params;
  const int64_t kv_head = head * p.kv_heads / p.heads, element = element_bytes(p.q_format);
  for (int64_t entry : attended(p, params, b, row, position, head)) {
    const int64_t page =
        plane.table[static_cast<size_t>(b * params.max_pages + entry / params.page_size)];
    const int64_t offset = entry % params.page_size;
    const auto scale_of = [&](int which) {
      return which < 0 ? 1
                       : read(plane.tensors[static_cast<size_t>(which)].at(page, offset, kv_head),
                              Format::kFp16);
    };
    const char* q = p.q + row * p.q_strides[0] + head * p.q_strides[1];
    double score = 0;
    int64_t d = 0;
    for (int which : {plane.k, plane.rope}) {
      if (which < 0) continue;
      Plane& tensor = plane.tensors[static_cast<size_t>(which)];
      const double scale = which == plane.k ? scale_of(plane.k_scale) : 1;
      for (float x : tensor.numbers(page, offset, kv_head))
        score += scale * read(q + d++ * element, p.q_format) * x;
    }
    Plane& v = plane.tensors[static_cast<size_t>(plane.v < 0 ? plane.k : plane.v)];
    values->push_back({score * p.scale, v.numbers(page, offset, kv_head).data(),
                       scale_of(plane.v < 0 ? plane.k_scale : plane.v_scale)});
  }
}

void compare(Case& c, const char* isa) {
  const AttendParams& p = c.p;
  // bf16 probabilities have independent errors of up to 2^-9 of each term.
  const double tolerance = p.q_format == Format::kFp32   ? 2e-5
                           : p.q_format == Format::kFp16 ? 2e-3
                                                         : 2e-2;
  // So have keys that are rounded to bf16.
  const auto rounds = [](const PlaneParams& plane) {
    const Number scale = plane.k_scale.type;
    return plane.group > 0 && (scale == Number::kFp32 || scale == Number::kBf16);
  };
  const bool rounded = (p.main.given && rounds(p.main)) || (p.window.given && rounds(p.window));
  const double products = p.q_format != Format::kBf16 ? 0 : rounded ? 5e-3 : 1e-4;
  std::vector<bool> visited(static_cast<size_t>(p.tokens));
  const auto expect = [&](int64_t row, int64_t head, double sum, double maximum,
                          const std::vector<Value>& values) {
    const size_t at = static_cast<size_t>(row * p.heads + head);
    const double lse = values.empty() ? -INFINITY : maximum + log(sum);
    CHECK(c.lse[at] == lse || fabs(c.lse[at] - lse) < 1e-5 * (10 + fabs(lse)) + products,
          "%s %s row %d head %d: lse %g, expected %g", isa, c.words.c_str(), int(row), int(head),
          c.lse[at], lse);
    const double sink = c.sinks.empty() ? 0 : exp(c.sinks[static_cast<size_t>(head)] - maximum);
    std::vector<double> weights;
    for (const Value& v : values)
      weights.push_back(exp(v.score - maximum) / (sum + sink) * v.scale);
    for (int64_t d = 0; d < p.v_dim; ++d) {
      std::map<const float*, double> terms;  // an entry that is listed twice errs alike
      for (size_t n = 0; n < values.size(); ++n)
        terms[values[n].row] += weights[n] * values[n].row[d];
      double expected = 0, squares = 0;
      for (const auto& term : terms) {
        expected += term.second;
        squares += term.second * term.second;
      }
      const int64_t element = element_bytes(p.q_format);
      const double got =
          read(p.out + (static_cast<int64_t>(at) * p.v_dim + d) * element, p.q_format);
      CHECK(fabs(got - expected) <= tolerance * (sqrt(squares) + fabs(expected)),
            "%s %s row %d head %d element %d: %g, expected %g", isa, c.words.c_str(), int(row),
            int(head), int(d), got, expected);
    }
  };
  for_each_row(p, [&](int64_t b, int64_t row, int64_t position) {
    visited[static_cast<size_t>(row)] = true;
    for (int64_t head = 0; head < p.heads; ++head) {
      std::vector<Value> values;
      collect(c, c.window, b, row, position, head, &values);
      collect(c, c.main, b, row, position, head, &values);
      double maximum = -INFINITY, sum = 0;
      for (const Value& v : values) maximum = std::max(maximum, v.score);
      for (const Value& v : values) sum += exp(v.score - maximum);
      expect(row, head, sum, values.empty() ? 0 : maximum, values);
    }
  });
  for (int64_t row = 0; row < p.tokens; ++row) {
    for (int64_t head = 0; head < p.heads && !visited[static_cast<size_t>(row)]; ++head)
      expect(row, head, 0, 0, {});
  }
}

// Attends a row of each sequence by itself, which takes other loops than with rows beside it: the
// same bits.
void compare_rows_alone(const Case& c, const char* isa) {
  for (int64_t b = 0; b < c.p.batch; ++b) {
    const int64_t begin = c.starts[static_cast<size_t>(b)];
    const int64_t end = c.starts[static_cast<size_t>(b) + 1];
    if (begin == end) continue;
    const int64_t row = begin + below(end - begin);
    const int32_t length = c.lengths[static_cast<size_t>(b)];
    const int32_t position = length - static_cast<int32_t>(end - row);
    if (position < 0) continue;
    AttendParams p = c.p;
    const int32_t starts[] = {0, 1}, lengths[] = {p.causal ? position + 1 : length};
    const size_t bytes = c.out.size() / static_cast<size_t>(p.tokens);
    std::vector<char> out(bytes);
    std::vector<float> lse(static_cast<size_t>(p.heads));
    p.q += row * p.q_strides[0];
    p.cu_seqlens_q = starts;
    p.seq_lens = lengths;
    p.out = out.data();
    p.lse = lse.data();
    p.tokens = p.batch = p.max_seqlen_q = 1;
    for (PlaneParams* plane : {&p.window, &p.main}) {
      if (!plane->given) continue;
      plane->page_table += b * plane->page_table_stride;
      if (plane->range) plane->range += 2 * row;
      if (plane->listed) plane->indices += row * plane->index_strides[0];
      if (plane->counts) plane->counts += row * plane->index_heads;
    }
    CHECK(attend(p).error == CallError::kNone, "%s %s: a row alone", isa, c.words.c_str());
    const auto at = static_cast<size_t>(row);
    CHECK(memcmp(out.data(), c.out.data() + at * bytes, bytes) == 0 &&
              memcmp(lse.data(), c.lse.data() + at * lse.size(), 4 * lse.size()) == 0,
          "%s %s: row %d depends on rows beside it", isa, c.words.c_str(), int(row));
  }
}

// Makes an element infinite that the last row of a sequence attends: rows that do not attend it
// keep their bits.
void compare_beside_infinity(Case& c, const char* isa) {
  PlaneCase& plane = c.main;
  if (!c.p.main.given) return;
  Plane& values = plane.tensors[static_cast<size_t>(plane.v >= 0 ? plane.v : plane.k)];
  if (values.format != Format::kBf16) return;
  const std::vector<char> finite = c.out;
  for_each_row(c.p, [&](int64_t b, int64_t last, int64_t last_position) {
    if (last + 1 < c.p.cu_seqlens_q[b + 1]) return;
    const std::vector<int64_t> entries = attended(c.p, c.p.main, b, last, last_position, 0);
    if (entries.empty()) return;
    const int64_t entry = entries.back(), page_size = c.p.main.page_size;
    const auto column = static_cast<size_t>(b * c.p.main.max_pages + entry / page_size);
    char* const element = values.at(plane.table[column], entry % page_size, 0);
    char kept[2];
    memcpy(kept, element, sizeof(kept));
    write(element, values.format, INFINITY);
    CHECK(attend(c.p).error == CallError::kNone, "%s %s", isa, c.words.c_str());
    for_each_row(c.p, [&](int64_t sequence, int64_t row, int64_t position) {
      const std::vector<int64_t> own = attended(c.p, c.p.main, sequence, row, position, 0);
      if (sequence == b && std::find(own.begin(), own.end(), entry) != own.end()) return;
      const size_t bytes = c.out.size() / static_cast<size_t>(c.p.tokens);
      const size_t at = static_cast<size_t>(row) * bytes;
      CHECK(memcmp(c.out.data() + at, finite.data() + at, bytes) == 0,
            "%s %s: row %d notices what it does not attend", isa, c.words.c_str(), int(row));
    });
    memcpy(element, kept, sizeof(kept));
  });
}

// Calls whose rows share vectors, and whose numbers all are numbers of bf16.
void test_rows_alone(int count) {
  const auto short_type = [](const PagedRows& rows) {
    return rows.dim == 0 || (rows.type != Number::kFp32 && rows.type != Number::kFp16);
  };
  while (count > 0) {
    Case c = make_case();
    const PlaneParams &window = c.p.window, &main = c.p.main;
    if (window.listed || main.listed || c.p.heads / c.p.kv_heads > 3 || c.p.max_seqlen_q < 8 ||
        c.p.q_format != Format::kBf16 || !short_type(window.k) || !short_type(main.k) ||
        !short_type(main.rope) || !short_type(main.v))
      continue;
    --count;
    show(c, c.window);
    show(c, c.main);
    c.p.window.page_table = c.window.table.data();
    c.p.main.page_table = c.main.table.data();
    for (Isa isa : isas_of_machine()) {
      c.p.isa = isa;
      CHECK(attend(c.p).error == CallError::kNone, "%s", c.words.c_str());
      compare_rows_alone(c, name_of(isa));
      compare_beside_infinity(c, name_of(isa));
    }
  }
}

void test_random_calls(int count) {
  for (int i = 0; i < count; ++i) {
    Case c = make_case();
    show(c, c.window);
    show(c, c.main);
    c.p.window.page_table = c.window.table.data();
    c.p.main.page_table = c.main.table.data();
    for (Isa isa : isas_of_machine()) {
      const char* name = name_of(isa);
      c.p.isa = isa;
      std::vector<char> out;
      std::vector<float> lse;
      for (int32_t threads : {1, 3}) {
        c.p.threads = threads;
        std::fill(c.out.begin(), c.out.end(), 0x7f);
        std::fill(c.lse.begin(), c.lse.end(), NAN);
        const CallStatus status = attend(c.p);
        CHECK(status.error == CallError::kNone, "%s %s: error %d, %d, %d", name, c.words.c_str(),
              int(status.error), int(status.values[0]), int(status.values[1]));
        if (threads > 1) {
          CHECK(c.out == out, "%s %s: bits depend on threads", name, c.words.c_str());
          CHECK(c.lse == lse, "%s %s", name, c.words.c_str());
        }
        out = c.out;
        lse = c.lse;
      }
      compare_rows_alone(c, name);
      hide(c.window);
      hide(c.main);
      compare(c, name);
    }
  }
}

// Calls that would read outside of something, with what attend must answer.
void test_refusals() {
  struct Refusal {
    const char* what;
    void (*spoil)(Case&);
    CallError error;
    int64_t first, second;
  };
  constexpr Refusal kRefusals[] = {
      {"first start", [](Case& c) { c.starts[0] = 1; }, CallError::kFirstStart, 1, 0},
      {"last start", [](Case& c) { c.starts[2] = 5; }, CallError::kLastStart, 5, 0},
      {"descending", [](Case& c) { c.starts = {0, 2, 1}; }, CallError::kDescending, 0, 0},
      {"int32 overflow", [](Case& c) { c.starts[1] = INT32_MIN; }, CallError::kDescending, 0, 0},
      {"rows", [](Case& c) { c.p.max_seqlen_q = 1; }, CallError::kTooManyRows, 2, 0},
      {"length", [](Case& c) { c.lengths[1] = 41; }, CallError::kTooLong, 41, 0},
      {"short table", [](Case& c) { c.p.main.max_pages = 2; }, CallError::kEntryUnpaged, 38, 1},
      {"far range",
       [](Case& c) {
         c.main.range = {0, 4, 0, INT32_MAX, 0, 4};
         c.p.main.range = c.main.range.data();
       },
       CallError::kEntryUnpaged, INT32_MAX - 1, 1},
      {"page below", [](Case& c) { c.main.table[4] = -1; }, CallError::kPageOutside, 1, -1},
      {"page above", [](Case& c) { c.main.table[5] = 6; }, CallError::kPageOutside, 1, 6},
      {"page of a list",
       [](Case& c) {
         c.main.table[5] = INT32_MIN;
         c.main.indices = {0, 32, 0, 32, 0, 32};
         c.p.main.listed = true;
         c.p.main.indices = c.main.indices.data();
         c.p.main.selected = 2;
         c.p.main.index_strides[0] = c.p.main.index_strides[1] = 2;
         c.p.main.index_strides[2] = 1;
       },
       CallError::kPageOutside, 1, INT32_MIN},
  };
  for (const Refusal& refusal : kRefusals) {
    for (int32_t threads : {1, 3}) {
      Case c;
      c.starts = {0, 1, 3};
      c.lengths = {5, 40};
      c.q.resize(3 * 8 * 4);
      c.out.resize(3 * 8 * 4);
      AttendParams& p = c.p;
      p.tokens = 3;
      p.batch = 2;
      p.heads = p.kv_heads = 1;
      p.qk_dim = p.v_dim = 8;
      p.max_seqlen_q = 2;
      p.max_seq_len = 40;
      p.q_strides[0] = p.q_strides[1] = 32;
      p.threads = threads;
      c.main.k = c.main.add(Format::kFp32, 6, 16, 1, 8);
      c.main.table = {0, 1, 2, 3, 4, 5};
      p.main.given = true;
      p.main.k = c.main.tensors[0].rows;
      p.main.pages = 6;
      p.main.page_size = 16;
      p.main.page_table_stride = p.main.max_pages = 3;
      p.cu_seqlens_q = c.starts.data();
      p.seq_lens = c.lengths.data();
      p.q = c.q.data();
      p.out = c.out.data();
      p.main.page_table = c.main.table.data();
      CHECK(attend(p).error == CallError::kNone, "before it is spoilt");
      refusal.spoil(c);
      const CallStatus status = attend(p);
      CHECK(status.error == refusal.error && status.values[0] == refusal.first &&
                status.values[1] == refusal.second,
            "%s: error %d, %lld, %lld", refusal.what, int(status.error),
            static_cast<long long>(status.values[0]), static_cast<long long>(status.values[1]));
    }
  }
}

// A plane of any format in an allocation of its size, with gaps between pages, and between entries
// and heads where the format's order lets there be some.
struct StoredPlane {
  std::vector<char> memory, scales;
  EntryPlane plane;

  StoredPlane(Format format, int64_t entries, int64_t heads, int64_t dim) {
    plane.format = format;
    plane.page_size = between(1, 9);
    plane.pages = (entries + plane.page_size - 1) / plane.page_size;
    plane.heads = heads;
    plane.dim = dim;
    const FormatInfo& info = info_of(format);
    const bool is_planar = planar(format), is_packed = packed(format);
    const int64_t element = is_packed ? 1 : std::max(number_bits(info.codec.element) / 8, 1);
    const int64_t row = is_packed ? width(info.sections[0]) : bytes_of(info.codec.element, dim);
    int64_t strides[3] = {0, 0, row + below(3) * element}, scale_strides[3] = {0, 0, 2};
    strides[1] = heads * strides[2] + below(3) * element;
    strides[0] = plane.page_size * strides[1] + below(3) * element;
    int64_t bytes = (plane.pages - 1) * strides[0] + (plane.page_size - 1) * strides[1] +
                    (heads - 1) * strides[2] + row;
    if (is_planar) {
      const int64_t page = plane.page_size * (row + width(info.sections[1]));
      strides[0] = page + below(3);
      bytes = (plane.pages - 1) * strides[0] + page;
    }
    memory = std::vector<char>(static_cast<size_t>(bytes), 0x5a);
    scale_strides[1] = 2 * heads;
    scale_strides[0] = plane.page_size * scale_strides[1];
    const bool scaled = !is_packed && info.codec.scale != Number::kNone;
    if (scaled) scales.resize(static_cast<size_t>(plane.pages * scale_strides[0]));
    place_parts(&plane, memory.data(), strides, scaled ? scales.data() : nullptr, scale_strides);
  }
};

// Distinct slots of a plane, some of them negative.
std::vector<int64_t> some_slots(int64_t count, int64_t end) {
  std::vector<int64_t> slots;
  for (int64_t t = 0; t < count; ++t)
    slots.push_back(t < end && chance(80) ? t : -between(1, INT64_MAX));
  if (chance(70)) std::shuffle(slots.begin(), slots.end(), generator);
  return slots;
}

// Rows go into a plane, into another of any format that takes them, and back.
void test_store(int count) {
  constexpr Format kRows[] = {Format::kFp32, Format::kBf16, Format::kFp16};
  const int64_t formats = sizeof(kFormats) / sizeof(kFormats[0]);
  for (int i = 0; i < count; ++i) {
    const FormatInfo& info = kFormats[i % formats];
    const int64_t fixed = info.codec.dim + info.codec.rope, tokens = below(70);
    const int64_t heads = packed(info.format) ? 1 : between(1, 3);
    const int64_t dim = packed(info.format) ? fixed : 2 * between(1, 40);
    StoredPlane stored(info.format, between(1, 70), heads, dim);
    const int64_t end = stored.plane.slots();
    std::vector<int64_t> slots = some_slots(tokens, end);
    const Format row_format = kRows[below(3)];
    const int64_t element = element_bytes(row_format);
    std::vector<char> rows(static_cast<size_t>(tokens * heads * dim * element));
    for (size_t at = 0; at < rows.size(); at += element)
      write(rows.data() + at, row_format, normal() * 100);

    StoreParams p;
    p.plane = stored.plane;
    p.rows = rows.data();
    p.row_strides[0] = heads * dim * element;
    p.row_strides[1] = dim * element;
    p.row_format = row_format;
    p.slots = slots.data();
    p.tokens = tokens;
    p.threads = 3;
    CHECK(store(p) == -1, "%s", info.name);

    std::vector<float> out(static_cast<size_t>(tokens * heads * dim), NAN);
    LoadParams l;
    l.plane = stored.plane;
    l.out = reinterpret_cast<char*>(out.data());
    l.slots = slots.data();
    l.tokens = tokens;
    l.threads = 3;
    CHECK(load(l) == -1, "%s", info.name);
    const int bits = number_bits(info.codec.element);
    for (size_t at = 0; at < out.size(); ++at) {
      const double row = read(rows.data() + at * element, row_format);
      const bool skipped = slots[at / static_cast<size_t>(heads * dim)] < 0;
      const double error = bits == 4 ? 80 : bits == 8 ? 2 + fabs(row) / 16 : 1;  // rows reach 500
      CHECK(skipped ? out[at] == 0 : fabs(out[at] - row) <= error, "%s: %g stored as %g", info.name,
            row, out[at]);
    }

    const FormatInfo& other = chance(30) ? info : kFormats[below(formats)];
    const int64_t other_fixed = other.codec.dim + other.codec.rope;
    if (packed(other.format) && (other_fixed != dim || heads > 1)) continue;
    StoredPlane moved(other.format, end, heads, dim), back(info.format, end, heads, dim);
    ConvertParams c;
    c.src = stored.plane;
    c.dst = moved.plane;
    c.src_slots = c.dst_slots = slots.data();
    c.entries = tokens;
    c.threads = 3;
    CHECK(convert(c).slot == -1, "%s to %s", info.name, other.name);
    c.src = moved.plane;
    c.dst = back.plane;
    CHECK(convert(c).slot == -1, "%s to %s", other.name, info.name);
    std::vector<float> again(out.size(), NAN);
    l.plane = back.plane;
    l.out = reinterpret_cast<char*>(again.data());
    CHECK(load(l) == -1, "%s", info.name);
    CHECK(other.format != info.format || again == out, "%s moved", info.name);

    if (tokens == 0) continue;
    const std::vector<char> before = stored.memory;
    slots.back() = end;
    l.plane = stored.plane;
    c.src = moved.plane;
    c.dst = stored.plane;
    CHECK(store(p) == end && load(l) == end && stored.memory == before, "a slot past the plane");
    const PastPlane past = convert(c);
    CHECK(past.slot == end && past.in_dst == (moved.plane.slots() > end) && stored.memory == before,
          "a slot past a plane");
  }
}

// Joined parts against sums in double precision; lists against sorting.
void test_merges(int count) {
  for (int i = 0; i < count; ++i) {
    MergeParams p;
    p.format = i % 3 == 0 ? Format::kFp32 : i % 3 == 1 ? Format::kBf16 : Format::kFp16;
    p.parts = between(1, 5);
    p.tokens = below(40);
    p.heads = between(1, 3);
    p.dim = between(1, 70);
    p.threads = 3;
    const int64_t element = element_bytes(p.format), rows = p.tokens * p.heads;
    std::vector<char> outs(static_cast<size_t>(p.parts * rows * p.dim * element));
    for (size_t at = 0; at < outs.size(); at += element)
      write(outs.data() + at, p.format, normal());
    std::vector<float> lses(static_cast<size_t>(p.parts * rows));
    for (float& lse : lses) lse = chance(20) ? -INFINITY : 9 * normal();
    p.outs = outs.data();
    p.out_strides[2] = p.dim * element;
    p.out_strides[1] = p.heads * p.out_strides[2];
    p.out_strides[0] = p.tokens * p.out_strides[1];
    p.lses = lses.data();
    p.lse_strides[2] = 1;
    p.lse_strides[1] = p.heads;
    p.lse_strides[0] = rows;
    std::vector<char> out(static_cast<size_t>(rows * p.dim * element));
    std::vector<float> lse(static_cast<size_t>(rows));
    p.out = out.data();
    p.lse = lse.data();
    merge(p);
    for (int64_t row = 0; row < rows; ++row) {
      double sum = 0, expected = 0;
      const int64_t d = below(p.dim);
      for (int64_t s = 0; s < p.parts; ++s) {
        const double weight = exp(lses[static_cast<size_t>(s * rows + row)]);
        sum += weight;
        expected += weight * read(outs.data() + ((s * rows + row) * p.dim + d) * element, p.format);
      }
      const double got = read(out.data() + (row * p.dim + d) * element, p.format);
      CHECK(fabs(got - (sum > 0 ? expected / sum : 0)) < 2e-2, "%g", got);
      CHECK(sum > 0 ? fabs(lse[static_cast<size_t>(row)] - log(sum)) < 1e-5 * (9 + fabs(log(sum)))
                    : isinf(lse[static_cast<size_t>(row)]),
            "%g", lse[static_cast<size_t>(row)]);
    }
  }
}

void test_select_merges(int count) {
  constexpr int32_t kRubbish[] = {-1, INT32_MIN, INT32_MAX};
  for (int i = 0; i < count; ++i) {
    SelectMergeParams p;
    p.shards = below(4);
    p.tokens = below(9);
    p.lists = between(1, 3);
    p.width = below(40);
    p.k = below(60);
    p.run = between(1, 4);
    p.stride = chance(10) ? INT64_MAX : p.run * between(1, 4);
    p.by_score = chance(50);
    p.threads = 3;
    const int64_t rows = p.tokens * p.lists, places = p.shards * rows * p.width;
    std::vector<int32_t> indices(static_cast<size_t>(places)), row_k, offsets;
    std::vector<float> values(indices.size());
    for (int32_t& index : indices) {
      index = chance(10) ? kRubbish[below(3)] : static_cast<int32_t>(below(1000));
    }
    for (float& value : values) value = chance(10) ? NAN : normal();
    for (int64_t t = 0; t < p.tokens; ++t) {
      row_k.push_back(chance(20) ? kRubbish[below(3)] : static_cast<int32_t>(below(60)));
      for (int64_t s = 0; s < p.shards; ++s)
        offsets.push_back(chance(10) ? kRubbish[below(3)] : static_cast<int32_t>(below(99)));
    }
    p.shard_indices = indices.data();
    p.shard_values = values.data();
    p.shard_offsets = offsets.data();
    p.offset_strides[0] = 1;
    p.offset_strides[1] = p.shards;
    const int64_t strides[4] = {rows * p.width, p.lists * p.width, p.width, 1};
    std::copy(strides, strides + 4, p.index_strides);
    std::copy(strides, strides + 4, p.value_strides);
    if (chance(50)) p.row_k = row_k.data();
    std::vector<int32_t> chosen(static_cast<size_t>(rows * p.k)), counts(static_cast<size_t>(rows));
    std::vector<float> scores(chosen.size());
    p.indices = chosen.data();
    p.counts = counts.data();
    p.values = scores.data();
    select_merge(p);
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<float> all;
      for (int64_t s = 0; s < p.shards; ++s) {
        for (int64_t j = 0; j < p.width; ++j) {
          const size_t at = static_cast<size_t>((s * rows + row) * p.width + j);
          if (indices[at] >= 0 && !isnan(values[at])) all.push_back(values[at]);
        }
      }
      std::sort(all.begin(), all.end(), std::greater<float>());
      int64_t room = p.k;
      if (p.row_k) room = std::min(room, std::max<int64_t>(p.row_k[row / p.lists], 0));
      all.resize(static_cast<size_t>(std::min<int64_t>(room, static_cast<int64_t>(all.size()))));
      const auto first = scores.begin() + row * p.k;
      std::vector<float> got(first, first + counts[static_cast<size_t>(row)]);
      std::sort(got.begin(), got.end(), std::greater<float>());
      CHECK(got == all, "the best of the shards");
    }
  }
}

void test_numbers() {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const auto bits = static_cast<uint16_t>(half);
    if ((bits & 0x7fff) > 0x7c00) {
      CHECK(isnan(half_to_float(bits)) && (float_to_half(half_to_float(bits)) & 0x7fff) > 0x7c00,
            "NaN %x", half);
    } else {
      CHECK(float_to_half(half_to_float(bits)) == bits, "half %x", half);
    }
    if ((bits & 0x7fff) <= 0x7f80)
      CHECK(float_to_bf16(bf16_to_float(bits)) == bits, "bf16 %x", half);
  }
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double magnitude =
        exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
    const float e4m3 = read_number(Number::kE4m3, &byte, 0);
    CHECK((code & 0x7f) == 0x7f ? isnan(e4m3) : e4m3 == (code < 128 ? magnitude : -magnitude),
          "e4m3 %x: %g", code, e4m3);
    CHECK(signbit(e4m3) == (code >= 128), "sign of e4m3 %x", code);
    const float e8m0 = read_number(Number::kE8m0, &byte, 0);
    CHECK(code == 255 ? isnan(e8m0) : e8m0 == ldexp(1, code - 127), "e8m0 %x: %g", code, e8m0);
    constexpr double kE2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
    for (int i : {0, 1}) {
      const int nibble = i == 0 ? code & 15 : code >> 4;
      const float e2m1 = read_number(Number::kE2m1, &byte, i);
      CHECK(e2m1 == kE2m1[nibble] && signbit(e2m1) == (nibble >= 8), "e2m1 %x: %g", nibble, e2m1);
      const float int4 = read_number(Number::kInt4, &byte, i);
      CHECK(int4 == (nibble < 8 ? nibble : nibble - 16), "int4 %x: %g", nibble, int4);
    }
  }
  CHECK(float_to_half(65519.99f) == 0x7bff && float_to_half(65520) == 0x7c00, "the largest half");
  CHECK(float_to_half(0x1p-25f) == 0 && float_to_half(0x1.8p-25f) == 1, "the smallest half");
}

}  // namespace

int main(int count, char** arguments) {
  test_numbers();
  test_refusals();
  test_store(300);
  test_merges(60);
  test_select_merges(60);
  test_rows_alone(12);
  test_random_calls(count > 1 ? atoi(arguments[1]) : 300);
  printf("passed:");
  for (Isa isa : isas_of_machine()) printf(" %s", name_of(isa));
  printf("\n");
}
