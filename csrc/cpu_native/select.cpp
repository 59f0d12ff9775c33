#include "select.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <vector>

#include "memory.h"
#include "parallel.h"
#include "select_schedule.h"

namespace sparse_attn {
namespace {

// Products of elements below which starting threads costs more than they save.
constexpr int64_t kLeastWork = 1 << 21;

int64_t ceil_divide(int64_t x, int64_t by) { return x / by + (x % by != 0); }

int64_t size_of(const EntryRange& range) { return range.high - range.low; }

EntryRange common(const EntryRange& a, const EntryRange& b) {
  const int64_t low = std::max(a.low, b.low);
  return {low, std::max(low, std::min(a.high, b.high))};
}

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

// A block of lists and the memory that is found out for it.
struct Work {
  SelectBlock block;
  std::vector<Run> runs;
  int64_t first_chunk = 0, chunks = 0;
};

// Blocks of the same rows, whose lists are found among the same places. They take turns, chunk by
// chunk: what one has read of a page is in a cache when the next reads its own heads there.
struct Group {
  std::vector<Work> works;
  int32_t parts = 1;
  std::atomic<int32_t> open_parts{1};
  int64_t first_part = 0, first_sum = 0;

  int64_t first_chunk() const { return works[0].first_chunk; }
  int64_t chunks() const { return works[0].chunks; }
};

// Most memory for the best of a group's lists.
constexpr int64_t kGroupBytes = 1 << 22;

bool lists_agree(const SelectParams& p) { return !p.takes_candidates && !pools_keys(p); }

// Sets what the block's rows select. False if an entry to be scored lies past the page table.
bool make_block(const SelectParams& p, int64_t sequence, int64_t row, int64_t position,
                int32_t rows, int32_t list, Work* work) {
  SelectBlock& block = work->block;
  block.sequence = sequence;
  block.list = list;
  block.rows = rows;
  int64_t last_entry = -1;
  EntryRange places = {INT64_MAX, 0};
  for (int32_t r = 0; r < rows; ++r) {
    const EntryRange entries = entries_of(p, sequence, row + r, position + r);
    if (p.takes_candidates) work->runs = candidate_runs(p, row, list, entries);
    const SelectRow made = make_row(p, sequence, row + r, position + r,
                                    p.takes_candidates ? &work->runs : nullptr, entries);
    block.row[r] = made;
    if (size_of(made.places) == 0) continue;
    places.low = std::min(places.low, made.places.low);
    places.high = std::max(places.high, made.places.high);
    last_entry =
        std::max(last_entry, p.takes_candidates ? work->runs.back().high - 1 : entries.high - 1);
  }
  block.runs = p.takes_candidates ? work->runs.data() : nullptr;
  block.run_count = static_cast<int64_t>(work->runs.size());
  work->first_chunk = work->chunks = 0;
  if (places.high == 0) return true;
  work->first_chunk = places.low / kChunk;
  work->chunks = ceil_divide(places.high, kChunk) - work->first_chunk;
  return last_entry < p.keys.max_pages * p.keys.page_size;
}

// Chunks at whose multiples a block may be cut, so that no unit is; 0: nowhere.
int64_t chunks_between_cuts(const SelectParams& p) {
  int64_t chunks = 1;
  for (int64_t unit :
       {pools(p) && !pools_keys(p) ? p.block : 1, p.candidate_k > 0 ? p.candidate_block : 1}) {
    if (p.strides > 1 || (kChunk % unit != 0 && unit % kChunk != 0)) return 0;
    chunks = std::max(chunks, unit / kChunk);
  }
  return chunks;
}

// The first entry without a page that the specification comes upon.
CallStatus find_unpaged(const SelectParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t begin = p.cu_seqlens_q[b], end = p.cu_seqlens_q[b + 1];
    const int32_t* table = p.keys.page_table + b * p.keys.page_table_stride;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t position = p.seq_lens[b] - (end - t);
      for (int32_t list = 0; position >= 0 && list < p.lists; ++list) {
        Work work;
        const bool paged = make_block(p, b, t, position, 1, list, &work);
        const SelectRow& row = work.block.row[0];
        if (size_of(row.places) == 0) continue;
        if (!p.takes_candidates) work.runs = {{0, row.entries.low, row.entries.high}};
        if (!paged) return {CallError::kEntryUnpaged, false, {work.runs.back().high - 1, b}};
        for (const Run& run : work.runs) {
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

// Rows of one sequence that are processed together.
struct Rows {
  int64_t sequence, row, position;
  int32_t rows;
};

void fill_empty(const SelectParams& p, int64_t begin, int64_t end) {
  for (int64_t i = begin * p.lists; i < end * p.lists; ++i) {
    p.counts[i] = 0;
    std::fill_n(p.indices + i * p.k, p.k, -1);
    if (p.values) std::fill_n(p.values + i * p.k, p.k, -INFINITY);
    if (p.candidate_blocks) std::fill_n(p.candidate_blocks + i * p.candidate_k, p.candidate_k, -1);
  }
}

std::vector<Rows> cut_rows(const SelectParams& p) {
  const int64_t most =
      lists_agree(p) ? std::min<int64_t>(std::max(kMaxLanes / heads_per_list(p), 1), kMaxRows) : 1;
  std::vector<Rows> result;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t begin = p.cu_seqlens_q[b], end = p.cu_seqlens_q[b + 1];
    int64_t row = end - p.seq_lens[b];  // stands at position 0
    row = std::min(std::max(row, begin), end);
    fill_empty(p, begin, row);
    for (; row < end; row += most) {
      const int64_t rows = std::min(end - row, most);
      result.push_back({b, row, p.seq_lens[b] - (end - row), static_cast<int32_t>(rows)});
    }
  }
  return result;
}

class Call {
 public:
  explicit Call(const SelectParams& p)
      : p_(p),
        kernels_(SPARSE_ATTN_KERNELS_FOR(p.isa, SelectKernels)),
        rows_(cut_rows(p)),
        threads_(has_work_for_threads() ? p.threads : 1) {
    for (const Rows& rows : rows_) most_rows_ = std::max(most_rows_, rows.rows);
    // No list has more units than entries have pages, but for one at either end.
    const int64_t entries = p.keys.max_pages * p.keys.page_size;
    unit_words_ = best_words(p.k, entries + 2 * p.strides);
    block_words_ = p.candidate_k > 0 ? best_words(p.candidate_k, entries + 1) : 0;
    spare_words_ = std::max(unit_words_, block_words_);
    scratch_bytes_ = kernels_.scratch_bytes(p, most_rows_);
    sum_floats_ = kernels_.sum_floats(p, most_rows_);
    const bool same_places = !p.takes_candidates || p.candidate_heads == 1;
    if (same_places && chunks_between_cuts(p) > 0)
      group_ = static_cast<int32_t>(
          std::min<int64_t>(p.lists, std::max<int64_t>(kGroupBytes / best_bytes(), 1)));
  }

  // False if an entry has no page.
  bool run() {
    const int64_t items = static_cast<int64_t>(rows_.size()) * groups_of_rows();
    if (items == 0) return true;
    if (threads_ == 1 || items >= 4 * threads_ || chunks_between_cuts(p_) == 0) {
      run_whole(items);
    } else {
      run_parts(items);
    }
    return !failed_;
  }

 private:
  // Whether the call multiplies at least kLeastWork elements, by what its ranges admit.
  bool has_work_for_threads() const {
    int64_t work = 0;
    for (const Rows& rows : rows_) {
      const int64_t last = rows.rows - 1;
      const EntryRange entries =
          entries_of(p_, rows.sequence, rows.row + last, rows.position + last);
      work += rows.rows * size_of(entries) * p_.heads * p_.dim;
      if (work >= kLeastWork) return true;
    }
    return false;
  }

  int64_t best_bytes() const { return most_rows_ * (unit_words_ + block_words_) * 8; }

  int64_t worker_bytes() const { return (scratch_bytes_ + spare_words_ * 8 + 63) / 64 * 64; }

  static char* aligned(char* at) { return at + (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64; }

  int64_t groups_of_rows() const { return ceil_divide(p_.lists, group_); }

  // Item i: groups of the same rows follow each other. Long rows first. False if an entry has no
  // page.
  bool make(int64_t item, Group* group) const {
    const int64_t each = groups_of_rows();
    const Rows& rows = rows_[rows_.size() - 1 - static_cast<size_t>(item / each)];
    const int32_t first = static_cast<int32_t>(item % each) * group_;
    group->works.resize(static_cast<size_t>(std::min(group_, p_.lists - first)));
    bool paged = true;
    for (size_t i = 0; i < group->works.size(); ++i) {
      paged = make_block(p_, rows.sequence, rows.row, rows.position, rows.rows,
                         first + static_cast<int32_t>(i), &group->works[i]) &&
              paged;
    }
    return paged;
  }

  // Calls visit(i, from, to) for work i of the group and chunks [from, to) of [begin, end) until
  // one is false.
  template <class Visit>
  bool for_chunks(const Group& group, int64_t begin, int64_t end, const Visit& visit) const {
    const int64_t step = group.works.size() > 1 ? chunks_between_cuts(p_) : end - begin;
    for (int64_t from = begin; from < end;) {
      const int64_t to = std::min(from / step * step + step, end);
      for (size_t i = 0; i < group.works.size(); ++i) {
        if (!visit(i, from, to)) return false;
      }
      from = to;
    }
    return true;
  }

  // The best of work i, of a group or of a part of one.
  RowBest* best_of(std::vector<RowBest>* best, int64_t group, size_t i) const {
    return &(*best)[(static_cast<size_t>(group * group_) + i) * kMaxRows];
  }

  void open_best(const Group& group, char* memory, std::vector<RowBest>* best, int64_t at) const {
    auto* words = reinterpret_cast<uint64_t*>(memory);
    for (size_t i = 0; i < group.works.size(); ++i) {
      RowBest* to = best_of(best, at, i);
      const SelectBlock& block = group.works[i].block;
      for (int32_t r = 0; r < block.rows; ++r) {
        open(&to[r].units, words, unit_words_, block.row[r].wanted);
        words += unit_words_;
        open(&to[r].blocks, words, block_words_, std::max<int64_t>(p_.candidate_k - 1, 0));
        words += block_words_;
      }
    }
  }

  void run_whole(int64_t items) {
    const int64_t sums = (group_ * sum_floats_ * 4 + 63) / 64 * 64;
    const int64_t bytes = worker_bytes() + sums + (group_ * best_bytes() + 63) / 64 * 64;
    char* memory = thread_memory(0, bytes * threads_);
    std::vector<Group> groups(static_cast<size_t>(threads_));
    std::vector<RowBest> best(static_cast<size_t>(threads_ * group_) * kMaxRows);
    parallel_for(items, threads_, [&](int64_t item, int32_t worker) {
      if (failed_.load(std::memory_order_relaxed)) return;
      char* scratch = memory + worker * bytes;
      auto* spare = reinterpret_cast<uint64_t*>(scratch + scratch_bytes_);
      auto* running = reinterpret_cast<float*>(scratch + worker_bytes());
      Group& group = groups[static_cast<size_t>(worker)];
      bool paged = make(item, &group);
      const int64_t begin = group.first_chunk(), end = begin + group.chunks();
      const auto block_of = [&](size_t i) -> const SelectBlock& { return group.works[i].block; };
      const auto sums_of = [&](size_t i) {
        return running + static_cast<int64_t>(i) * sum_floats_;
      };
      open_best(group, scratch + worker_bytes() + sums, &best, worker);
      if (paged && sum_floats_ > 0) {
        for (size_t i = 0; i < group.works.size(); ++i) kernels_.clear(p_, block_of(i), sums_of(i));
        paged = for_chunks(group, begin, end, [&](size_t i, int64_t from, int64_t to) {
          return kernels_.sum(p_, block_of(i), from, to, scratch, sums_of(i));
        });
      }
      paged = paged && for_chunks(group, begin, end, [&](size_t i, int64_t from, int64_t to) {
                return kernels_.score(p_, block_of(i), from, to, scratch, sums_of(i), spare,
                                      best_of(&best, worker, i));
              });
      if (!paged) {
        failed_ = true;
        return;
      }
      for (size_t i = 0; i < group.works.size(); ++i) {
        for (int32_t r = 0; r < block_of(i).rows; ++r)
          write(group.works[i], r, best_of(&best, worker, i) + r, spare);
      }
    });
  }

  // Cuts the places of each group into parts for the sake of threads.
  void run_parts(int64_t items) {
    std::vector<Group> groups(static_cast<size_t>(items));
    struct Part {
      Group* group;
      int64_t begin, end;  // chunks
    };
    std::vector<Part> parts;
    int64_t chunks = 0;
    for (int64_t item = 0; item < items; ++item) {
      if (!make(item, &groups[static_cast<size_t>(item)])) {
        failed_ = true;
        return;
      }
      chunks += groups[static_cast<size_t>(item)].chunks();
    }
    const int64_t grain = chunks_between_cuts(p_);
    const int64_t each = ceil_divide(chunks / (4 * threads_) + 1, grain) * grain;
    int64_t sums = 0;
    for (Group& group : groups) {
      group.first_part = static_cast<int64_t>(parts.size());
      group.first_sum = sums;
      const int64_t end = group.first_chunk() + group.chunks();
      int64_t begin = group.first_chunk();
      do {
        const int64_t next = std::min(begin / each * each + each, end);
        parts.push_back({&group, begin, next});
        begin = next;
      } while (begin < end);
      group.parts = static_cast<int32_t>(static_cast<int64_t>(parts.size()) - group.first_part);
      group.open_parts = group.parts;
      sums += (group.chunks() + 1) * group_;
    }
    const int64_t count = static_cast<int64_t>(parts.size());
    const int64_t worker = worker_bytes();
    char* scratch = thread_memory(0, worker * threads_);
    const int64_t sum_bytes = (sums * sum_floats_ * 4 + 63) / 64 * 64;
    const int64_t part_bytes = group_ * best_bytes();
    char* memory = thread_memory(1, sum_bytes + count * part_bytes);
    auto* all_sums = reinterpret_cast<float*>(memory);
    std::vector<RowBest> best(static_cast<size_t>(count * group_) * kMaxRows);
    // Running sums of work i, then those of each of its chunks.
    const auto sums_of = [&](const Group* group, size_t i, int64_t place) {
      const int64_t at = static_cast<int64_t>(i) * (group->chunks() + 1) + place;
      return all_sums + (group->first_sum + at) * sum_floats_;
    };

    if (sum_floats_ > 0) {
      parallel_for(count, threads_, [&](int64_t n, int32_t w) {
        const Part& part = parts[static_cast<size_t>(n)];
        Group* group = part.group;
        if (failed_.load(std::memory_order_relaxed)) return;
        for (int64_t chunk = part.begin; chunk < part.end; ++chunk) {
          for (size_t i = 0; i < group->works.size(); ++i) {
            const SelectBlock& block = group->works[i].block;
            float* to = sums_of(group, i, 1 + chunk - group->first_chunk());
            kernels_.clear(p_, block, to);
            if (!kernels_.sum(p_, block, chunk, chunk + 1, scratch + w * worker, to))
              failed_ = true;
          }
        }
        if (group->open_parts.fetch_sub(1) != 1) return;
        for (size_t i = 0; i < group->works.size(); ++i) {
          const SelectBlock& block = group->works[i].block;
          float* running = sums_of(group, i, 0);
          kernels_.clear(p_, block, running);
          for (int64_t c = 0; c < group->chunks(); ++c)
            kernels_.merge(p_, block, sums_of(group, i, 1 + c), running);
        }
        group->open_parts = group->parts;
      });
    }
    parallel_for(count, threads_, [&](int64_t n, int32_t w) {
      const Part& part = parts[static_cast<size_t>(n)];
      Group* group = part.group;
      if (failed_.load(std::memory_order_relaxed)) return;
      char* own = scratch + w * worker;
      auto* spare = reinterpret_cast<uint64_t*>(own + scratch_bytes_);
      open_best(*group, memory + sum_bytes + n * part_bytes, &best, n);
      if (!for_chunks(*group, part.begin, part.end, [&](size_t i, int64_t from, int64_t to) {
            return kernels_.score(p_, group->works[i].block, from, to, own, sums_of(group, i, 0),
                                  spare, best_of(&best, n, i));
          })) {
        failed_ = true;
        return;
      }
      if (group->open_parts.fetch_sub(1) != 1) return;
      for (size_t i = 0; i < group->works.size(); ++i) {
        for (int32_t r = 0; r < group->works[i].block.rows; ++r) join_parts(*group, i, r, &best);
      }
    });
  }

  // Writes row r of work i from the best of all parts.
  void join_parts(const Group& group, size_t i, int32_t r, std::vector<RowBest>* best) const {
    RowBest joined = best_of(best, group.first_part, i)[r];
    std::vector<uint64_t> units, blocks;
    for (int32_t n = 0; n < group.parts; ++n) {
      const RowBest& one = best_of(best, group.first_part + n, i)[r];
      units.insert(units.end(), one.units.ranks, one.units.ranks + one.units.size);
      blocks.insert(blocks.end(), one.blocks.ranks, one.blocks.ranks + one.blocks.size);
    }
    std::vector<uint64_t> room(std::max(units.size(), blocks.size()));
    joined.units.ranks = units.data();
    joined.units.size = static_cast<int64_t>(units.size());
    joined.blocks.ranks = blocks.data();
    joined.blocks.size = static_cast<int64_t>(blocks.size());
    write(group.works[i], r, &joined, room.data());
  }

  // Writes the outputs of one row.
  void write(const Work& work, int32_t r, RowBest* best, uint64_t* spare) const {
    const SelectRow& row = work.block.row[r];
    const int64_t at = row.row * p_.lists + work.block.list;
    fill_empty_list(at);
    int32_t* const indices = p_.indices + at * p_.k;
    float* const values = p_.values ? p_.values + at * p_.k : nullptr;
    int64_t count = 0;
    const auto put = [&](int64_t unit, float value) {
      indices[count] = static_cast<int32_t>(unit);
      if (values) values[count] = value;
      ++count;
    };
    cut(&best->units, spare);
    const uint64_t* ranks = best->units.ranks;
    const int64_t found = best->units.size;
    if (p_.by_score) {
      std::vector<uint64_t> sorted(ranks, ranks + found);
      for (int64_t u = row.units.low; u < row.free.low; ++u) sorted.push_back(ranked(INFINITY, u));
      for (int64_t u = row.free.high; u < row.units.high; ++u)
        sorted.push_back(ranked(INFINITY, u));
      std::sort(sorted.begin(), sorted.end(), std::greater<uint64_t>());
      for (uint64_t rank : sorted) put(number_of(rank), score_of(rank));
    } else {
      for (int64_t u = row.units.low; u < row.free.low; ++u) put(u, INFINITY);
      if (row.scored) {
        for (int64_t i = 0; i < found; ++i) put(number_of(ranks[i]), score_of(ranks[i]));
      } else if (p_.takes_candidates) {
        for (const Run& run : work.runs) {
          const EntryRange range = common({run.low, run.high}, row.free);
          for (int64_t u = range.low; u < range.high; ++u) put(u, 0);
        }
      } else {
        for (int64_t u = row.free.low; u < row.free.high; ++u) put(u, 0);
      }
      for (int64_t u = row.free.high; u < row.units.high; ++u) put(u, INFINITY);
    }
    p_.counts[at] = static_cast<int32_t>(count);
    if (!p_.candidate_blocks || size_of(row.units) == 0) return;
    cut(&best->blocks, spare);
    int32_t* blocks = p_.candidate_blocks + at * p_.candidate_k;
    for (int64_t i = 0; i < best->blocks.size; ++i)
      *blocks++ = static_cast<int32_t>(number_of(best->blocks.ranks[i]));
    *blocks = static_cast<int32_t>((row.units.high - 1) / p_.candidate_block);
  }

  void fill_empty_list(int64_t at) const {
    std::fill_n(p_.indices + at * p_.k, p_.k, -1);
    if (p_.values) std::fill_n(p_.values + at * p_.k, p_.k, -INFINITY);
    if (p_.candidate_blocks)
      std::fill_n(p_.candidate_blocks + at * p_.candidate_k, p_.candidate_k, -1);
  }

  const SelectParams& p_;
  const SelectKernels& kernels_;
  const std::vector<Rows> rows_;
  const int32_t threads_;
  int32_t most_rows_ = 1;
  int32_t group_ = 1;  // lists that are found together
  int64_t unit_words_, block_words_, spare_words_;
  int64_t scratch_bytes_, sum_floats_;
  std::atomic<bool> failed_{false};
};

}  // namespace

CallStatus select(const SelectParams& p) {
  const CallStatus status = check_lengths(p);
  if (status.error != CallError::kNone) return status;
  fill_empty(p, p.cu_seqlens_q[p.batch], p.tokens);
  return Call(p).run() ? CallStatus{} : find_unpaged(p);
}

}  // namespace sparse_attn
