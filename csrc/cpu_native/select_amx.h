// The products of `select` in AMX's tile registers: keys are one operand, where they lie in memory
// if they are evenly spaced there, and the lanes' queries the other.
//
// A row of sums depends on its own key only, and a column on its lane: neither on how many are
// multiplied together. Unseen keys, and lanes that there are not, may be anything. Denormal
// elements count as zero, as they do in products of vectors of bf16.
#pragma once

#include "micro_amx.h"
#include "select_lanes.h"
#include "select_products.h"
#include "select_tiles.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

template <class Mode>
class AmxSelect;

// Bf16, and integers, in tile registers. A step of four bytes is a row of the queries' register.
struct Bf16Tiles : Bf16Amx<AmxSelect<Bf16Tiles>> {
  template <int kC, int kA, int kB>
  static SPARSE_ATTN_INLINE void multiply() {
    amx_dot_bf16<kC, kA, kB>();
  }
};

struct Int8Tiles {
  static constexpr bool kAmx = true;
  static constexpr int kSteps = kAmxRows;
  typedef AmxRegisters Registers;
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
// `q`: [steps][width] of four bytes, steps whole registers. Calls `between.fetch()` after each
// product, and `between.join()` after each register of steps.
template <class Mode, int kColumns, class Between>
SPARSE_ATTN_APART void amx_scores(const KeyRows* keys, const float* q, int64_t width, int64_t steps,
                                  float* s, int64_t ld, Between& between) {
  static_assert(kColumns <= 2, "registers: four sums, two tiles of each operand");
  constexpr int kA = 4, kB = 6;
  const char *first = keys[0].at, *second = keys[1].at;
  const int64_t first_stride = keys[0].stride, second_stride = keys[1].stride;
  amx_zero<0>();
  amx_zero<1>();
  if (kColumns > 1) amx_zero<2>();
  if (kColumns > 1) amx_zero<3>();
  for (int64_t step = 0; step < steps; step += kAmxRows, q += kAmxRows * width) {
    amx_load<kB>(q, width * 4);
    amx_load<kA>(first + 4 * step, first_stride);
    Mode::template multiply<0, kA, kB>();
    between.fetch();
    amx_load<kA + 1>(second + 4 * step, second_stride);
    Mode::template multiply<1, kA + 1, kB>();
    between.fetch();
    if (kColumns > 1) {
      amx_load<kB + 1>(q + kAmxRows, width * 4);
      Mode::template multiply<2, kA, kB + 1>();
      between.fetch();
      Mode::template multiply<3, kA + 1, kB + 1>();
      between.fetch();
    }
    between.join();
  }
  const int64_t stride = ld * 4;
  amx_store<0>(s, stride);
  amx_store<1>(s + kAmxRows * ld, stride);
  if (kColumns > 1) amx_store<2>(s + kAmxRows, stride);
  if (kColumns > 1) amx_store<3>(s + kAmxRows * ld + kAmxRows, stride);
}

// The products of kKeys keys with a list's heads in a row, panel i at i * kKeys * kPanel, which
// become scores.
struct AmxSums {
  const float* sums;
  JoinedHeads heads;
};

// What `join_keys` does: of kCount keys from key `first` on. key_scale: of key 0.
template <class Mode, bool kRelu, bool kScaled, int kCount>
SPARSE_ATTN_INLINE void join_sums(const AmxSums& from, int first, const float* key_scale,
                                  Floats* total) {
  constexpr bool kIntegers = Mode::kGroup == 4;
  Floats joined[kCount] = {};
  const float* s = from.sums + first * kPanel;
  for (int32_t i = 0; i < from.heads.panels; ++i, s += kKeys * kPanel) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const int32_t lane = i * kPanel + j * kWidth;
      const Floats w = load(from.heads.weights + lane);
      Floats q_scale = {};
      if (kIntegers) q_scale = load(from.heads.q_scales + lane);
#pragma GCC unroll 16
      for (int r = 0; r < kCount; ++r) {
        Floats x = load(s + r * kPanel + j * kWidth);
        if (kIntegers) x = __builtin_convertvector((Ints)x, Floats) * q_scale;
        if (kScaled) x *= broadcast(key_scale[first + r]);
        if (kRelu) x = max(Floats{}, x);
        joined[r] = fma(w, x, joined[r]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kCount; ++r) total[r] = joined[r];
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
      : sums_size_(kKeys * round_up(heads, kPanel)),
        sums_(carver->take<float>(2 * sums_size_)),
        totals_(carver->take<float>(kKeys * kWidth)) {}

  // Products of kKeys keys with all heads. Those before are joined meanwhile: vectors of floats and
  // tile registers are multiplied at the same time, but processors do not look ahead far enough to
  // find what is independent.
  template <bool kRelu, class Fetcher>
  void multiply_heads(const KeyRows* keys, const JoinedHeads& heads, int64_t steps,
                      Fetcher& fetcher) {
    float* const to = sums_ + (last_.sums == sums_ ? sums_size_ : 0);
    const int64_t calls = heads.panels * (steps / kRegister);
    Between<kRelu, Fetcher> between = {last_, totals_, last_.sums ? 0 : kKeys,
                                       (kKeys / kTogether + calls - 1) / calls, fetcher};
    for (int32_t i = 0; i < heads.panels; ++i) {
      amx_scores<Mode, 2>(keys, heads.q + i * kPanel * steps, kPanel, steps,
                          to + i * kKeys * kPanel, kPanel, between);
    }
    before_ = last_;
    last_ = {to, heads};
  }

  // Joins those that were multiplied last.
  template <bool kRelu>
  void join_last() {
    NoFetcher none;
    Between<kRelu, NoFetcher> rest = {last_, totals_, 0, kKeys / kTogether, none};
    rest.join();
    before_ = last_;
    last_.sums = nullptr;
  }

  // Scores of the kWidth keys from key i on of those that were joined last.
  Floats joined(int i) const {
    Floats total[kWidth];
#pragma GCC unroll 16
    for (int r = 0; r < kWidth; ++r) total[r] = load(totals_ + (i + r) * kWidth);
    return add_across(total);
  }

  // The same from products that are multiplied by the scales of their keys.
  template <bool kRelu>
  Floats joined_scaled(int i, const float* key_scale) const {
    Floats total[kWidth];
    join_sums<Mode, kRelu, true, kWidth>(before_, i, key_scale, total);
    return add_across(total);
  }

  // s[lane * ld + key]: products of kKeys keys with `lanes` lanes, whose queries are
  // [steps][lanes].
  template <class Fetcher>
  void multiply_lanes(const KeyRows* keys, const float* q, int32_t lanes, int64_t steps, float* s,
                      int64_t ld, Fetcher& fetcher) {
    Fetches<Fetcher> between = {fetcher};
    for (int32_t lane = 0; lane < lanes; lane += kPanel) {
      const auto scores = lanes - lane > kRegister ? &amx_scores<Mode, 2, Fetches<Fetcher>>
                                                   : &amx_scores<Mode, 1, Fetches<Fetcher>>;
      scores(keys, q + lane, lanes, steps, sums_, kPanel, between);
      for (int32_t i = 0; i < kPanel && lane + i < lanes; i += kFour) {
        for (int j = 0; j < kKeys; j += kWidth)
          store_by_lane(sums_ + j * kPanel + i, kPanel, s + (lane + i) * ld + j, ld);
      }
    }
  }

 private:
  static constexpr int kTogether = 4;  // keys that are joined at a time

  template <class Fetcher>
  struct Fetches {
    Fetcher& fetcher;

    SPARSE_ATTN_INLINE void fetch() { fetcher.step(); }
    void join() {}
  };

  template <bool kRelu, class Fetcher>
  struct Between {
    const AmxSums& sums;
    float* totals;
    int key;
    int64_t times;  // in a call
    Fetcher& fetcher;

    SPARSE_ATTN_INLINE void fetch() { fetcher.step(); }

    SPARSE_ATTN_INLINE void join() {
      for (int64_t i = 0; i < times && key < kKeys; ++i, key += kTogether) {
        Floats total[kTogether];
        join_sums<Mode, kRelu, false, kTogether>(sums, key, nullptr, total);
#pragma GCC unroll 4
        for (int r = 0; r < kTogether; ++r) store(totals + (key + r) * kWidth, total[r]);
      }
    }
  };

  const int64_t sums_size_;
  float* const sums_;                // of two blocks of keys
  float* const totals_;              // [kKeys][kWidth]
  AmxSums last_ = {}, before_ = {};  // those multiplied last, and those joined last
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
