// Few heads that attend the entries of an index list, multiplied in AMX's tile registers. Most of a
// register stays empty, and yet its products take a small part of the time of those of vectors.
//
// Rows are loaded where they lie, sixteen at a time. Keys are rows of the first operand. Values are
// rows of the second, without being brought into pairs first: a pair of a register is two elements
// of one row, so each lane has two rows of probabilities, of pairs (p, 0) and (0, p), which add up
// elements of even and of odd number.
#pragma once

#include "attend_few.h"
#include "micro_amx.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// Sixteen rows, `stride` bytes apart.
struct AmxRows {
  const char* at;
  int64_t stride;
};

constexpr int kAmxFloats = kAmxRows * kAmxPairs;  // of a register

// Scores of up to two groups of rows with sixteen queries, s[key * kAmxRows + lane]. `q` is [steps]
// registers.
template <int kGroups, class Fetcher>
SPARSE_ATTN_APART void multiply_few_keys(const AmxRows* groups, int64_t steps, const float* q,
                                         float* s, Fetcher& fetcher) {
  const AmxRows first = groups[0], second = groups[kGroups - 1];
  amx_zero<0>();
  if (kGroups > 1) amx_zero<1>();
  for (int64_t k = 0; k < steps; ++k) {
    fetcher.step();
    amx_load<2>(q + k * kAmxFloats, kAmxRowBytes);
    amx_load<3>(first.at + k * kAmxRowBytes, first.stride);
    amx_dot_bf16<0, 3, 2>();
    if (kGroups > 1) {
      amx_load<4>(second.at + k * kAmxRowBytes, second.stride);
      amx_dot_bf16<1, 4, 2>();
    }
  }
  amx_store<0>(s, kAmxRowBytes);
  if (kGroups > 1) amx_store<1>(s + kAmxFloats, kAmxRowBytes);
}

// Products of probabilities, [count] registers, and as many groups of rows from byte `offset` on:
// kColumns registers.
template <int kColumns, class Fetcher>
SPARSE_ATTN_APART void multiply_few_values(const float* p, const AmxRows* groups, int count,
                                           int64_t offset, float* sums, Fetcher& fetcher) {
  static_assert(kColumns <= 4, "registers");
  amx_zero<0>();
  if (kColumns > 1) amx_zero<1>();
  if (kColumns > 2) amx_zero<2>();
  if (kColumns > 3) amx_zero<3>();
  for (int n = 0; n < count; ++n) {
    fetcher.step();
    const char* at = groups[n].at + offset;
    const int64_t stride = groups[n].stride;
    amx_load<4>(p + n * kAmxFloats, kAmxRowBytes);
    amx_load<5>(at, stride);
    amx_dot_bf16<0, 4, 5>();
    if (kColumns > 1) {
      amx_load<6>(at + kAmxRowBytes, stride);
      amx_dot_bf16<1, 4, 6>();
    }
    if (kColumns > 2) {
      fetcher.step();
      amx_load<5>(at + 2 * kAmxRowBytes, stride);
      amx_dot_bf16<2, 4, 5>();
    }
    if (kColumns > 3) {
      amx_load<6>(at + 3 * kAmxRowBytes, stride);
      amx_dot_bf16<3, 4, 6>();
    }
  }
  amx_store<0>(sums, kAmxRowBytes);
  if (kColumns > 1) amx_store<1>(sums + kAmxFloats, kAmxRowBytes);
  if (kColumns > 2) amx_store<2>(sums + 2 * kAmxFloats, kAmxRowBytes);
  if (kColumns > 3) amx_store<3>(sums + 3 * kAmxFloats, kAmxRowBytes);
}

template <int... kLane>
SPARSE_ATTN_INLINE void interleave(Floats x, Floats y, float* to,
                                   std::integer_sequence<int, kLane...>) {
  store(to, __builtin_shufflevector(x, y, (kLane / 2 + kLane % 2 * kWidth)...));
  store(to + kWidth, __builtin_shufflevector(x, y, ((kWidth + kLane) / 2 + kLane % 2 * kWidth)...));
}

template <>
class FewAttention<Bf16> : public ListedAttention<Bf16, FewAttention<Bf16>> {
  typedef ListedAttention<Bf16, FewAttention> Base;
  friend Base;

 public:
  FewAttention(const AttendParams& p, const Block& block, Carver* carver)
      : Base(p, block, carver),
        buffer_ld_(round_up(p.qk_dim > p.v_dim ? p.qk_dim : p.v_dim, kAmxElements)) {
    q_ = carver->take<float>(registers(p.qk_dim) * kAmxFloats);
    scores_ = carver->take<float>(kTile * kAmxRows);
    lanes_ = carver->take<float>(kTile * kFour);
    probabilities_ = carver->take<float>(kGroups * kAmxFloats);
    sums_ = carver->take<float>(kColumns * kAmxFloats);
    odd_sums_ = carver->take<float>(kColumns * kAmxFloats);
    buffer_ = carver->take<char>(kTile * buffer_ld_ * kElement);
  }

 private:
  typedef AmxRegisters Registers;

