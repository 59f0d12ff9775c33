#include "select_rows.h"

namespace sparse_attn {
namespace {

bool scores_all(const SelectParams& p) { return p.has_values || p.candidate_k > 0 || p.by_score; }

// Visible entries in the row's candidate blocks, ascending.
std::vector<Run> candidate_runs(const SelectParams& p, int64_t row, int32_t list,
                                const EntryRange& entries) {
  const int64_t* strides = p.candidate_strides;
  const int32_t* from =
      p.candidates + row * strides[0] + (p.candidate_heads > 1 ? list : 0) * strides[1];
  std::vector<int64_t> blocks;
  for (int64_t i = 0; i < p.candidate_count; ++i) {
    const int64_t block = from[i * strides[2]];
    if (block >= 0 && block <= entries.high / p.candidate_block) blocks.push_back(block);
  }
  std::sort(blocks.begin(), blocks.end());
  blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  std::vector<Run> runs;
  int64_t place = 0;
  for (int64_t block : blocks) {
    const EntryRange run =
        common(entries, {block * p.candidate_block, (block + 1) * p.candidate_block});
    if (size_of(run) == 0) continue;
    if (!runs.empty() && runs.back().high == run.low) {
      runs.back().high = run.high;
    } else {
      runs.push_back({place, run.low, run.high});
    }
    place += size_of(run);
  }
  return runs;
}

// What the row at token position `position` may select. `runs`: its candidates, if it has some.
SelectRow make_row(const SelectParams& p, int64_t b, int64_t t, int64_t position,
                   const std::vector<Run>* runs, const EntryRange& entries) {
  SelectRow row;
  row.row = t;
  row.entries = entries;
  const int64_t tokens = p.causal ? position + 1 : p.seq_lens[b];
  const int64_t first = entries.low / p.block;
  const int64_t covered =
      size_of(entries) > 0 ? ceil_divide(entries.high + p.strides - 1, p.block) : first;
  const int64_t last =
      p.tail == Tail::kNone ? covered : ceil_divide(ceil_divide(tokens, p.keys.ratio), p.block);
  row.units = {first, std::max(covered, last)};
  const int64_t tail = row.units.high - covered;

  int64_t budget = p.row_k ? std::min<int64_t>(std::max(p.row_k[t], 0), p.k) : p.k;
  budget = std::max<int64_t>(budget - (p.tail == Tail::kReserved && tail == 0), 0);
  const int64_t newest = std::min(std::max(p.keep_last, tail), size_of(row.units));
  const int64_t oldest = std::min(p.keep_first, size_of(row.units) - newest);
  row.last_kept = std::min(newest, budget);
  row.first_kept = std::min(oldest, budget - row.last_kept);
  row.free = {row.units.low + row.first_kept, row.units.high - row.last_kept};
  row.wanted = budget - row.first_kept - row.last_kept;

  int64_t others = size_of(row.free), places = 0;
  if (runs) {
    others = 0;
    for (const Run& run : *runs) others += size_of(common({run.low, run.high}, row.free));
    places = runs->empty() ? 0 : runs->back().place + runs->back().high - runs->back().low;
  }
  if (!scores_all(p) && others <= row.wanted) return row;
  row.places = runs ? EntryRange{0, places} : pools_keys(p) ? EntryRange{first, covered} : entries;
  row.scored = true;
  return row;
}

// Visible entries of a row.
EntryRange entries_of(const SelectParams& p, int64_t b, int64_t t, int64_t position) {
  EntryRange range;
  if (p.keys.range) {
    range = {p.keys.range[2 * t], p.keys.range[2 * t + 1]};
  } else {
    const int64_t tokens = p.causal ? position + 1 : p.seq_lens[b];
    range = {0, tokens / p.keys.ratio - p.strides + 1};
  }
  range.low = std::max<int64_t>(range.low, 0);
  range.high = std::max(range.high, range.low);
  return range;
}

bool lists_agree(const SelectParams& p) { return !p.takes_candidates && !pools_keys(p); }

}  // namespace

std::vector<Rows> cut_rows(const SelectParams& p) {
  const int64_t most =
      lists_agree(p) ? std::min<int64_t>(std::max(kMaxLanes / heads_per_list(p), 1), kMaxRows) : 1;
  std::vector<Rows> result;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t begin = p.cu_seqlens_q[b], end = p.cu_seqlens_q[b + 1];
    int64_t row = end - p.seq_lens[b];  // stands at position 0
    row = std::min(std::max(row, begin), end);
    for (; row < end; row += most) {
      const int64_t rows = std::min(end - row, most);
      result.push_back({b, row, p.seq_lens[b] - (end - row), static_cast<int32_t>(rows)});
    }
  }
  return result;
}

EntryRange last_entries(const SelectParams& p, const Rows& rows) {
  const int64_t last = rows.rows - 1;
  return entries_of(p, rows.sequence, rows.row + last, rows.position + last);
}

bool make_block(const SelectParams& p, const Rows& rows, int32_t list, int32_t lists,
                SelectBlock* block, std::vector<Run>* runs) {
  *block = {};
  block->sequence = rows.sequence;
  block->list = list;
  block->lists = lists;
  block->rows = rows.rows;
  int64_t last_entry = -1;
  EntryRange places = {INT64_MAX, 0};
  for (int32_t r = 0; r < rows.rows; ++r) {
    const int64_t row = rows.row + r, position = rows.position + r;
    const EntryRange entries = entries_of(p, rows.sequence, row, position);
    if (p.takes_candidates) *runs = candidate_runs(p, row, list, entries);
    const SelectRow made =
        make_row(p, rows.sequence, row, position, p.takes_candidates ? runs : nullptr, entries);
    block->row[r] = made;
    if (size_of(made.places) == 0) continue;
    places.low = std::min(places.low, made.places.low);
    places.high = std::max(places.high, made.places.high);
    last_entry =
        std::max(last_entry, p.takes_candidates ? runs->back().high - 1 : entries.high - 1);
  }
  block->runs = p.takes_candidates ? runs->data() : nullptr;
  block->run_count = static_cast<int64_t>(runs->size());
  if (places.high == 0) return true;
  block->places = places;
  return last_entry < p.keys.max_pages * p.keys.page_size;
}

CallStatus find_unpaged(const SelectParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t begin = p.cu_seqlens_q[b], end = p.cu_seqlens_q[b + 1];
    const int32_t* table = p.keys.page_table + b * p.keys.page_table_stride;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t position = p.seq_lens[b] - (end - t);
      for (int32_t list = 0; position >= 0 && list < p.lists; ++list) {
        SelectBlock block;
        std::vector<Run> runs;
        const bool paged = make_block(p, {b, t, position, 1}, list, 1, &block, &runs);
        const SelectRow& row = block.row[0];
        if (size_of(row.places) == 0) continue;
        if (!p.takes_candidates) runs = {{0, row.entries.low, row.entries.high}};
        if (!paged) return {CallError::kEntryUnpaged, false, {runs.back().high - 1, b}};
        for (const Run& run : runs) {
          for (int64_t column = run.low / p.keys.page_size; column * p.keys.page_size < run.high;
               ++column) {
            const int64_t page = table[column];
            if (page < 0 || page >= p.keys.pages)
              return {CallError::kPageOutside, false, {b, page}};
          }
        }
      }
    }
  }
  return {};
}

}  // namespace sparse_attn
