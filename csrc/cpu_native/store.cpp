#include "store.h"

#include <string.h>

#include "../common/number.h"
#include "memory.h"
#include "parallel.h"

namespace sparse_attn {
namespace {

// Elements below which starting threads costs more than they save.
constexpr int64_t kLeastElements = 1 << 16;

// Rows that a task stores.
constexpr int64_t kTaskRows = 64;

const float* as_floats(const char* row, Format format, int64_t dim, float* buffer) {
  if (format == Format::kFp32) return reinterpret_cast<const float*>(row);
  const auto* from = reinterpret_cast<const uint16_t*>(row);
  if (format == Format::kBf16) {
    for (int64_t i = 0; i < dim; ++i) buffer[i] = bf16_to_float(from[i]);
  } else {
    for (int64_t i = 0; i < dim; ++i) buffer[i] = half_to_float(from[i]);
  }
  return buffer;
}

void write_plain(const float* row, Format format, int64_t dim, char* to) {
  auto* halves = reinterpret_cast<uint16_t*>(to);
  if (format == Format::kFp32) {
    memcpy(to, row, static_cast<size_t>(dim) * 4);
  } else if (format == Format::kBf16) {
    for (int64_t i = 0; i < dim; ++i) halves[i] = float_to_bf16(row[i]);
  } else {
    for (int64_t i = 0; i < dim; ++i) halves[i] = float_to_half(row[i]);
  }
}

// Integers -127..127, and the scale amax / 127 rounded up, so that nothing is clipped.
void write_int8(const float* row, int64_t dim, char* to, char* scale_to) {
  uint32_t largest = 0;  // as bits: NaN is above infinity, which is above all numbers
  for (int64_t i = 0; i < dim; ++i) {
    const uint32_t magnitude = bits_of(row[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float amax = float_of(largest);
  uint16_t scale = float_to_half(amax / 127);
  if (scale < 0x7c00 && half_to_float(scale) * 127 < amax) ++scale;
  memcpy(scale_to, &scale, 2);
  if (scale == 0 || scale >= 0x7c00) {
    memset(to, 0, static_cast<size_t>(dim));
    return;
  }
  const float divisor = half_to_float(scale);
  auto* stored = reinterpret_cast<int8_t*>(to);
  for (int64_t i = 0; i < dim; ++i) {
    constexpr float kShift = 0x1.8p23f;  // adding it rounds to a whole number, half to even
    float x = (row[i] / divisor + kShift) - kShift;
    x = x > 127 ? 127 : x < -127 ? -127 : x;
    stored[i] = static_cast<int8_t>(x);
  }
}

void store_row(const StoreParams& p, int64_t t, float* buffer) {
  const int64_t slot = p.slots[t];
  if (slot < 0) return;
  const int64_t page = slot / p.page_size, offset = slot % p.page_size;
  char* to = p.plane + page * p.plane_strides[0] + offset * p.plane_strides[1];
  char* scale_to =
      p.scale ? p.scale + page * p.scale_strides[0] + offset * p.scale_strides[1] : nullptr;
  const char* row = p.rows + t * p.row_strides[0];
  for (int64_t h = 0; h < p.heads; ++h) {
    if (p.row_format == p.format) {
      memcpy(to, row, static_cast<size_t>(p.dim * element_bytes(p.format)));
    } else if (p.scale) {
      write_int8(as_floats(row, p.row_format, p.dim, buffer), p.dim, to, scale_to);
    } else {
      write_plain(as_floats(row, p.row_format, p.dim, buffer), p.format, p.dim, to);
    }
    row += p.row_strides[1];
    to += p.plane_strides[2];
    scale_to += p.scale ? p.scale_strides[2] : 0;
  }
}

}  // namespace

int64_t store(const StoreParams& p) {
  int64_t last = -1;
  for (int64_t t = 0; t < p.tokens; ++t) last = p.slots[t] > last ? p.slots[t] : last;
  if (last >= p.pages * p.page_size) return last;
  const int32_t threads = p.tokens * p.heads * p.dim < kLeastElements ? 1 : p.threads;
  char* buffers = thread_memory(0, p.dim * 4 * threads);
  parallel_for((p.tokens + kTaskRows - 1) / kTaskRows, threads, [&](int64_t task, int32_t worker) {
    const int64_t begin = task * kTaskRows;
    const int64_t end = begin + kTaskRows < p.tokens ? begin + kTaskRows : p.tokens;
    for (int64_t t = begin; t < end; ++t) {
      store_row(p, t, reinterpret_cast<float*>(buffers + worker * p.dim * 4));
    }
  });
  return -1;
}

}  // namespace sparse_attn
