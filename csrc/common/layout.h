// Mirrors sparse_attn/layout.py: the formats of KV and index planes, and where the parts of an
// entry lie. A test compares the two.
#pragma once

#include <stdint.h>

namespace sparse_attn {

// Types of numbers.
enum class Number : int32_t { kNone, kFp32, kBf16, kFp16, kE4m3, kE8m0, kInt8, kE2m1, kInt4 };

struct NumberInfo {
  const char* name;
  int32_t bits;
};

constexpr NumberInfo kNumbers[] = {
    {"", 0},     {"fp32", 32}, {"bf16", 16}, {"fp16", 16}, {"e4m3", 8},
    {"e8m0", 8}, {"int8", 8},  {"e2m1", 4},  {"int4", 4},
};

// What the numbers of a row become. The first `dim` elements (0: all of them) are stored as
// `element` numbers, of which each `group` (0: all of the row) shares a scale, if there are scales.
// The last `rope` elements are stored as bf16.
struct Codec {
  Number element;
  Number scale = Number::kNone;
  int32_t group = 0;
  int32_t dim = 0;
  int32_t rope = 0;
};

enum class Part : int32_t { kNone, kValues, kRope, kScales, kPad };

constexpr const char* kPartNames[] = {"", "values", "rope", "scales", "pad"};

struct PartSize {
  Part part;
  int32_t bytes;  // of an entry
};

// Parts in the order of their bytes, then kNone.
struct Section {
  PartSize parts[4];
};

enum class Format : int32_t {
  kFp32,
  kBf16,
  kFp16,
  kInt8,
  kInt8IndexH,
  kInt4IndexH,
  kFp8V32,
  kInt8V32,
  kFp8V4,
  kFp8V4Planar,
  kFp8V4640,
  kFp8V4608,
  kFp8V41,
  kFp8V41Planar,
  kFp4V41,
  kFp4V41Planar,
  kFp8Index,
  kFp8IndexPlanar,
  kInt8Index,
  kInt8IndexPlanar,
  kFp4Index,
  kFp4IndexPlanar,
};

// A codec and where its parts lie. Without sections rows are [pages, page_size, heads], and so are
// the scales, if any, in a plane of their own. With sections a format is packed: a page holds, for
// each section in turn, the bytes of that section of its first entry, its second, and so on, and is
// padded to a multiple of `page_multiple` bytes.
struct FormatInfo {
  const char* name;
  Format format;
  Codec codec;
  Section sections[2] = {};
  int32_t page_multiple = 1;
};

constexpr Codec kV32Codec = {Number::kE4m3, Number::kFp32, 128, 512, 64};
constexpr Codec kInt8V32Codec = {Number::kInt8, Number::kFp32, 128, 512, 64};
constexpr Codec kV4Codec = {Number::kE4m3, Number::kE8m0, 64, 448, 64};
constexpr Codec kV4Bf16ScalesCodec = {Number::kE4m3, Number::kBf16, 64, 448, 64};
constexpr Codec kV41Codec = {Number::kE4m3, Number::kE8m0, 32, 512};
constexpr Codec kFp4V41Codec = {Number::kE2m1, Number::kE4m3, 16, 512};
constexpr Codec kFp8IndexCodec = {Number::kE4m3, Number::kFp32, 128, 128};
constexpr Codec kInt8IndexCodec = {Number::kInt8, Number::kFp16, 128, 128};
constexpr Codec kFp4IndexCodec = {Number::kE2m1, Number::kE8m0, 32, 128};

namespace part {
constexpr PartSize values(int32_t bytes) { return {Part::kValues, bytes}; }
constexpr PartSize rope(int32_t bytes) { return {Part::kRope, bytes}; }
constexpr PartSize scales(int32_t bytes) { return {Part::kScales, bytes}; }
constexpr PartSize pad(int32_t bytes) { return {Part::kPad, bytes}; }
}  // namespace part

constexpr FormatInfo kFormats[] = {
    {"fp32", Format::kFp32, {Number::kFp32}},
    {"bf16", Format::kBf16, {Number::kBf16}},
    {"fp16", Format::kFp16, {Number::kFp16}},
    {"int8", Format::kInt8, {Number::kInt8, Number::kFp16}},
    {"int8_index_h", Format::kInt8IndexH, {Number::kInt8, Number::kFp16}},
    {"int4_index_h", Format::kInt4IndexH, {Number::kInt4, Number::kFp16}},
    {"fp8_v32",
     Format::kFp8V32,
     kV32Codec,
     {{{part::values(512), part::scales(16), part::rope(128)}}}},
    {"int8_v32",
     Format::kInt8V32,
     kInt8V32Codec,
     {{{part::values(512), part::rope(128), part::scales(16)}}}},
    {"fp8_v4",
     Format::kFp8V4,
     kV4Codec,
     {{{part::values(448), part::rope(128), part::scales(7), part::pad(1)}}}},
    {"fp8_v4_planar",
     Format::kFp8V4Planar,
     kV4Codec,
     {{{part::values(448), part::rope(128)}}, {{part::scales(7), part::pad(1)}}},
     576},
    {"fp8_v4_640",
     Format::kFp8V4640,
     kV4Codec,
     {{{part::rope(128), part::values(448), part::scales(7), part::pad(57)}}}},
    {"fp8_v4_608",
     Format::kFp8V4608,
     kV4Bf16ScalesCodec,
     {{{part::rope(128), part::values(448), part::scales(14), part::pad(18)}}}},
    {"fp8_v41", Format::kFp8V41, kV41Codec, {{{part::values(512), part::scales(16)}}}},
    {"fp8_v41_planar",
     Format::kFp8V41Planar,
     kV41Codec,
     {{{part::values(512)}}, {{part::scales(16)}}},
     512},
    {"fp4_v41", Format::kFp4V41, kFp4V41Codec, {{{part::values(256), part::scales(32)}}}},
    {"fp4_v41_planar",
     Format::kFp4V41Planar,
     kFp4V41Codec,
     {{{part::values(256)}}, {{part::scales(32)}}},
     256},
    {"fp8_index", Format::kFp8Index, kFp8IndexCodec, {{{part::values(128), part::scales(4)}}}},
    {"fp8_index_planar",
     Format::kFp8IndexPlanar,
     kFp8IndexCodec,
     {{{part::values(128)}}, {{part::scales(4)}}}},
    {"int8_index", Format::kInt8Index, kInt8IndexCodec, {{{part::values(128), part::scales(2)}}}},
    {"int8_index_planar",
     Format::kInt8IndexPlanar,
     kInt8IndexCodec,
     {{{part::values(128)}}, {{part::scales(2)}}}},
    {"fp4_index", Format::kFp4Index, kFp4IndexCodec, {{{part::values(64), part::scales(4)}}}},
    {"fp4_index_planar",
     Format::kFp4IndexPlanar,
     kFp4IndexCodec,
     {{{part::values(64)}}, {{part::scales(4)}}}},
};

static constexpr const FormatInfo& info_of(Format format) {
  return kFormats[static_cast<int32_t>(format)];
}

static constexpr const Codec& codec_of(Format format) { return info_of(format).codec; }

static constexpr int32_t number_bits(Number number) {
  return kNumbers[static_cast<int32_t>(number)].bits;
}

// Bytes of `count` numbers side by side.
static constexpr int64_t bytes_of(Number number, int64_t count) {
  return count * number_bits(number) / 8;
}

// Bytes of an element of a plain format.
static constexpr int32_t element_bytes(Format format) {
  return number_bits(codec_of(format).element) / 8;
}

// Scales of a row of `dim` elements that have some.
static constexpr int32_t groups_of(const Codec& codec, int32_t dim) {
  return codec.scale == Number::kNone ? 0 : codec.group == 0 ? 1 : dim / codec.group;
}

static constexpr int64_t width(const Section& section) {
  int64_t bytes = 0;
  for (const PartSize& size : section.parts) bytes += size.bytes;
  return bytes;
}

static constexpr bool packed(Format format) { return width(info_of(format).sections[0]) > 0; }

static constexpr bool planar(Format format) { return width(info_of(format).sections[1]) > 0; }

// Where a part of a packed format's entries lies in a page, in bytes: that of the first entry, and
// how far the next is.
struct PartPlace {
  int64_t first;
  int64_t step;
};

// `entry_stride`: how far entries are apart in a plane whose format is not planar.
static constexpr PartPlace place_of(Format format, Part part, int64_t page_size,
                                    int64_t entry_stride) {
  int64_t start = 0;
  for (const Section& section : info_of(format).sections) {
    int64_t first = start;
    for (const PartSize& size : section.parts) {
      if (size.part == part) return {first, planar(format) ? width(section) : entry_stride};
      first += size.bytes;
    }
    start += page_size * width(section);
  }
  return {0, 0};
}

// Where the parts of an entry are read, or written; those that its codec lacks are not touched.
struct EntryParts {
  const char* values;
  const char* rope;
  const char* scales;
};

struct PartsToWrite {
  char* values;
  char* rope;
  char* scales;
};

}  // namespace sparse_attn
