// Why a call with packed query rows over paged planes is refused.
#pragma once

#include <stdint.h>

namespace sparse_attn {

enum class CallError : int32_t {
  kNone,
  kFirstStart,    // cu_seqlens_q[0] is values[0]
  kLastStart,     // cu_seqlens_q[B] is values[0], beyond T
  kDescending,    // cu_seqlens_q descends
  kTooManyRows,   // a sequence has values[0] rows, more than max_seqlen_q
  kTooLong,       // a sequence has values[0] tokens, more than max_seq_len
  kEntryUnpaged,  // entry values[0] of sequence values[1] lies past the page table
  kPageOutside,   // sequence values[0] uses page values[1], which the plane lacks
  kNoPosition,    // position values[0] has no row of cosines
  kFewEntries,    // the step completes values[0] entries
};

constexpr const char* kCallErrorNames[] = {
    "none",     "first_start",   "last_start",   "descending",  "too_many_rows",
    "too_long", "entry_unpaged", "page_outside", "no_position", "few_entries",
};

struct CallStatus {
  CallError error = CallError::kNone;
  bool in_window = false;  // page errors are about the second plane: window or state
  int64_t values[2] = {0, 0};
};

// Of the parameters of any op with packed query rows.
template <class Params>
static inline CallStatus check_lengths(const Params& p) {
  const int32_t* starts = p.cu_seqlens_q;
  if (starts[0] != 0) return {CallError::kFirstStart, false, {starts[0], 0}};
  if (starts[p.batch] > p.tokens) return {CallError::kLastStart, false, {starts[p.batch], 0}};
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t rows = static_cast<int64_t>(starts[b + 1]) - starts[b];
    if (rows < 0) return {CallError::kDescending, false, {0, 0}};
    if (rows > p.max_seqlen_q) return {CallError::kTooManyRows, false, {rows, 0}};
    if (p.seq_lens[b] > p.max_seq_len) return {CallError::kTooLong, false, {p.seq_lens[b], 0}};
  }
  return {};
}

}  // namespace sparse_attn
