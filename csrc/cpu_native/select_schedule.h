// What a row may select and what of it is scored, and how the work of a call of `select` is cut.
// A row's arithmetic depends on its own entries only, so it has the same bits whatever its
// neighbours, its sequence's steps or the number of threads are.
#pragma once

#include "best.h"
#include "schedule.h"
#include "select.h"

namespace sparse_attn {

// Most rows that are scored together.
constexpr int32_t kMaxRows = 16;

// Most strides that an entry may cover.
constexpr int64_t kMaxStrides = 64;

// Entries [low, high), which have the places from `place` on.
struct Run {
  int64_t place;
  int64_t low, high;
};

// A row, the same for all lists of a block. A unit is what an index stands for.
struct SelectRow {
  int64_t row = 0;
  EntryRange entries = {0, 0};  // visible
  EntryRange units = {0, 0};    // selectable
  EntryRange free = {0, 0};     // of the units: not kept whatever they score
  int64_t first_kept = 0;       // kept units before the free ones
  int64_t last_kept = 0;        // and at the end of the units
  int64_t wanted = 0;           // most free units to select
  bool scored = false;
  EntryRange places = {0, 0};  // to be scored
};

// Neighbouring lists of neighbouring rows of a sequence; each list of a row is found among the same
// places. Places of scores are entries; or units, if mean keys are scored; or are counted through
// `runs`, if the row has candidates.
struct SelectBlock {
  int64_t sequence = 0;
  int32_t list = 0;  // the first
  int32_t lists = 1;
  int32_t rows = 0;
  SelectRow row[kMaxRows];
  const Run* runs = nullptr;  // null: places are not counted
  int64_t run_count = 0;
  EntryRange places = {0, 0};  // of all rows

  int64_t first_chunk() const { return places.low / kChunk; }
  int64_t chunks() const {
    return places.low < places.high ? (places.high - 1) / kChunk + 1 - first_chunk() : 0;
  }
};

// Places that are handed out to threads in ascending order, up to a multiple of `step` at a time.
struct PlaceQueue {
  EntryRange places;
  int64_t step;
  int64_t next;  // a multiple of `step`
};

static inline void open(PlaceQueue* queue, const EntryRange& places, int64_t step) {
  *queue = {places, step, places.low / step * step};
}

// The next places. False if there are none.
static inline bool take(PlaceQueue* queue, EntryRange* places) {
  const int64_t at = __atomic_fetch_add(&queue->next, queue->step, __ATOMIC_RELAXED);
  const EntryRange& all = queue->places;
  *places = {at > all.low ? at : all.low,
             at + queue->step < all.high ? at + queue->step : all.high};
  return places->low < places->high;
}

static inline bool pools(const SelectParams& p) { return p.block > 1 || p.strides > 1; }

static inline bool pools_keys(const SelectParams& p) { return pools(p) && p.pool == Pool::kMean; }

static inline int32_t heads_per_list(const SelectParams& p) { return p.heads / p.lists; }

// Where the scores of a row go.
struct RowBest {
  Best units;
  Best blocks;  // candidate blocks to return
};

// What a block needs.
struct SelectSizes {
  int64_t scratch_bytes;  // working memory of one thread
  int64_t sum_floats;     // sums of its softmax; 0: it has none
  int64_t kept_floats;    // what is kept of a chunk, so that its keys are read once
};

// The kernels of one instruction set.
struct SelectKernels {
  // Of a block with such a first list and such numbers of lists and rows.
  SelectSizes (*sizes)(const SelectParams& p, const SelectBlock& block);

  // Sets sums to those of no score.
  void (*clear)(const SelectParams& p, const SelectBlock& block, float* sums);

  // Adds those of the queue's places to sums, those of chunk i of the block i * step floats on.
  // `kept`: room for what is kept of the block, or null. False if an entry has no page.
  bool (*sum)(const SelectParams& p, const SelectBlock& block, PlaceQueue* queue, char* scratch,
              float* kept, float* sums, int64_t step);

  // Adds sums to those of earlier places.
  void (*merge)(const SelectParams& p, const SelectBlock& block, float* from, float* sums);

  // Scores the queue's places for some of the block's lists: list first_list + i of row r for
  // best[i * kMaxRows + r]. `kept`: what `sum` has left there, or null. Gives the same bits with
  // and without. False if an entry has no page.
  bool (*score)(const SelectParams& p, const SelectBlock& block, int32_t first_list, int32_t lists,
                PlaceQueue* queue, char* scratch, float* kept, const float* sums, uint64_t* spare,
                RowBest* best);

  // See best_cut.h.
  void (*cut)(Best* best, uint64_t* spare);
  void (*add_step)(Best* best, const float* scores, const int64_t* numbers);
  void (*join)(Best* best, const Best& other, uint64_t* spare);
};

extern const SelectKernels SPARSE_ATTN_ISAS(SelectKernels);

}  // namespace sparse_attn
