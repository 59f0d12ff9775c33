#include "select.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "memory.h"
#include "parallel.h"
#include "select_schedule.h"

namespace sparse_attn {
namespace {

// Products of elements below which starting threads costs more than they save.
constexpr int64_t kLeastWork = 1 << 21;

int64_t ceil_divide(int64_t x, int64_t by) { return x / by + (x % by != 0); }

int64_t round_up(int64_t x, int64_t to) { return ceil_divide(x, to) * to; }

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

// A block and the memory that is found out for it.
struct Work {
  SelectBlock block;
  std::vector<Run> runs;
  int64_t first_chunk = 0, chunks = 0;
  int64_t chunks_before = 0;  // of the works before it
  int64_t kept_before = 0;    // floats that are kept of them, and those of a chunk
  int64_t kept_floats = 0;
  int32_t parts = 1;  // into which its places are cut for the sake of threads
  int64_t first_part = 0;
  std::atomic<int32_t> open_parts{1};  // of its present stage
  std::atomic<int32_t> stage{0};

  // Waits for an earlier stage's parts. Other threads have begun them: tasks begin in order.
  void await(int32_t wanted) const {
    while (stage.load(std::memory_order_acquire) < wanted) std::this_thread::yield();
  }

  // Ends a part. `last` is called before the stage ends.
  template <class Last>
  void end_part(const Last& last) {
    if (open_parts.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    last();
    open_parts = parts;
    stage.fetch_add(1, std::memory_order_release);
  }
};

// Chunks of some of a work's lists.
struct Part {
  Work* work;
  int32_t list, lists;
  int64_t begin, end;
};

// Most memory for the best of a block's lists.
constexpr int64_t kBestBytes = 1 << 22;

// Most memory of a thread for what is kept of keys. Where more were needed, they are read twice.
constexpr int64_t kKeptBytes = 1 << 24;

// Bytes of working memory that a thread keeps for its next call.
constexpr int64_t kMostRetainedBytes = 1 << 26;

bool lists_agree(const SelectParams& p) { return !p.takes_candidates && !pools_keys(p); }

// Sets what the block's rows select. False if an entry to be scored lies past the page table.
bool make_block(const SelectParams& p, int64_t sequence, int64_t row, int64_t position,
                int32_t rows, int32_t list, int32_t lists, Work* work) {
  SelectBlock& block = work->block;
  block.sequence = sequence;
  block.list = list;
  block.lists = lists;
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
        const bool paged = make_block(p, b, t, position, 1, list, 1, &work);
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
        kernels_(kernels_for(p.isa, SPARSE_ATTN_ISAS(SelectKernels))),
        rows_(cut_rows(p)),
        threads_(has_work_for_threads() ? p.threads : 1) {
    for (const Rows& rows : rows_) {
      most_rows_ = std::max(most_rows_, rows.rows);
      most_chunks_ = std::max(most_chunks_, ceil_divide(last_entries(rows).high, kChunk));
    }
    // No list has more units than entries have pages, but for one at either end.
    const int64_t entries = p.keys.max_pages * p.keys.page_size;
    unit_words_ = best_words(p.k, entries + 2 * p.strides);
    block_words_ = p.candidate_k > 0 ? best_words(p.candidate_k, entries + 1) : 0;
    spare_words_ = std::max(unit_words_, block_words_);
    const bool same_places = !p.takes_candidates || p.candidate_heads == 1;
    set_lists(same_places ? std::max<int64_t>(kBestBytes / best_bytes(), 1) : 1);
    const int64_t kept_bytes = most_chunks_ * sizes_.kept_floats * 4;
    if (kept_bytes > kKeptBytes) set_lists(std::max<int64_t>(lists_ * kKeptBytes / kept_bytes, 1));
  }

  // False if an entry has no page.
  bool run() {
    const int64_t items = static_cast<int64_t>(rows_.size()) * blocks_of_rows();
    if (items == 0) return true;
    if (threads_ == 1 || items >= 4 * threads_ || chunks_between_cuts(p_) == 0) {
      run_whole(items);
    } else {
      run_parts(items);
    }
    for (int slot : {0, 1}) release_thread_memory(slot, kMostRetainedBytes);
    return !failed_;
  }

 private:
  // Entries of the last of some rows.
  EntryRange last_entries(const Rows& rows) const {
    const int64_t last = rows.rows - 1;
    return entries_of(p_, rows.sequence, rows.row + last, rows.position + last);
  }

  // Whether the call multiplies at least kLeastWork elements, by what its ranges admit.
  bool has_work_for_threads() const {
    int64_t work = 0;
    for (const Rows& rows : rows_) {
      work += rows.rows * size_of(last_entries(rows)) * p_.heads * p_.dim;
      if (work >= kLeastWork) return true;
    }
    return false;
  }

  // Blocks have up to `most` lists.
  void set_lists(int64_t most) {
    const int64_t blocks = ceil_divide(p_.lists, most);
    lists_ = static_cast<int32_t>(ceil_divide(p_.lists, blocks));
    sizes_ = {};
    for (int64_t i = 0; i < blocks_of_rows(); ++i) {
      SelectBlock block;
      std::tie(block.list, block.lists) = lists_of(i);
      block.rows = most_rows_;
      const SelectSizes sizes = kernels_.sizes(p_, block);
      sizes_.scratch_bytes = std::max(sizes_.scratch_bytes, sizes.scratch_bytes);
      sizes_.sum_floats = std::max(sizes_.sum_floats, sizes.sum_floats);
      sizes_.kept_floats = std::max(sizes_.kept_floats, sizes.kept_floats);
    }
  }

  int64_t blocks_of_rows() const { return ceil_divide(p_.lists, lists_); }

  // First list and number of lists of block i of some rows.
  std::pair<int32_t, int32_t> lists_of(int64_t i) const {
    const int32_t first = static_cast<int32_t>(i) * lists_;
    return {first, std::min(lists_, p_.lists - first)};
  }

  int64_t best_bytes() const { return most_rows_ * (unit_words_ + block_words_) * 8; }

  int64_t worker_bytes() const { return round_up(sizes_.scratch_bytes + spare_words_ * 8, 64); }

  // Item i: blocks of the same rows follow each other. Long rows first. False if an entry has no
  // page.
  bool make(int64_t item, Work* work) const {
    const int64_t each = blocks_of_rows();
    const Rows& rows = rows_[rows_.size() - 1 - static_cast<size_t>(item / each)];
    const auto [first, lists] = lists_of(item % each);
    return make_block(p_, rows.sequence, rows.row, rows.position, rows.rows, first, lists, work);
  }

  void open_best(const SelectBlock& block, int32_t lists, char* memory, RowBest* best) const {
    auto* words = reinterpret_cast<uint64_t*>(memory);
    for (int32_t i = 0; i < lists; ++i) {
      for (int32_t r = 0; r < block.rows; ++r) {
        RowBest* to = &best[i * kMaxRows + r];
        open(&to->units, words, unit_words_, block.row[r].wanted);
        words += unit_words_;
        open(&to->blocks, words, block_words_, std::max<int64_t>(p_.candidate_k - 1, 0));
        words += block_words_;
      }
    }
  }

  void run_whole(int64_t items) {
    const int64_t sums = round_up(sizes_.sum_floats * 4, 64);
    const int64_t most_best = round_up(lists_ * best_bytes(), 64);
    std::vector<Work> works(static_cast<size_t>(threads_));
    const int64_t kept_bytes = std::min(most_chunks_ * sizes_.kept_floats * 4, kKeptBytes);
    const int64_t bytes = worker_bytes() + sums + most_best + kept_bytes;
    char* memory = thread_memory(0, bytes * threads_);
    std::vector<RowBest> all_best(static_cast<size_t>(threads_ * lists_) * kMaxRows);
    parallel_for(items, threads_, [&](int64_t item, int32_t worker) {
      if (failed_.load(std::memory_order_relaxed)) return;
      char* scratch = memory + worker * bytes;
      auto* spare = reinterpret_cast<uint64_t*>(scratch + sizes_.scratch_bytes);
      auto* running = reinterpret_cast<float*>(scratch + worker_bytes());
      RowBest* best = &all_best[static_cast<size_t>(worker * lists_) * kMaxRows];
      Work& work = works[static_cast<size_t>(worker)];
      bool paged = make(item, &work);
      const SelectBlock& block = work.block;
      const int64_t begin = work.first_chunk, end = begin + work.chunks;
      open_best(block, block.lists, scratch + worker_bytes() + sums, best);
      float* kept = nullptr;
      if (work.chunks * sizes_.kept_floats * 4 <= kept_bytes)
        kept = reinterpret_cast<float*>(scratch + bytes - kept_bytes);
      if (paged && sizes_.sum_floats > 0) {
        kernels_.clear(p_, block, running);
        paged = kernels_.sum(p_, block, begin, end, scratch, kept, running, 0);
      }
      paged = paged && kernels_.score(p_, block, 0, block.lists, begin, end, scratch, kept, running,
                                      spare, best);
      if (!paged) {
        failed_ = true;
        return;
      }
      for (int32_t i = 0; i < block.lists; ++i) {
        for (int32_t r = 0; r < block.rows; ++r) write(work, i, r, best + i * kMaxRows + r, spare);
      }
    });
  }

  // Cuts each block into parts for the sake of threads.
  void run_parts(int64_t items) {
    std::vector<Work> works(static_cast<size_t>(items));
    int64_t chunks = 0, floats = 0;
    for (int64_t item = 0; item < items; ++item) {
      Work& work = works[static_cast<size_t>(item)];
      if (!make(item, &work)) {
        failed_ = true;
        return;
      }
      work.chunks_before = chunks;
      chunks += work.chunks;
      work.kept_before = floats;
      work.kept_floats = kernels_.sizes(p_, work.block).kept_floats;
      floats += work.chunks * work.kept_floats;
    }
    const std::vector<Part> parts = cut_places(&works, chunks);
    const int64_t worker = worker_bytes();
    char* scratch = thread_memory(0, worker * threads_);
    const bool keeps = floats > 0 && floats * 4 <= kKeptBytes * threads_;
    const bool by_list = keeps && items * lists_ >= threads_;
    const int64_t kept_floats = keeps ? floats : 0;
    const int64_t sum_floats = round_up((chunks + items) * sizes_.sum_floats, 16);
    const std::vector<Part> scored = by_list ? cut_lists(&works) : parts;
    const auto count = static_cast<int64_t>(scored.size());
    const int64_t part_lists = by_list ? 1 : lists_;
    auto* kept = reinterpret_cast<float*>(
        thread_memory(1, (kept_floats + sum_floats) * 4 + count * part_lists * best_bytes()));
    float* sums = kept + kept_floats;
    char* memory = reinterpret_cast<char*>(sums + sum_floats);
    std::vector<RowBest> best(static_cast<size_t>(count * part_lists) * kMaxRows);
    const auto kept_of = [&](const Part& part) {
      const Work& work = *part.work;
      const int64_t at = work.kept_before + (part.begin - work.first_chunk) * work.kept_floats;
      return keeps ? kept + at : nullptr;
    };
    // Sums of all chunks of a work, which those of each follow.
    const auto sums_of = [&](const Work& work) {
      return sums + (work.chunks_before + (&work - works.data())) * sizes_.sum_floats;
    };

    const auto score = [&](const Part& part, char* scratch_of_thread, char* words, RowBest* to) {
      const SelectBlock& block = part.work->block;
      auto* spare = reinterpret_cast<uint64_t*>(scratch_of_thread + sizes_.scratch_bytes);
      open_best(block, part.lists, words, to);
      if (!kernels_.score(p_, block, part.list, part.lists, part.begin, part.end, scratch_of_thread,
                          kept_of(part), sums_of(*part.work), spare, to))
        failed_ = true;
      for (int32_t r = 0; by_list && !failed_ && r < block.rows; ++r)
        write(*part.work, part.list, r, &to[r], spare);
    };

    // One region for all stages: a busy neighbour delays each region's end.
    const int64_t summing = sizes_.sum_floats > 0 ? static_cast<int64_t>(parts.size()) : 0;
    const int32_t summed = summing > 0;
    const int64_t lists = int64_t{1} * lists_ * most_rows_;
    parallel_for(summing + count + (by_list ? 0 : items * lists), threads_,
                 [&](int64_t n, int32_t w) {
                   char* own = scratch + w * worker;
                   if (n < summing) {
                     const Part& part = parts[static_cast<size_t>(n)];
                     add_sums(part, own, kept_of(part), sums_of(*part.work));
                   } else if ((n -= summing) < count) {
                     const Part& part = scored[static_cast<size_t>(n)];
                     part.work->await(summed);
                     if (!failed_)
                       score(part, own, memory + n * part_lists * best_bytes(),
                             &best[static_cast<size_t>(n * part_lists) * kMaxRows]);
                     if (!by_list) part.work->end_part([] {});
                   } else {
                     n -= count;
                     const Work& work = works[static_cast<size_t>(n / lists)];
                     const int32_t list = static_cast<int32_t>(n % lists) / most_rows_;
                     const int32_t r = static_cast<int32_t>(n % lists) % most_rows_;
                     work.await(summed + 1);
                     if (!failed_ && list < work.block.lists && r < work.block.rows)
                       join_parts(work, list, r, &best);
                   }
                 });
  }

  // All lists of each work, its places cut into parts.
  std::vector<Part> cut_places(std::vector<Work>* works, int64_t chunks) const {
    std::vector<Part> parts;
    const int64_t grain = chunks_between_cuts(p_);
    const int64_t each = round_up(chunks / (4 * threads_) + 1, grain);
    for (Work& work : *works) {
      work.first_part = static_cast<int64_t>(parts.size());
      const int64_t end = work.first_chunk + work.chunks;
      int64_t begin = work.first_chunk;
      do {
        const int64_t next = std::min(begin / each * each + each, end);
        parts.push_back({&work, 0, work.block.lists, begin, next});
        begin = next;
      } while (begin < end);
      work.parts = static_cast<int32_t>(static_cast<int64_t>(parts.size()) - work.first_part);
      work.open_parts = work.parts;
    }
    return parts;
  }

  // All places of each list: what is kept of keys needs none of their neighbours.
  static std::vector<Part> cut_lists(std::vector<Work>* works) {
    std::vector<Part> parts;
    for (Work& work : *works) {
      for (int32_t list = 0; list < work.block.lists; ++list)
        parts.push_back({&work, list, 1, work.first_chunk, work.first_chunk + work.chunks});
    }
    return parts;
  }

  // Leaves the sums of a part's chunks after those of its work, to which the last part adds all.
  void add_sums(const Part& part, char* scratch, float* kept, float* sums) {
    Work* work = part.work;
    const auto of = [&](int64_t chunk) {
      return sums + (1 + chunk - work->first_chunk) * sizes_.sum_floats;
    };
    for (int64_t chunk = part.begin; chunk < part.end; ++chunk)
      kernels_.clear(p_, work->block, of(chunk));
    if (!kernels_.sum(p_, work->block, part.begin, part.end, scratch, kept, of(part.begin),
                      sizes_.sum_floats))
      failed_ = true;
    work->end_part([&] {
      kernels_.clear(p_, work->block, sums);
      for (int64_t chunk = work->first_chunk; chunk < work->first_chunk + work->chunks; ++chunk)
        kernels_.merge(p_, work->block, of(chunk), sums);
    });
  }

  // Writes a list of row r from the best of all parts.
  void join_parts(const Work& work, int32_t list, int32_t r, std::vector<RowBest>* best) const {
    const auto of = [&](int32_t part) -> const RowBest& {
      const int64_t at = (work.first_part + part) * lists_ + list;
      return (*best)[static_cast<size_t>(at * kMaxRows + r)];
    };
    RowBest joined = of(0);
    std::vector<uint64_t> units, blocks;
    for (int32_t n = 0; n < work.parts; ++n) {
      const RowBest& one = of(n);
      units.insert(units.end(), one.units.ranks, one.units.ranks + one.units.size);
      blocks.insert(blocks.end(), one.blocks.ranks, one.blocks.ranks + one.blocks.size);
    }
    std::vector<uint64_t> room(std::max(units.size(), blocks.size()));
    joined.units.ranks = units.data();
    joined.units.size = static_cast<int64_t>(units.size());
    joined.blocks.ranks = blocks.data();
    joined.blocks.size = static_cast<int64_t>(blocks.size());
    write(work, list, r, &joined, room.data());
  }

  // Writes the outputs of one list of a row.
  void write(const Work& work, int32_t list, int32_t r, RowBest* best, uint64_t* spare) const {
    const SelectRow& row = work.block.row[r];
    const int64_t at = row.row * p_.lists + work.block.list + list;
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
  int64_t most_chunks_ = 0;
  int32_t lists_ = 1;  // of a block, which are found together
  SelectSizes sizes_;  // of the largest block
  int64_t unit_words_, block_words_, spare_words_;
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
