// The products of `select` in AMX's tile registers: keys are one operand, where they lie in memory
// if they are evenly spaced there, and the lanes' queries the other.
//
// A row of sums depends on its own key only, and a column on its lane: neither on how many are
// multiplied together. Unseen keys, and lanes that there are not, may be anything. Denormal
// elements count as zero, as they do in products of vectors of bf16.
#pragma once

#include "amx.h"
#include "select_lanes.h"
#include "select_products.h"
#include "select_tiles.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

template <class Mode>
class AmxSelect;

// Bf16, and integers, in tile registers. A step of four bytes is a row of the queries' register.
struct AmxMode : VectorMode {
  static constexpr bool kAmx = true;
  static constexpr int kSteps = kAmxRows;
  typedef AmxRegisters Registers;
};

struct Bf16Tiles : AmxMode {
  typedef AmxSelect<Bf16Tiles> Products;
  typedef uint16_t Element;
  static constexpr Format kFormat = Format::kBf16;
  static constexpr Number kType = Number::kBf16;
  static constexpr int kGroup = 2;

  template <int kC, int kA, int kB>
  static SPARSE_ATTN_INLINE void multiply() {
    amx_dot_bf16<kC, kA, kB>();
  }
};

struct Int8Tiles : AmxMode {
  typedef AmxSelect<Int8Tiles> Products;
  typedef int8_t Element;
  static constexpr Format kFormat = Format::kInt8;
  static constexpr Number kType = Number::kInt8;
  static constexpr int kGroup = 4;

  template <int kC, int kA, int kB>
  static SPARSE_ATTN_INLINE void multiply() {
    amx_dot_int8<kC, kA, kB>();
  }
};

static_assert(kAmxRows == kRegister && kWidth == kRegister && kKeys == 2 * kRegister,
              "keys and lanes of a register");

// s[key * ld + lane] of two registers of keys and kColumns of lanes; integers where elements are.
// `q`: [steps][width] of four bytes, steps whole registers. `fetcher.step()` is called between
// products.
template <class Mode, int kColumns, class Fetcher>
SPARSE_ATTN_APART void amx_scores(const KeyRows* keys, const float* q, int64_t width, int64_t steps,
                                  float* s, int64_t ld, Fetcher& fetcher) {
  static_assert(kColumns <= 2, "registers: four sums, two tiles of each operand");
  constexpr int kA = 4, kB = 6;
  const char *first = keys[0].at, *second = keys[1].at;
  const int64_t first_stride = keys[0].stride, second_stride = keys[1].stride;
  amx_zero<0>();
  amx_zero<1>();
  if (kColumns > 1) amx_zero<2>();
  if (kColumns > 1) amx_zero<3>();
  for (int64_t step = 0; step < steps; step += kAmxRows, q += kAmxRows * width) {
    fetcher.step();
    amx_load<kB>(q, width * 4);
    amx_load<kA>(first + 4 * step, first_stride);
    Mode::template multiply<0, kA, kB>();
    amx_load<kA + 1>(second + 4 * step, second_stride);
    Mode::template multiply<1, kA + 1, kB>();
    if (kColumns > 1) {
      amx_load<kB + 1>(q + kAmxRows, width * 4);
      Mode::template multiply<2, kA, kB + 1>();
      Mode::template multiply<3, kA + 1, kB + 1>();
    }
  }
  const int64_t stride = ld * 4;
  amx_store<0>(s, stride);
  amx_store<1>(s + kAmxRows * ld, stride);
  if (kColumns > 1) amx_store<2>(s + kAmxRows, stride);
  if (kColumns > 1) amx_store<3>(s + kAmxRows * ld + kAmxRows, stride);
}

