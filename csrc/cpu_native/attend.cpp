#include "attend.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "memory.h"
#include "parallel.h"
#include "schedule.h"

namespace sparse_attn {
namespace {

// Least lanes of a block that is cut for the sake of threads: each part reads the keys anew.
constexpr int32_t kLeastLanes = 32;

// Products of elements below which starting threads costs more than they save.
constexpr int64_t kLeastWork = 1 << 21;

// Chunks of a task that leaves partial results, where every thread still gets one: a task waits for
// its first rows.
constexpr int64_t kLeastChunks = 2;

// Bytes of partial results that a thread keeps for its next call.
constexpr int64_t kMostKeptBytes = int64_t{1} << 26;

// Bytes of partial results above which one task attends all chunks of a block, which keeps two.
constexpr int64_t kMostPartialBytes = int64_t{1} << 30;

void fill_empty(const AttendParams& p, int64_t begin, int64_t end) {
  if (begin == end) return;
  const int64_t row = static_cast<int64_t>(p.heads) * p.v_dim * element_bytes(p.q_format);
  memset(p.out + begin * row, 0, static_cast<size_t>((end - begin) * row));
  for (int64_t i = begin * p.heads; p.lse && i < end * p.heads; ++i) p.lse[i] = -INFINITY;
}

// Sets which chunks of a plane the block attends. False if an entry of a range lies past the page
// table.
bool set_chunks(const AttendParams& p, const PlaneParams& plane, int32_t index_head, int which,
                Block* block) {
  block->first_chunk[which] = block->chunks[which] = 0;
  if (!plane.given) return true;
  if (plane.listed) {
    block->chunks[which] = (listed_entries(plane, block->row, index_head) + kChunk - 1) / kChunk;
    return true;
  }
  EntryRange all = {INT64_MAX, 0};
  for (int32_t r = 0; r < block->rows; ++r) {
    const EntryRange range = visible_range(plane, p.causal, block->row + r, block->position + r,
                                           p.seq_lens[block->sequence]);
    if (range.low == range.high) continue;
    if (range.low < all.low) all.low = range.low;
    if (range.high > all.high) all.high = range.high;
  }
  if (all.high == 0) return true;
  block->first_chunk[which] = all.low / kChunk;
  block->chunks[which] = (all.high + kChunk - 1) / kChunk - all.low / kChunk;
  return all.high <= plane.max_pages * plane.page_size;
}

// The first entry without a page that the specification comes upon.
class Finder {
 public:
  explicit Finder(const AttendParams& p) : p_(p) {}

  CallStatus find() const {
    for (int64_t b = 0; b < p_.batch; ++b) {
      const int64_t begin = p_.cu_seqlens_q[b], end = p_.cu_seqlens_q[b + 1];
      for (int64_t row = begin; row < end; ++row) {
        const int64_t position = p_.seq_lens[b] - (end - row);
        if (position < 0) continue;
        for (int32_t group = 0; group < groups(p_); ++group) {
          const CallStatus status = find(b, row, position, group);
          if (status.error != CallError::kNone) return status;
        }
      }
    }
    return {};
  }

 private:
  CallStatus find(int64_t b, int64_t row, int64_t position, int32_t group) const {
    if (p_.window.given) {
      const CallStatus status = find(p_.window, b, row, position, 0);
      if (status.error != CallError::kNone) return status;
    }
    if (!p_.main.given) return {};
    return find(p_.main, b, row, position, group * p_.main.index_heads / groups(p_));
  }

  CallStatus find(const PlaneParams& plane, int64_t b, int64_t row, int64_t position,
                  int64_t index_head) const {
    const bool in_window = &plane == &p_.window;
    const int32_t* table = plane.page_table + b * plane.page_table_stride;
    const std::vector<EntryRange> runs = entries(plane, b, row, position, index_head);
    int64_t last = -1;
    for (const EntryRange& run : runs) last = run.high - 1 > last ? run.high - 1 : last;
    if (last >= plane.max_pages * plane.page_size)
      return {CallError::kEntryUnpaged, in_window, {last, b}};
    for (const EntryRange& run : runs) {
      for (int64_t column = run.low / plane.page_size; column * plane.page_size < run.high;
           ++column) {
        const int64_t page = table[column];
        if (page < 0 || page >= plane.pages) return {CallError::kPageOutside, in_window, {b, page}};
      }
    }
    return {};
  }