  static constexpr int kGroups = kTile / kAmxRows;
  static constexpr int kColumns = 4;  // registers of outputs of one call
  static_assert(2 * kMostFew <= kAmxRows, "two rows of probabilities of each lane");
  static_assert(kAmxElements == kPanel, "registers of outputs are panels");

  static int64_t registers(int32_t dim) { return (dim + kAmxElements - 1) / kAmxElements; }

  // Packs the queries, and makes lanes there are not those of zeros.
  void pack() {
    memset(q_, 0, static_cast<size_t>(registers(p_.qk_dim) * kAmxFloats) * 4);
    memset(probabilities_, 0, kGroups * kAmxFloats * 4);
    const char* rows[kAmxRows];
    for (int32_t i = 0; i < kAmxRows; ++i) rows[i] = i < shape_.lanes ? query(i) : zeros_;
    pack_queries<Bf16>(rows, p_.qk_dim, q_, kAmxRows);
  }

  void attend_tile(int64_t tile, const Partial& into) {
    const int32_t count = listed_.count(tile);
    const int groups = (count + kAmxRows - 1) / kAmxRows;
    const int64_t steps = registers(p_.qk_dim), columns = registers(p_.v_dim);
    const int64_t calls = columns / kColumns * 2 + columns % kColumns;
    listed_.open(tile + 1, (groups + 1) / 2 * steps + (fours() + calls) * groups);
    AmxRows rows[kGroups];
    find(listed_.keys(tile), groups, p_.qk_dim, ~0, rows);
    for (int n = 0; n < groups; n += 2) {
      const auto multiply =
          n + 1 < groups ? &multiply_few_keys<2, ListedRows> : &multiply_few_keys<1, ListedRows>;
      multiply(rows + n, steps, q_, scores_ + n * kAmxFloats, listed_);
    }
    alignas(16) float alpha[kMostFew];
    for (int32_t lane = 0; lane < shape_.lanes; lane += kFour)
      softmax(lane, count, {into.maximum + lane, into.sum + lane, alpha + lane});
    multiply_values(listed_.values(tile), groups, alpha, into);
  }

  // Rows as registers take them: where they lie if they lie evenly and fill registers, else copied,
  // and filled up with zeros. Bits that are not to be kept become zeros in copies, and then all are
  // copied.
  void find(const char* const* rows, int groups, int32_t dim, int32_t keep, AmxRows* to) const {
    const auto address = [](const char* row) { return reinterpret_cast<intptr_t>(row); };
    const int64_t ld = buffer_ld_ * kElement;
    for (int n = 0; n < groups; ++n, rows += kAmxRows) {
      const intptr_t stride = address(rows[1]) - address(rows[0]);
      bool even = dim % kAmxElements == 0 && keep == ~0;
      for (int r = 2; r < kAmxRows; ++r)
        even = even & (address(rows[r]) - address(rows[r - 1]) == stride);
      if (even) {
        to[n] = {rows[0], stride};
        continue;
      }
      char* const copied = buffer_ + n * kAmxRows * ld;
      for (int r = 0; r < kAmxRows; ++r) {
        for (int32_t d = 0; d < dim; d += kAmxElements) {
          const char* from = rows[r] + d * kElement;
          const Floats x =
              dim - d < kAmxElements ? load_partial(from, (dim - d) * kElement) : load(from);
          store(copied + r * ld + d * kElement, (Floats)((Ints)x & broadcast_int(keep)));
        }
      }
      to[n] = {copied, ld};
    }
  }

