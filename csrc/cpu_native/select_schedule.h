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

// One row's list. A unit is what an index stands for.
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

// Lists of the same number of neighbouring rows of a sequence. Places of scores are entries; or
// units, if mean keys are scored; or are counted through `runs`, if the row has candidates.
struct SelectBlock {
  int64_t sequence = 0;
  int32_t list = 0;
  int32_t rows = 0;
  SelectRow row[kMaxRows];
  const Run* runs = nullptr;  // null: places are not counted
  int64_t run_count = 0;
  EntryRange places = {0, 0};  // of all rows
};

static inline bool pools(const SelectParams& p) { return p.block > 1 || p.strides > 1; }

static inline bool pools_keys(const SelectParams& p) { return pools(p) && p.pool == Pool::kMean; }

static inline int32_t heads_per_list(const SelectParams& p) { return p.heads / p.lists; }

// Where the scores of a row go.
struct RowBest {
  Best units;
  Best blocks;  // candidate blocks to return
};

// The kernels of one instruction set.
struct SelectKernels {
  // Bytes of working memory for one thread and blocks of at most `rows` rows, and floats of the
  // running sums of a block's softmax.
  int64_t (*scratch_bytes)(const SelectParams& p, int32_t rows);
  int64_t (*sum_floats)(const SelectParams& p, int32_t rows);

  // Sets the running sums to those of no score.
  void (*clear)(const SelectParams& p, const SelectBlock& block, float* sums);

  // Adds chunks [begin, end) of places to the running sums. False if an entry has no page.
  bool (*sum)(const SelectParams& p, const SelectBlock& block, int64_t begin, int64_t end,
              char* scratch, float* sums);

  // Adds running sums to those of earlier places.
  void (*merge)(const SelectParams& p, const SelectBlock& block, float* from, float* sums);

  // Scores chunks [begin, end) of places. False if an entry has no page.
  bool (*score)(const SelectParams& p, const SelectBlock& block, int64_t begin, int64_t end,
                char* scratch, float* sums, uint64_t* spare, RowBest* best);
};

extern const SelectKernels kPortableSelectKernels;
#if defined(__x86_64__)
extern const SelectKernels kAvx2SelectKernels;
extern const SelectKernels kAvx512SelectKernels;
extern const SelectKernels kAvx512Bf16SelectKernels;
#endif

}  // namespace sparse_attn
