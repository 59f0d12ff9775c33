// Rows of paged planes: where an entry lies.
#pragma once

#include "schedule.h"
#include "simd.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

constexpr int kPanel = 2 * kWidth;  // lanes of a panel of queries, elements of a panel of values

constexpr float kInfinity = __builtin_inff();

constexpr float kNoScore = -3.40282347e38f;  // a running maximum before the first score

constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Hands out aligned parts of one allocation. Without memory it only counts.
class Carver {
 public:
  explicit Carver(char* memory) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    T* part = memory_ ? reinterpret_cast<T*>(memory_ + taken_) : nullptr;
    taken_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return part;
  }

  int64_t taken() const { return taken_; }

 private:
  char* memory_;
  int64_t taken_ = 0;
};

// A bit for each row of a tile.
typedef unsigned __int128 RowBits;

// Bits [low, high); bounds outside of the tile are clipped.
SPARSE_ATTN_INLINE RowBits row_bits(int64_t low, int64_t high) {
  static_assert(kTile == 128, "as many rows as bits");
  if (low < 0) low = 0;
  if (high > kTile) high = kTile;
  if (low >= high) return 0;
  return (~RowBits{0} >> (kTile - (high - low))) << low;
}

// The lowest of some bits, and the place after the highest.
SPARSE_ATTN_INLINE int first_of(RowBits bits) {
  const auto low = static_cast<uint64_t>(bits), high = static_cast<uint64_t>(bits >> 64);
  return low ? __builtin_ctzll(low) : 64 + __builtin_ctzll(high);
}

SPARSE_ATTN_INLINE int end_of(RowBits bits) {
  const auto low = static_cast<uint64_t>(bits), high = static_cast<uint64_t>(bits >> 64);
  return high ? 128 - __builtin_clzll(high) : 64 - __builtin_clzll(low);
}

// Where an entry lies.
struct Place {
  int32_t page, offset;
};

// Finds the page of entries of one sequence. Division by page_size is a multiplication.
class Pager {
 public:
  void open(const PlaneParams& plane, int64_t sequence) {
    page_size_ = plane.page_size;
    inverse_ = page_size_ == 1 ? 0 : UINT64_MAX / static_cast<uint64_t>(page_size_) + 1;
    table_ = plane.page_table + sequence * plane.page_table_stride;
    max_pages_ = plane.max_pages;
    pages_ = plane.pages;
  }

  // False if the entry has no page. `entry` is in [0, 2^31).
  bool find(int64_t entry, Place* place) const {
    int64_t column = entry;
    if (page_size_ != 1) {
      column = static_cast<int64_t>(
          (static_cast<unsigned __int128>(inverse_) * static_cast<uint64_t>(entry)) >> 64);
    }
    if (column >= max_pages_) return false;
    *place = {table_[column], static_cast<int32_t>(entry - column * page_size_)};
    return place->page >= 0 && place->page < pages_;
  }

 private:
  int64_t page_size_ = 1;
  uint64_t inverse_ = 0;
  const int32_t* table_ = nullptr;
  int64_t max_pages_ = 0;
  int64_t pages_ = 0;
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
