#include "select.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "memory.h"
#include "parallel.h"
#include "select_lists.h"
#include "select_rows.h"

namespace sparse_attn {
namespace {

// Products of elements below which starting threads costs more than they save.
constexpr int64_t kLeastWork = 1 << 21;

// Most memory for the best of a block's lists.
constexpr int64_t kBestBytes = 1 << 22;

// Most memory of a thread for what is kept of keys. Where more were needed, they are read twice.
constexpr int64_t kKeptBytes = 1 << 24;

// Bytes of working memory that a thread keeps for its next call.
constexpr int64_t kMostRetainedBytes = 1 << 26;

// Pieces for each thread that a block's places are cut into, at most: a busy neighbour delays the
// end by one of them.
constexpr int64_t kPieces = 16;

// A block that several threads work on, each for bests of its own, until they have taken all of its
// places.
struct Work {
  SelectBlock block;
  std::vector<Run> runs;
  int64_t chunks_before = 0;           // of the works before it
  int64_t kept_before = 0;             // floats that are kept of them
  PlaceQueue summed, scored;           // places of either stage
  std::atomic<int32_t> open_tasks{0};  // of its present stage
  std::atomic<int32_t> stage{0};

  // Waits for an earlier stage's tasks. Other threads have begun them: tasks begin in order.
  void await(int32_t wanted) const {
    while (stage.load(std::memory_order_acquire) < wanted) std::this_thread::yield();
  }

