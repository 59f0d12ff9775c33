#include "compress.h"

#include <string.h>

#include <algorithm>
#include <vector>

#include "compress_entry.h"
#include "memory.h"
#include "parallel.h"

namespace sparse_attn {
namespace {

// Numbers read below which starting threads costs more than it saves.
constexpr int64_t kLeastNumbers = 1 << 15;

// What the step does to one sequence.
struct Step {
  int64_t row = 0;                // of the first new token
  int64_t before = 0, after = 0;  // tokens
  int64_t first = 0, done = 0;    // entries
  int64_t latent = 0;             // number of the first entry among all
};

std::vector<Step> steps_of(const CompressParams& p) {
  std::vector<Step> steps(static_cast<size_t>(p.batch));
  int64_t entries = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    Step& step = steps[static_cast<size_t>(b)];
    const int64_t end = p.cu_seqlens_q[b + 1], rows = end - p.cu_seqlens_q[b];
    const int64_t length = p.seq_lens[b];
    step.before = std::max<int64_t>(length - rows, 0);
    step.after = std::max<int64_t>(length, 0);
    step.row = end - (step.after - step.before);
    step.first = step.before / p.stride;
    step.done = step.after / p.stride;
    step.latent = entries;
    entries += step.done - step.first;
  }
  return steps;
}

int64_t slot_of(const EntryPlane& plane, const PageTable& table, int64_t b, int64_t entry) {
  return int64_t{table.pages[b * table.stride + entry / plane.page_size]} * plane.page_size +
         entry % plane.page_size;
}

// Whether entries [first, end) of a sequence have pages.
CallStatus check_pages(const EntryPlane& plane, const PageTable& table, bool state, int64_t b,
                       int64_t first, int64_t end) {
  if (first >= end) return {};
  if (end > table.columns * plane.page_size) return {CallError::kEntryUnpaged, state, {end - 1, b}};
  const int64_t last = (end - 1) / plane.page_size;
  for (int64_t column = first / plane.page_size; column <= last; ++column) {
    const int64_t page = table.pages[b * table.stride + column];
    if (page < 0 || page >= plane.pages) return {CallError::kPageOutside, state, {b, page}};
  }
  return {};
}

// The first token of an entry's span.
int64_t first_token(const CompressParams& p, int64_t entry) {
  return std::max<int64_t>((entry + 1) * p.stride - p.span, 0);
}

CallStatus check_step(const CompressParams& p, const Step& step, int64_t b) {
  CallStatus status = check_pages(p.plane, p.page_table, false, b, step.first, step.done);
  if (status.error != CallError::kNone) return status;
  if (step.done > step.first && p.rotated > 0) {
    const int64_t position = (step.done - 1) * p.rope_stride;
    if (position >= p.positions) return {CallError::kNoPosition, false, {position, 0}};
  }
  if (p.kept == 0) return {};
  if (step.done > step.first) {
    const int64_t earliest = first_token(p, step.first);
    status = check_pages(p.state, p.state_page_table, true, b, earliest, step.before);
    if (status.error != CallError::kNone) return status;
  }
  const int64_t written = std::max(step.before, step.after - p.kept);
  return check_pages(p.state, p.state_page_table, true, b, written, step.after);
}

const char* row_of(const TokenRows& rows, int64_t t, int64_t head) {
  return rows.data + t * rows.strides[0] + head * rows.strides[1];
}

TokenPlace place_of(const CompressParams& p, const Step& step, int64_t b, int64_t position,
                    int64_t head) {
  TokenPlace place;
  const int64_t ahead = std::min(p.stride, kTokensTogether);
  if (position >= step.before) {
    const int64_t t = step.row + position - step.before;
    const int64_t soon = position + ahead < step.after ? ahead : 0;
    place.row = row_of(p.rows, t, head);
    place.row_format = p.rows.format;
    place.ahead = soon * p.rows.strides[0];
    if (!p.gates.data) return place;
    place.gate = row_of(p.gates, t, head);
    place.gate_format = p.gates.format;
    place.gate_ahead = soon * p.gates.strides[0];
  } else {
    const int64_t slot = slot_of(p.state, p.state_page_table, b, position);
    const int64_t page = slot / p.state.page_size, offset = slot % p.state.page_size;
    const int64_t soon = offset + ahead < p.state.page_size ? ahead : 0;
    place.row = p.state.values.at(page, offset, head);
    place.gate = place.row + p.width * 4;
    place.ahead = place.gate_ahead = soon * p.state.values.strides[1];
  }
  return place;
}

void write_entry(const CompressParams& p, const Step& step, int64_t b, int64_t entry,
                 CompressEntry kernel, const RowKernels& rows, TokenPlace* places, float* memory) {
  const int64_t slot = slot_of(p.plane, p.page_table, b, entry);
  const int64_t first = first_token(p, entry), count = (entry + 1) * p.stride - first;
  float* const latent = memory + entry_memory(p);
  float* const row = latent + padded_dim(p.plane.dim);
  const Number type = entry_type(p);
  fetch_to_write(p.plane, slot);
  for (int64_t h = 0; h < p.heads; ++h) {
    for (int64_t i = 0; i < count; ++i) places[i] = place_of(p, step, b, first + i, h);
    kernel(p, {entry, count, places}, memory, latent, row);
    write_row(rows, p.plane, slot, h, type, reinterpret_cast<const char*>(row));
    if (!p.latent) continue;
    const int64_t bytes = p.plane.dim * element_bytes(p.dtype);
    char* to = p.latent + ((step.latent + entry - step.first) * p.heads + h) * bytes;
    rows.encode(codec_of(p.dtype), type, reinterpret_cast<const char*>(latent), p.plane.dim,
                {to, nullptr, nullptr});
  }
}

void read_floats(const RowKernels& kernels, const TokenRows& rows, int64_t t, int64_t head,
                 int64_t width, float* to) {
  kernels.decode(codec_of(rows.format), {row_of(rows, t, head), nullptr, nullptr}, width, to);
}

void write_state(const CompressParams& p, const RowKernels& kernels, const Step& step, int64_t b,
                 float* row) {
  for (int64_t q = std::max(step.before, step.after - p.kept); q < step.after; ++q) {
    const int64_t slot = slot_of(p.state, p.state_page_table, b, q);
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t t = step.row + q - step.before;
      read_floats(kernels, p.rows, t, h, p.width, row);
      if (p.gates.data) read_floats(kernels, p.gates, t, h, p.width, row + p.width);
      write_row(kernels, p.state, slot, h, Number::kFp32, reinterpret_cast<const char*>(row));
    }
  }
}

}  // namespace

