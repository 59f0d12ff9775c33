// What attending a part of a row's entries leaves, and how it is merged and written out.
#pragma once

#include <math.h>

#include "rows.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// What attending some entries leaves: for each lane the maximum m of its scores, l = sum 2^(s - m),
// o = sum 2^(s - m) v.
struct Partial {
  float* maximum;
  float* sum;
  float* o;  // [panels][padded_lanes][kPanel]
};

// Whether the last elements of keys are multiplied where they lie. Where groups have scales, whole
// keys are converted instead.
inline bool rope_is_apart(const PlaneParams& plane) {
  return plane.rope.dim > 0 && plane.group == 0;
}

// Sizes that follow from a call and a number of lanes.
struct Shape {
  Shape(const AttendParams& p, int32_t lanes_)
      : lanes(lanes_),
        padded_lanes(round_up(lanes_, kWidth)),
        panels((p.v_dim + kPanel - 1) / kPanel),
        rope_dim(rope_is_apart(p.main) ? p.main.rope.dim : 0) {}

  int64_t partial_floats() const { return padded_lanes * (2 + panels * kPanel); }

  Partial partial(float* at) const { return {at, at + padded_lanes, at + 2 * padded_lanes}; }

  int32_t lanes;
  int64_t padded_lanes;
  int64_t panels;  // of values
  int32_t rope_dim;
};

// Merges `from` into `into`. An empty partial result (maximum kNoScore, zeros) changes nothing.
inline void merge_into(const Shape& shape, const Partial& into, const Partial& from) {
  for (int64_t at = 0; at < shape.padded_lanes; at += kWidth) {
    const Floats m0 = load(into.maximum + at), m1 = load(from.maximum + at);
    const Floats m = max(m0, m1);
    const Floats f0 = exp2(m0 - m), f1 = exp2(m1 - m);
    store(into.maximum + at, m);
    store(into.sum + at, fma(load(from.sum + at), f1, load(into.sum + at) * f0));
    for (int64_t panel = 0; panel < shape.panels; ++panel) {
      const int64_t first = (panel * shape.padded_lanes + at) * kPanel;
      for (int i = 0; i < kWidth && at + i < shape.lanes; ++i) {
        const Floats a = broadcast(f0[i]), b = broadcast(f1[i]);
        float* to = into.o + first + i * kPanel;
        const float* with = from.o + first + i * kPanel;
        for (int d = 0; d < kPanel; d += kWidth)
          store(to + d, fma(load(with + d), b, load(to + d) * a));
      }
    }
  }
}

inline void clear(const Shape& shape, const Partial& partial) {
  for (int64_t i = 0; i < shape.padded_lanes; ++i) {
    partial.maximum[i] = kNoScore;
    partial.sum[i] = 0;
  }
  memset(partial.o, 0, static_cast<size_t>(shape.padded_lanes * shape.panels * kPanel) * 4);
}

// Writes `count` elements of `x` times `factor` in the format of the output. Adding zero makes
// negative zeros positive: whether a sum of nothing but zeros was scaled or copied before does not
// show.
inline void write_out(const float* x, float factor, int32_t count, Format format, char* out) {
  int32_t d = 0;
  if (format == Format::kFp32) {
    for (; d < count; ++d) reinterpret_cast<float*>(out)[d] = x[d] * factor + 0.0f;
  } else if (format == Format::kBf16) {
    for (; d < count; ++d)
      reinterpret_cast<uint16_t*>(out)[d] = float_to_bf16(x[d] * factor + 0.0f);
  } else {
    for (; d < count; ++d)
      reinterpret_cast<uint16_t*>(out)[d] = float_to_half(x[d] * factor + 0.0f);
  }
}

inline void finish(const AttendParams& p, const Block& block, const Shape& shape,
                   const Partial& partial) {
  constexpr double kLn2 = 0.693147180559945309;
  for (int32_t lane = 0; lane < shape.lanes; ++lane) {
    const int64_t row = block.row + lane / block.heads, head = block.head + lane % block.heads;
    const int64_t at = row * p.heads + head;
    const double sum = partial.sum[lane], maximum = partial.maximum[lane] * kLn2;
    const bool empty = sum == 0;
    if (p.lse) p.lse[at] = empty ? -kInfinity : static_cast<float>(maximum + log(sum));
    const double sink = p.sinks ? exp(p.sinks[head] - maximum) : 0;
    const float factor = empty ? 0.0f : static_cast<float>(1 / (sum + sink));
    for (int32_t d = 0; d < p.v_dim; d += kPanel) {
      write_out(partial.o + d * shape.padded_lanes + lane * kPanel, factor,
                p.v_dim - d < kPanel ? p.v_dim - d : kPanel, p.q_format,
                p.out + (at * p.v_dim + d) * element_bytes(p.q_format));
    }
  }
}

// The results of a block's chunks, which come in order: each where the caller has room for it, or
// all of them merged.
class ChunkResults {
 public:
  // `given`: room for the results of chunks [begin, end), or null. `own`: room for two.
  ChunkResults(const Shape& shape, int64_t begin, int64_t end, float* given, float* const* own)
      : shape_(shape),
        begin_(begin),
        given_(given),
        total_(shape.partial(own[0])),
        part_(shape.partial(own[1])) {
    for (int64_t chunk = begin; given && chunk < end; ++chunk) clear(shape, given_to(chunk));
    if (!given) clear(shape, total_);
  }

  // What entries of a chunk are added to.
  Partial of(int64_t chunk) {
    if (given_) return given_to(chunk);
    if (chunk != chunk_) {
      merge_last();
      if (++chunks_ > 1) clear(shape_, part_);
      chunk_ = chunk;
    }
    return chunks_ == 1 ? total_ : part_;
  }

  // Writes the block's out and lse, unless the caller has the results of its chunks.
  void close(const AttendParams& p, const Block& block) {
    if (given_) return;
    merge_last();
    finish(p, block, shape_, total_);
  }

 private:
  Partial given_to(int64_t chunk) const {
    return shape_.partial(given_ + (chunk - begin_) * shape_.partial_floats());
  }

  void merge_last() const {
    if (chunks_ > 1) merge_into(shape_, total_, part_);
  }

  const Shape& shape_;
  const int64_t begin_;
  float* const given_;
  const Partial total_, part_;
  int64_t chunk_ = -1, chunks_ = 0;  // the last one, and how many there were
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
