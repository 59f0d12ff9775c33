// The rows of a call of `select`: what they may select, and what of it is scored.
#pragma once

#include <algorithm>
#include <vector>

#include "select_schedule.h"

namespace sparse_attn {

inline int64_t ceil_divide(int64_t x, int64_t by) { return x / by + (x % by != 0); }

inline int64_t round_up(int64_t x, int64_t to) { return ceil_divide(x, to) * to; }

inline int64_t size_of(const EntryRange& range) { return range.high - range.low; }

inline EntryRange common(const EntryRange& a, const EntryRange& b) {
  const int64_t low = std::max(a.low, b.low);
  return {low, std::max(low, std::min(a.high, b.high))};
}

// Rows of one sequence that are processed together.
struct Rows {
  int64_t sequence, row, position;
  int32_t rows;
};

// Rows at a token of their sequence; the others select nothing.
std::vector<Rows> cut_rows(const SelectParams& p);

// Visible entries of the last of some rows.
EntryRange last_entries(const SelectParams& p, const Rows& rows);

// Sets what rows select. `runs`: room for those of the block. False if an entry to be scored lies
// past the page table.
bool make_block(const SelectParams& p, const Rows& rows, int32_t list, int32_t lists,
                SelectBlock* block, std::vector<Run>* runs);

// The first entry without a page that the specification comes upon.
CallStatus find_unpaged(const SelectParams& p);

}  // namespace sparse_attn