// What `join_keys` does, for kWidth keys whose products with panel i are at s + i * kKeys * kPanel.
template <class Mode, bool kRelu, bool kScaled>
SPARSE_ATTN_APART void join_sums(const float* s, const JoinedHeads& heads, const float* key_scale,
                                 Floats* total) {
  constexpr bool kIntegers = Mode::kGroup == 4;
  Floats joined[kWidth] = {};
  for (int32_t i = 0; i < heads.panels; ++i, s += kKeys * kPanel) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const int32_t lane = i * kPanel + j * kWidth;
      const Floats w = load(heads.weights + lane);
      Floats q_scale = {};
      if (kIntegers) q_scale = load(heads.q_scales + lane);
#pragma GCC unroll 16
      for (int r = 0; r < kWidth; ++r) {
        Floats x = load(s + r * kPanel + j * kWidth);
        if (kIntegers) x = __builtin_convertvector((Ints)x, Floats) * q_scale;
        if (kScaled) x *= broadcast(key_scale[r]);
        if (kRelu) x = max(Floats{}, x);
        joined[r] = fma(w, x, joined[r]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kWidth; ++r) total[r] = joined[r];
}

// s[lane * ld + key] of four lanes and kWidth keys, from from[key * from_ld + lane].
SPARSE_ATTN_INLINE void store_by_lane(const float* from, int64_t from_ld, float* s, int64_t ld) {
  Floats x[kFour];
#pragma GCC unroll 4
  for (int j = 0; j < kFour; ++j) {
    const char* rows[kWidth / 4];
    for (int i = 0; i < kWidth / 4; ++i)
      rows[i] = reinterpret_cast<const char*>(from + (4 * i + j) * from_ld);
    x[j] = load_fours(rows, 0);
  }
  transpose_fours(x);
#pragma GCC unroll 4
  for (int j = 0; j < kFour; ++j) store(s + j * ld, x[j]);
}

template <class Mode>
class AmxSelect {
 public:
  // `heads`: of a list, where they are joined.
  AmxSelect(int64_t heads, Carver* carver)
      : sums_(carver->take<float>(kKeys * round_up(heads, kPanel))) {}

  // How often the fetcher is stepped for kKeys keys.
  static int64_t fetches(int64_t panels, int64_t steps) { return panels * (steps / kRegister); }

  // Products of kKeys keys with all heads.
  template <class Fetcher>
  void multiply_heads(const KeyRows* keys, const JoinedHeads& heads, int64_t steps,
                      Fetcher& fetcher) {
    for (int32_t i = 0; i < heads.panels; ++i) {
      amx_scores<Mode, 2>(keys, heads.q + i * kPanel * steps, kPanel, steps,
                          sums_ + i * kKeys * kPanel, kPanel, fetcher);
    }
  }

  // s[lane * ld + key]: products of kKeys keys with `lanes` lanes, whose queries are
  // [steps][lanes].
  template <class Fetcher>
  void multiply_lanes(const KeyRows* keys, const float* q, int32_t lanes, int64_t steps, float* s,
                      int64_t ld, Fetcher& fetcher) {
    for (int32_t lane = 0; lane < lanes; lane += kPanel) {
      const auto scores =
          lanes - lane > kRegister ? &amx_scores<Mode, 2, Fetcher> : &amx_scores<Mode, 1, Fetcher>;
      scores(keys, q + lane, lanes, steps, sums_, kPanel, fetcher);
      for (int32_t i = 0; i < kPanel && lane + i < lanes; i += kFour) {
        for (int j = 0; j < kKeys; j += kWidth)
          store_by_lane(sums_ + j * kPanel + i, kPanel, s + (lane + i) * ld + j, ld);
      }
    }
  }

  // See `join_keys`: of the kWidth keys from place i on.
  template <bool kRelu, bool kScaled>
  void join(int i, const JoinedHeads& heads, const float* key_scale, Floats* total) const {
    join_sums<Mode, kRelu, kScaled>(sums_ + i * kPanel, heads, key_scale, total);
  }

 private:
  float* const sums_;  // [panels][kKeys][kPanel]
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