  // One tile's step of the running softmax of four lanes.
  void softmax(int32_t lane, int32_t count, LaneState state) {
    const int groups = (count + kAmxRows - 1) / kAmxRows;
    Ints places;
    for (int i = 0; i < kWidth; ++i) places[i] = i;
    const Floats by = broadcast(factor()), hidden = broadcast(-kInfinity);
    Floats most[kFour] = {hidden, hidden, hidden, hidden};
    for (int n = 0; n < groups; ++n) {
      Floats x[kFour];
#pragma GCC unroll 4
      for (int j = 0; j < kFour; ++j) {
        const char* from[kWidth / 4];
        for (int i = 0; i < kWidth / 4; ++i) {
          const int key = n * kAmxRows + 4 * i + j;
          from[i] = reinterpret_cast<const char*>(scores_ + key * kAmxRows + lane);
        }
        x[j] = load_fours(from, 0);
      }
      transpose_fours(x);
      const Ints seen = places < broadcast_int(count - n * kAmxRows);
#pragma GCC unroll 4
      for (int j = 0; j < kFour; ++j) {
        x[j] = seen ? x[j] * by : hidden;
        store(lanes_ + (n * kFour + j) * kWidth, x[j]);
        most[j] = max(x[j], most[j]);
      }
    }
    const auto join = [](Floats* x, const auto& join_two) {
      transpose_fours(x);
      const Floats all = join_two(join_two(x[0], x[1]), join_two(x[2], x[3]));
      FourFloats four[kWidth / 4];
      memcpy(four, &all, sizeof(all));
      return join_two(join_two(four[0], four[1]), join_two(four[2], four[3]));
    };
    const auto larger = [](auto a, auto b) { return a > b ? a : b; };
    const auto add = [](auto a, auto b) { return a + b; };
    FourFloats before, sum;
    memcpy(&before, state.maximum, sizeof(before));
    memcpy(&sum, state.sum, sizeof(sum));
    const FourFloats maximum = larger(join(most, larger), before);
    Floats maxima[kFour], sums[kFour] = {};
    for (int j = 0; j < kFour; ++j) maxima[j] = broadcast(maximum[j]);
    for (int n = 0; n < groups; ++n) {
      listed_.step();
      float* to = probabilities_ + n * kAmxFloats + 2 * lane * kAmxPairs;
#pragma GCC unroll 4
      for (int j = 0; j < kFour; ++j) {
        const Floats p = exp2(load(lanes_ + (n * kFour + j) * kWidth) - maxima[j]);
        sums[j] += p;
        const Floats odd = round_to_bf16(p);
        store(to + 2 * j * kAmxPairs, (Floats)((Ints)odd >> 16));
        store(to + (2 * j + 1) * kAmxPairs, odd);
      }
    }
    const auto widen = [](const FourFloats& x) {
      return broadcast_fours(reinterpret_cast<const char*>(&x));
    };
    const Floats all_alpha = exp2(widen(before) - widen(maximum));
    FourFloats alpha;
    memcpy(&alpha, &all_alpha, sizeof(alpha));
    sum = sum * alpha + join(sums, add);
    memcpy(state.maximum, &maximum, sizeof(maximum));
    memcpy(state.sum, &sum, sizeof(sum));
    memcpy(state.alpha, &alpha, sizeof(alpha));
  }

  void multiply_values(const char* const* rows, int groups, const float* alpha,
                       const Partial& into) {
    AmxRows values[kGroups];
    find(rows, groups, p_.v_dim, ~0, values);
    const int64_t all = registers(p_.v_dim);
    for (int64_t column = 0, columns; column < all; column += columns) {
      columns = all - column >= kColumns ? kColumns : 1;
      multiply_columns(values, groups, column, columns, sums_, listed_);
      if (!finite(columns)) {
        multiply_apart(rows, groups, column, columns);
        find(rows, groups, p_.v_dim, ~0, values);
      }
      for (int64_t c = 0; c < columns; ++c) {
        float* to = into.o + (column + c) * shape_.padded_lanes * kPanel;
        for (int32_t lane = 0; lane < shape_.lanes; ++lane) add(c, lane, alpha[lane], to);
      }
    }
  }

  template <class Fetcher>
  void multiply_columns(const AmxRows* values, int groups, int64_t column, int64_t columns,
                        float* sums, Fetcher& fetcher) const {
    const auto multiply = columns == kColumns ? &multiply_few_values<kColumns, Fetcher>
                                              : &multiply_few_values<1, Fetcher>;
    multiply(probabilities_, values, groups, column * kAmxRowBytes, sums, fetcher);
  }

  // Whether all sums are. Where a value is not, its neighbour's is not either: zero times infinity.
  bool finite(int64_t columns) const {
    Floats x = {};
    for (int64_t c = 0; c < columns; ++c) {
      for (int32_t row = 0; row < 2 * shape_.lanes; ++row)
        x = fma(load(sums_ + c * kAmxFloats + row * kAmxPairs), Floats{}, x);
    }
    return greater(broadcast(1.0f), x) == (1u << kWidth) - 1;
  }

  // The same sums, of even and of odd elements by themselves.
  void multiply_apart(const char* const* rows, int groups, int64_t column, int64_t columns) {
    NoFetcher none;
    AmxRows values[kGroups];
    find(rows, groups, p_.v_dim, 0xffff, values);
    multiply_columns(values, groups, column, columns, sums_, none);
    find(rows, groups, p_.v_dim, ~0xffff, values);
    multiply_columns(values, groups, column, columns, odd_sums_, none);
    for (int64_t row = 1; row < columns * kAmxRows; row += 2)
      store(sums_ + row * kAmxPairs, load(odd_sums_ + row * kAmxPairs));
  }

  // Adds the sums of a lane to its outputs in a panel.
  void add(int64_t column, int32_t lane, float alpha, float* panel) const {
    const float* from = sums_ + column * kAmxFloats + 2 * lane * kAmxPairs;
    float x[kPanel];
    interleave(load(from), load(from + kAmxPairs), x, std::make_integer_sequence<int, kWidth>());
    for (int d = 0; d < kPanel; d += kWidth) {
      float* to = panel + lane * kPanel + d;
      store(to, fma(broadcast(alpha), load(to), load(x + d)));
    }
  }

  const int64_t buffer_ld_;
  float* q_;              // [steps] registers
  float* scores_;         // [kTile][kAmxRows]
  float* lanes_;          // [kGroups][kFour][kAmxRows]: the same of four lanes
  float* probabilities_;  // [kGroups] registers
  float *sums_, *odd_sums_;
  char* buffer_;
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