  // Ends one of `tasks`. `last` is called before the stage ends.
  template <class Last>
  void end_task(int32_t tasks, const Last& last) {
    if (open_tasks.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    last();
    open_tasks = tasks;
    stage.fetch_add(1, std::memory_order_release);
  }
};

// Places at whose multiples a block may be cut, so that neither a unit nor what is summed together
// is; 0: nowhere.
int64_t places_between_cuts(const SelectParams& p) {
  int64_t places = p.score == Score::kSoftmaxSum ? kChunk : kTile;
  for (int64_t unit :
       {pools(p) && !pools_keys(p) ? p.block : 1, p.candidate_k > 0 ? p.candidate_block : 1}) {
    if (p.strides > 1 || (places % unit != 0 && unit % places != 0)) return 0;
    places = std::max(places, unit);
  }
  return places;
}

class Call {
 public:
  Call(const SelectParams& p, const std::vector<Rows>& rows)
      : p_(p),
        kernels_(kernels_for(p.isa, SPARSE_ATTN_ISAS(SelectKernels))),
        rows_(rows),
        threads_(has_work_for_threads() ? p.threads : 1) {
    for (const Rows& some : rows_) {
      most_rows_ = std::max(most_rows_, some.rows);
      most_chunks_ = std::max(most_chunks_, ceil_divide(last_entries(p, some).high, kChunk));
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
    if (threads_ == 1 || items >= 4 * threads_ || places_between_cuts(p_) == 0) {
      run_whole(items);
    } else {
      run_together(items);
    }
    for (int slot : {0, 1}) release_thread_memory(slot, kMostRetainedBytes);
    return !failed_;
  }

 private:
  // Whether the call multiplies at least kLeastWork elements, by what its ranges admit.
  bool has_work_for_threads() const {
    int64_t work = 0;
    for (const Rows& rows : rows_) {
      work += rows.rows * size_of(last_entries(p_, rows)) * p_.heads * p_.dim;
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
  bool make(int64_t item, SelectBlock* block, std::vector<Run>* runs) const {
    const int64_t each = blocks_of_rows();
    const Rows& rows = rows_[rows_.size() - 1 - static_cast<size_t>(item / each)];
    const auto [first, lists] = lists_of(item % each);
    return make_block(p_, rows, first, lists, block, runs);
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

  void write(const SelectBlock& block, int32_t list, int32_t r, RowBest* best,
             uint64_t* spare) const {
    kernels_.cut(&best->units, spare);
    kernels_.cut(&best->blocks, spare);
    write_list(p_, block, list, r, *best);
  }

  // A thread for each block.
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
      const SelectBlock& block = work.block;
      bool paged = make(item, &work.block, &work.runs);
      open_best(block, block.lists, scratch + worker_bytes() + sums, best);
      float* kept = nullptr;
      if (block.chunks() * sizes_.kept_floats * 4 <= kept_bytes)
        kept = reinterpret_cast<float*>(scratch + bytes - kept_bytes);
      const auto all_places = [&](PlaceQueue* queue) {
        open(queue, block.places, round_up(block.places.high + 1, kTile));
        return queue;
      };
      if (paged && sizes_.sum_floats > 0) {
        kernels_.clear(p_, block, running);
        paged = kernels_.sum(p_, block, all_places(&work.summed), scratch, kept, running, 0);
      }
      paged = paged && kernels_.score(p_, block, 0, block.lists, all_places(&work.scored), scratch,
                                      kept, running, spare, best);
      if (!paged) {
        failed_ = true;
        return;
      }
      for (int32_t i = 0; i < block.lists; ++i) {
        for (int32_t r = 0; r < block.rows; ++r) write(block, i, r, best + i * kMaxRows + r, spare);
      }
    });
  }

  // Several threads for each block.
  void run_together(int64_t items) {
    std::vector<Work> works(static_cast<size_t>(items));
    // Of an item: all threads may be at one, or at several.
    const auto tasks =
        static_cast<int32_t>(std::min<int64_t>(threads_, ceil_divide(4 * threads_, items)));
    int64_t chunks = 0, floats = 0;
    for (int64_t item = 0; item < items; ++item) {
      Work& work = works[static_cast<size_t>(item)];
      if (!make(item, &work.block, &work.runs)) {
        failed_ = true;
        return;
      }
      work.chunks_before = chunks;
      chunks += work.block.chunks();
      work.kept_before = floats;
      floats += work.block.chunks() * kernels_.sizes(p_, work.block).kept_floats;
      work.open_tasks = tasks;
      const int64_t each = size_of(work.block.places) / (kPieces * tasks);
      const int64_t step = round_up(std::max<int64_t>(each, 1), places_between_cuts(p_));
      open(&work.summed, work.block.places, step);
      open(&work.scored, work.block.places, step);
    }
    const int64_t worker = worker_bytes();
    char* scratch = thread_memory(0, worker * threads_);
    const bool keeps = floats > 0 && floats * 4 <= kKeptBytes * threads_;
    // What is kept of the keys of a list needs none of its neighbours.
    const bool by_list = keeps && items * lists_ >= threads_;
    const int64_t kept_floats = keeps ? floats : 0;
    const int64_t sum_floats = round_up((chunks + items) * sizes_.sum_floats, 16);
    const int64_t of_item = by_list ? lists_ : tasks;  // tasks of an item that score
    const int64_t task_lists = by_list ? 1 : lists_, count = items * of_item;
    auto* kept = reinterpret_cast<float*>(
        thread_memory(1, (kept_floats + sum_floats) * 4 + count * task_lists * best_bytes()));
    float* sums = kept + kept_floats;
    char* memory = reinterpret_cast<char*>(sums + sum_floats);
    std::vector<RowBest> best(static_cast<size_t>(count * task_lists) * kMaxRows);
    const auto kept_of = [&](const Work& work) {
      return keeps ? kept + work.kept_before : nullptr;
    };
    // Sums of all chunks of a work, which those of each follow.
    const auto sums_of = [&](const Work& work) {
      return sums + (work.chunks_before + (&work - works.data())) * sizes_.sum_floats;
    };
    if (sizes_.sum_floats > 0) {
      for (Work& work : works) {
        for (int64_t i = 0; i <= work.block.chunks(); ++i)
          kernels_.clear(p_, work.block, sums_of(work) + i * sizes_.sum_floats);
      }
    }

    // One region for all stages: a busy neighbour delays each region's end.
    const int64_t summing = sizes_.sum_floats > 0 ? items * tasks : 0;
    const int32_t summed = summing > 0;
    const int64_t lists = int64_t{1} * lists_ * most_rows_;
    parallel_for(summing + count + (by_list ? 0 : items * lists), threads_,
                 [&](int64_t n, int32_t w) {
                   char* own = scratch + w * worker;
                   auto* spare = reinterpret_cast<uint64_t*>(own + sizes_.scratch_bytes);
                   if (n < summing) {
                     Work& work = works[static_cast<size_t>(n / tasks)];
                     add_sums(&work, own, kept_of(work), sums_of(work));
                     work.end_task(tasks, [&] { merge_sums(work, sums_of(work)); });
                     return;
                   }
                   if ((n -= summing) < count) {
                     Work& work = works[static_cast<size_t>(n / of_item)];
                     const SelectBlock& block = work.block;
                     const auto first = static_cast<int32_t>(by_list ? n % of_item : 0);
                     const int32_t some = by_list ? (first < block.lists) : block.lists;
                     PlaceQueue whole;
                     open(&whole, block.places, round_up(block.places.high + 1, kTile));
                     RowBest* to = &best[static_cast<size_t>(n * task_lists) * kMaxRows];
                     work.await(summed);
                     open_best(block, some, memory + n * task_lists * best_bytes(), to);
                     if (some > 0 && !failed_ &&
                         !kernels_.score(p_, block, first, some, by_list ? &whole : &work.scored,
                                         own, kept_of(work), sums_of(work), spare, to))
                       failed_ = true;
                     if (!by_list) {
                       work.end_task(tasks, [] {});
                     } else if (some > 0 && !failed_) {
                       for (int32_t r = 0; r < block.rows; ++r)
                         write(block, first, r, &to[r], spare);
                     }
                     return;
                   }
                   n -= count;
                   const int64_t item = n / lists;
                   const Work& work = works[static_cast<size_t>(item)];
                   const int32_t list = static_cast<int32_t>(n % lists) / most_rows_;
                   const int32_t r = static_cast<int32_t>(n % lists) % most_rows_;
                   work.await(summed + 1);
                   if (failed_ || list >= work.block.lists || r >= work.block.rows) return;
                   const auto of = [&](int64_t task) {
                     const int64_t at = (item * tasks + task) * lists_ + list;
                     return &best[static_cast<size_t>(at * kMaxRows + r)];
                   };
                   for (int32_t task = 1; task < tasks; ++task) {
                     kernels_.join(&of(0)->units, of(task)->units, spare);
                     kernels_.join(&of(0)->blocks, of(task)->blocks, spare);
                   }
                   kernels_.cut(&of(0)->units, spare);
                   kernels_.cut(&of(0)->blocks, spare);
                   for (Best* joined : {&of(0)->units, &of(0)->blocks})
                     sort_ranks(joined->ranks, joined->size, 32, spare);
                   write_list(p_, work.block, list, r, *of(0));
                 });
  }

  // Adds to the sums of chunks, which follow those of all.
  void add_sums(Work* work, char* scratch, float* kept, float* sums) {
    if (!kernels_.sum(p_, work->block, &work->summed, scratch, kept, sums + sizes_.sum_floats,
                      sizes_.sum_floats))
      failed_ = true;
  }

  void merge_sums(const Work& work, float* sums) const {
    for (int64_t i = 1; i <= work.block.chunks(); ++i)
      kernels_.merge(p_, work.block, sums + i * sizes_.sum_floats, sums);
  }

  const SelectParams& p_;
  const SelectKernels& kernels_;
  const std::vector<Rows>& rows_;
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
  const std::vector<Rows> rows = cut_rows(p);
  empty_others(p, rows);
  return Call(p, rows).run() ? CallStatus{} : find_unpaged(p);
}

}  // namespace sparse_attn
