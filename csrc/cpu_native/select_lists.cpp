#include "select_lists.h"

#include <math.h>

#include <functional>

namespace sparse_attn {
namespace {

// Nothing after the first `count` units and the first `blocks` candidate blocks of a list.
void end_list(const SelectParams& p, int64_t at, int64_t count, int64_t blocks) {
  p.counts[at] = static_cast<int32_t>(count);
  std::fill_n(p.indices + at * p.k + count, p.k - count, -1);
  if (p.values) std::fill_n(p.values + at * p.k + count, p.k - count, -INFINITY);
  if (!p.candidate_blocks) return;
  std::fill_n(p.candidate_blocks + at * p.candidate_k + blocks, p.candidate_k - blocks, -1);
}

void empty_lists(const SelectParams& p, int64_t first_row, int64_t end_row) {
  for (int64_t at = first_row * p.lists; at < end_row * p.lists; ++at) end_list(p, at, 0, 0);
}

// Units of a list and their scores, one after the other.
class ListWriter {
 public:
  ListWriter(const SelectParams& p, int64_t at)
      : indices_(p.indices + at * p.k), values_(p.values ? p.values + at * p.k : nullptr) {}

  void put(const EntryRange& units, float value) {
    for (int64_t unit = units.low; unit < units.high; ++unit)
      indices_[count_ + unit - units.low] = static_cast<int32_t>(unit);
    if (values_) std::fill_n(values_ + count_, size_of(units), value);
    count_ += size_of(units);
  }

  void put(const uint64_t* ranks, int64_t size) {
    for (int64_t i = 0; i < size; ++i)
      indices_[count_ + i] = static_cast<int32_t>(number_of(ranks[i]));
    for (int64_t i = 0; values_ && i < size; ++i) values_[count_ + i] = score_of(ranks[i]);
    count_ += size;
  }

  int64_t count() const { return count_; }

 private:
  int32_t* const indices_;
  float* const values_;
  int64_t count_ = 0;
};

}  // namespace

void empty_others(const SelectParams& p, const std::vector<Rows>& rows) {
  int64_t next = 0;
  for (const Rows& one : rows) {
    empty_lists(p, next, one.row);
    next = one.row + one.rows;
  }
  empty_lists(p, next, p.tokens);
}

void write_list(const SelectParams& p, const SelectBlock& block, int32_t list, int32_t r,
                const RowBest& best) {
  const SelectRow& row = block.row[r];
  const int64_t at = row.row * p.lists + block.list + list;
  const EntryRange first = {row.units.low, row.free.low}, last = {row.free.high, row.units.high};
  const uint64_t* ranks = best.units.ranks;
  const int64_t size = best.units.size;
  ListWriter writer(p, at);
  if (p.by_score) {
    std::vector<uint64_t> sorted(ranks, ranks + size);
    for (const EntryRange& kept : {first, last}) {
      for (int64_t unit = kept.low; unit < kept.high; ++unit)
        sorted.push_back(ranked(INFINITY, unit));
    }
    std::sort(sorted.begin(), sorted.end(), std::greater<uint64_t>());
    writer.put(sorted.data(), static_cast<int64_t>(sorted.size()));
  } else {
    writer.put(first, INFINITY);
    if (row.scored) {
      writer.put(ranks, size);
    } else if (p.takes_candidates) {
      for (int64_t i = 0; i < block.run_count; ++i)
        writer.put(common({block.runs[i].low, block.runs[i].high}, row.free), 0);
    } else {
      writer.put(row.free, 0);
    }
    writer.put(last, INFINITY);
  }
  int64_t blocks = 0;
  if (p.candidate_blocks && size_of(row.units) > 0) {
    int32_t* to = p.candidate_blocks + at * p.candidate_k;
    for (; blocks < best.blocks.size; ++blocks)
      to[blocks] = static_cast<int32_t>(number_of(best.blocks.ranks[blocks]));
    to[blocks++] = static_cast<int32_t>((row.units.high - 1) / p.candidate_block);
  }
  end_list(p, at, writer.count(), blocks);
}

}  // namespace sparse_attn
