// Scores of entries pooled to those of units.
#pragma once

#include "best_cut.h"
#include "rows.h"
#include "select_schedule.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// Numbers that come one by one, in ascending order and without gaps, pooled by unit: a unit is done
// when a number lies past it.
class Pooling {
 public:
  // Units are `block` strides, of which a number covers `strides`. Those in `free` go to `best`.
  void open(int64_t block, int64_t strides, bool sums, EntryRange free, Best* best) {
    block_ = block;
    strides_ = strides;
    sums_ = sums;
    free_ = free;
    best_ = best;
    units_ = 0;
  }

  void take(int64_t number, float score, uint64_t* spare) {
    if (!(score == score)) score = -kInfinity;
    const int64_t end = number + strides_;
    if (units_ == 0) first_ = number / block_;
    for (; (first_ + 1) * block_ <= number; ++first_, --units_) close(spare);
    for (; (first_ + units_) * block_ < end; ++units_) at(first_ + units_) = sums_ ? 0 : -kInfinity;
    for (int64_t unit = first_; unit < first_ + units_; ++unit) {
      double& value = at(unit);
      if (sums_) {
        const int64_t low = unit * block_ > number ? unit * block_ : number;
        const int64_t high = (unit + 1) * block_ < end ? (unit + 1) * block_ : end;
        value += static_cast<double>(score) * static_cast<double>(high - low);
      } else if (score > value) {
        value = score;
      }
    }
  }

  void finish(uint64_t* spare) {
    for (; units_ > 0; ++first_, --units_) close(spare);
  }

 private:
  double& at(int64_t unit) { return values_[unit % (kMaxStrides + 1)]; }

  void close(uint64_t* spare) {
    if (first_ < free_.low || first_ >= free_.high) return;
    make_room(best_, spare);
    add(best_, static_cast<float>(at(first_)), first_);
  }

  int64_t block_, strides_;
  bool sums_;
  EntryRange free_;
  Best* best_;
  int64_t first_, units_;  // units [first_, first_ + units_) wait for more
  double values_[kMaxStrides + 1];
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