CallStatus compress(const CompressParams& p) {
  CallStatus status = check_lengths(p);
  if (status.error != CallError::kNone) return status;
  const std::vector<Step> steps = steps_of(p);
  for (int64_t b = 0; b < p.batch; ++b) {
    status = check_step(p, steps[static_cast<size_t>(b)], b);
    if (status.error != CallError::kNone) return status;
  }
  const int64_t entries =
      p.batch == 0 ? 0 : steps.back().latent + steps.back().done - steps.back().first;
  if (p.latent) {
    if (entries > p.latents) return {CallError::kFewEntries, false, {entries, 0}};
    const int64_t bytes = p.heads * p.plane.dim * element_bytes(p.dtype);
    memset(p.latent + entries * bytes, 0, static_cast<size_t>((p.latents - entries) * bytes));
  }

  const int64_t numbers = entries * p.heads * p.span * p.width;
  const int32_t threads = numbers < kLeastNumbers ? 1 : p.threads;
  const int64_t floats = std::max(entry_memory(p) + 2 * padded_dim(p.plane.dim), p.state.dim);
  const int64_t places = p.span * static_cast<int64_t>(sizeof(TokenPlace));
  const int64_t bytes = (floats * 4 + places + 63) / 64 * 64;
  char* memory = thread_memory(0, bytes * threads);
  const CompressEntry kernel = kernels_for(p.isa, SPARSE_ATTN_ISAS(Compress));
  const RowKernels& rows = kernels_for(p.isa, SPARSE_ATTN_ISAS(RowKernels));
  const int64_t task_entries = std::max<int64_t>(1, 64 / p.span);
  parallel_for(
      (entries + task_entries - 1) / task_entries, threads, [&](int64_t task, int32_t worker) {
        char* own = memory + worker * bytes;
        const int64_t begin = task * task_entries, end = std::min(begin + task_entries, entries);
        auto next = std::upper_bound(steps.begin(), steps.end(), begin,
                                     [](int64_t e, const Step& step) { return e < step.latent; });
        for (int64_t e = begin; e < end; ++e) {
          while (next != steps.end() && next->latent <= e) ++next;
          const Step& step = *(next - 1);
          write_entry(p, step, (next - 1) - steps.begin(), step.first + e - step.latent, kernel,
                      rows, reinterpret_cast<TokenPlace*>(own + floats * 4),
                      reinterpret_cast<float*>(own));
        }
      });
  // After all entries are read: a ring of pages is written where it was read.
  if (p.kept > 0) {
    parallel_for(p.batch, threads, [&](int64_t b, int32_t worker) {
      write_state(p, rows, steps[static_cast<size_t>(b)], b,
                  reinterpret_cast<float*>(memory + worker * bytes));
    });
  }
  return {};
}

}  // namespace sparse_attn
