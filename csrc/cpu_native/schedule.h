// How the work of a call is cut. The cuts that shape arithmetic (chunks, tiles) depend on a row's
// own entries only, so a row has the same bits whatever its neighbours, its sequence's steps or the
// number of threads are.
#pragma once

#include "attend.h"

namespace sparse_attn {

// Entries attended between two merges. Index lists are cut at multiples of it in the list, ranges
// at multiples of it in the sequence.
constexpr int64_t kChunk = 512;

// Entries attended between two updates of the running maximum; a chunk's entries in the list or
// range, cut alike.
constexpr int kTile = 128;

// Most (row, head) pairs that are processed together.
constexpr int kMaxLanes = 128;

// Lanes that share their KV head and the entries they may see: heads of one row, or of several rows
// of a sequence.
struct Block {
  int64_t sequence = 0;
  int64_t row = 0;  // first query row
  int32_t rows = 0;
  int64_t position = 0;  // token position of the first row
  int32_t head = 0;      // first query head
  int32_t heads = 0;
  int32_t kv_head = 0;
  int32_t index_head = 0;           // of the main plane's index list
  int64_t first_chunk[2] = {0, 0};  // of the window plane, and of the main plane
  int64_t chunks[2] = {0, 0};
};

static inline int32_t lanes_of(const Block& block) { return block.rows * block.heads; }

// Groups of heads that share their KV head and index list, in order of heads.
static inline int32_t groups(const AttendParams& p) {
  const int32_t index_heads = p.main.listed ? static_cast<int32_t>(p.main.index_heads) : 1;
  return index_heads > p.kv_heads ? index_heads : p.kv_heads;
}

static inline int32_t heads_per_group(const AttendParams& p) { return p.heads / groups(p); }

struct EntryRange {
  int64_t low, high;
};

// Visible entries of a row at token position `position`, in a sequence of `length` tokens.
static inline EntryRange visible_range(const PlaneParams& plane, bool causal, int64_t row,
                                       int64_t position, int64_t length) {
  EntryRange range;
  if (plane.range) {
    range = {plane.range[2 * row], plane.range[2 * row + 1]};
  } else {
    const int64_t tokens = causal ? position + 1 : length;
    range = {plane.window > 0 ? tokens - plane.window : 0, tokens / plane.ratio};
  }
  if (range.low < 0) range.low = 0;
  if (range.high < range.low) range.high = range.low;
  return range;
}

// Entries that a row's index list names, unseen ones included.
static inline int64_t listed_entries(const PlaneParams& plane, int64_t row, int64_t index_head) {
  int64_t count = plane.selected;
  if (plane.counts) {
    const int64_t given = plane.counts[row * plane.index_heads + index_head];
    count = given < 0 ? 0 : given < count ? given : count;
  }
  return count * plane.select_block;
}

// Calls visit(run) for the runs of entries in `range` that kChunk places of a row's index list
// name, from place `begin` on, in the order of the list, until a visit is false. False if one is.
template <class Visit>
static inline bool visit_listed(const PlaneParams& plane, int64_t row, int64_t index_head,
                                int64_t begin, const EntryRange& range, const Visit& visit) {
  int64_t end = listed_entries(plane, row, index_head);
  if (end > begin + kChunk) end = begin + kChunk;
  const int64_t* strides = plane.index_strides;
  const int32_t* indices = plane.indices + row * strides[0] + index_head * strides[1];
  const int64_t size = plane.select_block;
  int64_t j = begin / size;
  for (int64_t place = begin, skipped = begin - j * size; place < end; ++j, skipped = 0) {
    const int64_t index = indices[j * strides[2]];
    EntryRange run = {index * size + skipped, index * size + size};
    if (run.high - run.low > end - place) run.high = run.low + end - place;
    place += run.high - run.low;
    if (index < 0) continue;
    if (run.low < range.low) run.low = range.low;
    if (run.high > range.high) run.high = range.high;
    if (run.low < run.high && !visit(run)) return false;
  }
  return true;
}

// The kernels of one instruction set.
struct Kernels {
  // Whether it takes longer to read keys again, for another part of the heads, than to merge what
  // chunks leave.
  bool reads_once;

  // Bytes of working memory for one thread, and floats of one partial result of a block of `lanes`
  // lanes.
  int64_t (*scratch_bytes)(const AttendParams& p, int32_t lanes);
  int64_t (*partial_floats)(const AttendParams& p, int32_t lanes);

  // Attends chunks [begin, end) of a block. Without `partials` merges them and writes the block's
  // out and lse, else leaves the partial result of each chunk there. Returns false if an entry has
  // no page.
  bool (*attend)(const AttendParams& p, const Block& block, int64_t begin, int64_t end,
                 char* scratch, float* partials);

  // Merges partial results in order, and writes the block's out and lse. Overwrites the first.
  void (*merge)(const AttendParams& p, const Block& block, int64_t count, float* partials);
};

extern const Kernels SPARSE_ATTN_ISAS(Kernels);

}  // namespace sparse_attn
