// The products of `attend` in AMX's tile registers: for calls whose heads, or whose rows without
// index lists, fill them.
#pragma once

#include "micro_amx.h"
#include "tiles.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

class AmxAttend {
 public:
  AmxAttend(int64_t lanes, Carver* carver)
      : lanes_(lanes),
        step_((lanes + kAmxBlock) * kAmxPairs),  // a block of lanes may start at any
        probabilities_(carver->take<float>(kTile / kAmxElements * step_)),
        values_(carver->take<float>(kTile / 2 * kPanel)),
        sums_(carver->take<float>(kAmxBlock * kPanel)) {}

  // Rows of keys that are multiplied: whole blocks from the first on, whole registers to the last.
  static int first_row(const Tile& tile) { return tile.first / kAmxBlock * kAmxBlock; }
  static int end_row(const Tile& tile) { return static_cast<int>(round_up(tile.last, kAmxRows)); }

  // How often the fetcher is stepped between the products of a tile.
  int64_t fetches(const Tile& tile, int64_t steps, int64_t panels) const {
    const int64_t blocks = (lanes_ + kAmxBlock - 1) / kAmxBlock;
    return blocks * chunks(tile) * (steps / kAmxPairs + panels);
  }

  // Scores of the tile's keys, rows from `keys` on that are `key_bytes` apart, for the panel of
  // `width` queries: s[n * lanes + lane], added to what is there if `adds`. Keys and queries have
  // so many steps, whole registers of them.
  template <class Fetcher>
  void multiply_keys(const Tile& tile, const char* keys, int64_t key_bytes, const float* q,
                     int64_t width, int64_t steps, bool adds, float* s, Fetcher& fetcher) const {
    const AmxOperand queries = {q, width * 4, kAmxRowBytes, kAmxPairs * width * 4};
    for (int n = first_row(tile); n < tile.last; n += kAmxBlock) {
      const AmxOperand rows = {keys + n * key_bytes, key_bytes, kAmxRows * key_bytes, kAmxRowBytes};
      amx_multiply(n + kAmxRows < tile.last ? 2 : 1, width > kAmxRows ? 2 : 1, rows, queries,
                   steps / kAmxPairs, adds, s + n * lanes_, lanes_, fetcher);
    }
  }

  // Takes pairs of probabilities as softmax_lanes leaves them, in the order of registers. `zeros`:
  // as many as there are lanes.
  void take(const Tile& tile, const float* pairs, const char* zeros) {
    const int begin = tile.first / 4 * 2, end = (tile.last + 3) / 4 * 2;
    for (int chunk = first(tile); chunk < first(tile) + chunks(tile); ++chunk) {
      const char* rows[kAmxPairs];
      for (int i = 0; i < kAmxPairs; ++i) {
        const int n = chunk * kAmxPairs + i;
        rows[i] = n < begin || n >= end ? zeros : reinterpret_cast<const char*>(pairs + n * lanes_);
      }
      float* to = probabilities_ + chunk * step_;
      transpose_rows<Bf16>(rows, static_cast<int32_t>(2 * lanes_),
                           [=](int32_t lane, int count, const Floats* x) {
                             for (int j = 0; j < count; ++j)
                               store(to + (lane + j) * kAmxPairs, x[j]);
                           });
    }
  }

  // The panel of outputs of lanes [lane, end), as `pv` has it, from rows of values.
  template <class Fetcher>
  void multiply_panel(const Tile& tile, const char* const* rows, int64_t offset, int32_t lane,
                      int32_t end, const float* alpha, float* o, Fetcher& fetcher) const {
    const int chunk = first(tile), count = chunks(tile);
    for (int n = chunk * kAmxPairs; n < (chunk + count) * kAmxPairs; ++n) {
      Floats v[2];
      Bf16::values(rows, n, offset, v);
      store(values_ + n * kPanel, v[0]);
      store(values_ + n * kPanel + kWidth, v[1]);
    }
    const AmxOperand values = {values_ + chunk * kAmxPairs * kPanel, kPanel * 4, kAmxRowBytes,
                               kAmxPairs * kPanel * 4};
    for (; lane < end; lane += kAmxBlock) {
      const AmxOperand probabilities = {probabilities_ + chunk * step_ + lane * kAmxPairs,
                                        kAmxRowBytes, kAmxRows * kAmxRowBytes, step_ * 4};
      amx_multiply(lane + kAmxRows < end ? 2 : 1, 2, probabilities, values, count, false, sums_,
                   kPanel, fetcher);
      for (int32_t i = 0; i < kAmxBlock && lane + i < end; ++i) {
        const Floats a = broadcast(alpha[lane + i]);
        for (int d = 0; d < kPanel; d += kWidth) {
          float* to = o + (lane + i) * kPanel + d;
          store(to, fma(a, load(to), load(sums_ + i * kPanel + d)));
        }
      }
    }
  }

 private:
  // Chunks of kAmxElements rows of values.
  static int first(const Tile& tile) { return tile.first / kAmxElements; }
  static int chunks(const Tile& tile) { return (tile.last - 1) / kAmxElements - first(tile) + 1; }

  const int64_t lanes_, step_;
  float* const probabilities_;  // [kTile / kAmxElements][lanes][kAmxPairs]
  float* const values_;         // [kTile / 2][kPanel]
  float* const sums_;
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