  // What a row attends in a plane, as runs of entries in the order of its list.
  std::vector<EntryRange> entries(const PlaneParams& plane, int64_t b, int64_t row,
                                  int64_t position, int64_t index_head) const {
    const EntryRange range = visible_range(plane, p_.causal, row, position, p_.seq_lens[b]);
    std::vector<EntryRange> runs;
    if (!plane.listed) {
      if (range.low < range.high) runs.push_back(range);
      return runs;
    }
    const int64_t* strides = plane.index_strides;
    const int64_t count = listed_entries(plane, row, index_head) / plane.select_block;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t index =
          plane.indices[row * strides[0] + index_head * strides[1] + j * strides[2]];
      if (index < 0) continue;
      EntryRange run = {index * plane.select_block, (index + 1) * plane.select_block};
      if (run.low < range.low) run.low = range.low;
      if (run.high > range.high) run.high = range.high;
      if (run.low < run.high) runs.push_back(run);
    }
    return runs;
  }

  const AttendParams& p_;
};

// Rows of one sequence that are processed together.
struct Rows {
  int64_t sequence, row, position;
  int32_t rows;
};

std::vector<Rows> cut_rows(const AttendParams& p) {
  const bool lists = p.main.listed || p.window.listed;
  const int64_t most = lists                                ? 1
                       : kMaxLanes / heads_per_group(p) > 1 ? kMaxLanes / heads_per_group(p)
                                                            : 1;
  std::vector<Rows> result;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t end = p.cu_seqlens_q[b + 1], begin = p.cu_seqlens_q[b];
    int64_t row = end - p.seq_lens[b];  // stands at position 0
    if (row < begin) row = begin;
    if (row > end) row = end;
    fill_empty(p, begin, row);
    for (; row < end; row += most) {
      const int64_t rows = end - row < most ? end - row : most;
      result.push_back({b, row, p.seq_lens[b] - (end - row), static_cast<int32_t>(rows)});
    }
  }
  return result;
}

// A block whose chunks are attended by several tasks. The last of them merges.
struct SharedBlock {
  Block block;
  int64_t first_partial;
  std::atomic<int64_t> open_tasks{0};
};

class Call {
 public:
  explicit Call(const AttendParams& p)
      : p_(p),
        kernels_(kernels_for(p.isa, SPARSE_ATTN_ISAS(Kernels))),
        rows_(cut_rows(p)),
        threads_(has_work_for_threads() ? p.threads : 1) {}

  // False if an entry has no page.
  bool run() {
    const int64_t items = static_cast<int64_t>(rows_.size()) * groups(p_);
    if (items == 0) return true;
    if (threads_ == 1 || items >= 4 * threads_) {
      run_whole(items);
      return !failed_;
    }
    // Parts of the heads need no merging, so they are the first choice where products bind.
    int32_t most = threads_;
    if (kernels_.reads_once) {
      int64_t chunks = 0;
      if (!count_chunks(items, &chunks)) return !failed_;
      // Chunks differ in size.
      if (chunks >= 2 * threads_) most = 1;
    }
    head_parts_ = std::clamp(heads_per_group(p_) / kLeastLanes, 1, most);
    if (head_parts_ > 1 && items * head_parts_ >= threads_) {
      run_whole(items * head_parts_);
    } else {
      run_chunks(items * head_parts_);
    }
    return !failed_;
  }

 private:
  // Whether the call multiplies at least kLeastWork elements, by what its lists and ranges admit.
  bool has_work_for_threads() const {
    const int64_t each = static_cast<int64_t>(p_.heads) * (p_.qk_dim + p_.v_dim);
    int64_t work = 0;
    for (const Rows& rows : rows_) {
      const int64_t last = rows.rows - 1;
      for (const PlaneParams* plane : {&p_.window, &p_.main}) {
        if (!plane->given) continue;
        const EntryRange range = visible_range(*plane, p_.causal, rows.row + last,
                                               rows.position + last, p_.seq_lens[rows.sequence]);
        int64_t entries = range.high - range.low;
        if (plane->listed && listed_entries(*plane, rows.row, 0) < entries)
          entries = listed_entries(*plane, rows.row, 0);
        work += rows.rows * entries * each;
      }
      if (work >= kLeastWork) return true;
    }
    return false;
  }

  int32_t lanes_at_most() const {
    int32_t rows = 1;
    for (const Rows& r : rows_) rows = r.rows > rows ? r.rows : rows;
    return rows * ((heads_per_group(p_) + head_parts_ - 1) / head_parts_);
  }

  // Item i, in the order in which caches serve it best. Where rows with lists, or one row of each
  // sequence, are attended, neighbours are groups and their parts: their rows share pages of
  // memory. Where many rows of a sequence attend ranges, neighbours are its rows: they read the
  // same keys.
  bool make_block(int64_t item, Block* block) const {
    const int64_t places = static_cast<int64_t>(rows_.size()), parts = groups(p_) * head_parts_;
    const int64_t place = by_group_ ? item % places : item / parts;
    const int32_t part_of_all = static_cast<int32_t>(by_group_ ? item / places : item % parts);
    const Rows& rows = rows_[static_cast<size_t>(places - 1 - place)];  // long ones first
    const int32_t group = part_of_all / head_parts_, part = part_of_all % head_parts_;
    const int32_t heads = heads_per_group(p_);
    const int32_t first = heads * part / head_parts_;
    block->sequence = rows.sequence;
    block->row = rows.row;
    block->rows = rows.rows;
    block->position = rows.position;
    block->head = group * heads + first;
    block->heads = heads * (part + 1) / head_parts_ - first;
    block->kv_head = static_cast<int32_t>(static_cast<int64_t>(group) * p_.kv_heads / groups(p_));
    block->index_head = static_cast<int32_t>(group * p_.main.index_heads / groups(p_));
    return set_chunks(p_, p_.window, 0, 0, block) &&
           set_chunks(p_, p_.main, block->index_head, 1, block);
  }

  bool count_chunks(int64_t items, int64_t* chunks) {
    for (int64_t item = 0; item < items && !failed_; ++item) {
      Block block;
      failed_ = !make_block(item, &block);
      *chunks += block.chunks[0] + block.chunks[1];
    }
    return !failed_;
  }

  void run_whole(int64_t items) {
    const int64_t bytes = kernels_.scratch_bytes(p_, lanes_at_most());
    char* scratch = thread_memory(0, bytes * std::min<int64_t>(threads_, items));
    parallel_for(items, threads_, [&](int64_t item, int32_t worker) {
      if (failed_.load(std::memory_order_relaxed)) return;
      Block block;
      if (!make_block(item, &block) ||
          !kernels_.attend(p_, block, 0, block.chunks[0] + block.chunks[1],
                           scratch + worker * bytes, nullptr)) {
        failed_ = true;
      }
    });
  }

  void run_chunks(int64_t items) {
    std::vector<SharedBlock> blocks(static_cast<size_t>(items));
    struct Task {
      SharedBlock* shared;
      int64_t begin, end;
    };
    std::vector<Task> tasks;
    int64_t chunks = 0;
    for (int64_t item = 0; item < items; ++item) {
      SharedBlock& shared = blocks[static_cast<size_t>(item)];
      if (!make_block(item, &shared.block)) {
        failed_ = true;
        return;
      }
      shared.first_partial = chunks;
      chunks += shared.block.chunks[0] + shared.block.chunks[1];
    }
    const int32_t lanes = lanes_at_most();
    const int64_t partial = kernels_.partial_floats(p_, lanes);
    if (chunks > kMostPartialBytes / 4 / partial) {
      run_whole(items);
      return;
    }
    const int64_t each = std::max(chunks / (4 * threads_) + 1,
                                  std::min(kLeastChunks, (chunks + threads_ - 1) / threads_));
    for (SharedBlock& shared : blocks) {
      const int64_t count = shared.block.chunks[0] + shared.block.chunks[1];
      for (int64_t begin = 0; begin < count || begin == 0; begin += each) {
        tasks.push_back({&shared, begin, begin + each < count ? begin + each : count});
        ++shared.open_tasks;
      }
    }
    const int64_t bytes = kernels_.scratch_bytes(p_, lanes);
    const int64_t count = static_cast<int64_t>(tasks.size());
    char* scratch = thread_memory(0, bytes * std::min<int64_t>(threads_, count));
    float* partials = reinterpret_cast<float*>(thread_memory(1, chunks * partial * 4));
    parallel_for(count, threads_, [&](int64_t i, int32_t worker) {
      if (failed_.load(std::memory_order_relaxed)) return;
      const Task& task = tasks[static_cast<size_t>(i)];
      SharedBlock& shared = *task.shared;
      const Block& block = shared.block;
      const int64_t count = block.chunks[0] + block.chunks[1];
      const bool alone = task.begin == 0 && task.end == count;
      const int64_t stride = kernels_.partial_floats(p_, lanes_of(block));
      float* first = partials + shared.first_partial * partial;
      if (!kernels_.attend(p_, block, task.begin, task.end, scratch + worker * bytes,
                           alone ? nullptr : first + task.begin * stride)) {
        failed_ = true;
        return;
      }
      if (!alone && shared.open_tasks.fetch_sub(1) == 1) kernels_.merge(p_, block, count, first);
    });
    release_thread_memory(1, kMostKeptBytes);
  }

  const AttendParams& p_;
  const Kernels& kernels_;
  const std::vector<Rows> rows_;
  const int32_t threads_;
  const bool by_group_ =
      !p_.main.listed && !p_.window.listed && static_cast<int64_t>(rows_.size()) > p_.batch;
  int32_t head_parts_ = 1;
  std::atomic<bool> failed_{false};
};

}  // namespace

CallStatus attend(const AttendParams& p) {
  const CallStatus status = check_lengths(p);
  if (status.error != CallError::kNone) return status;
  fill_empty(p, p.cu_seqlens_q[p.batch], p.tokens);
  return Call(p).run() ? CallStatus{} : Finder(p).find();
}

}  // namespace sparse_attn
