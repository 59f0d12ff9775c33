// How a block's heads are scored. A lane is a head in one of the block's rows.
#pragma once

#include "rows.h"
#include "select_schedule.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// Lanes that are processed together. Segments are filled up to a multiple of it.
constexpr int32_t kFour = 4;

// Consecutive heads that read the same key head. Its lanes lie side by side, those of a row first.
struct Segment {
  int32_t key_head;
  int32_t head, heads;  // of the block
  int32_t lane, lanes;
};

// Consecutive lists whose heads make up whole segments: their products are found together.
struct Team {
  int32_t list, lists;  // of the block
  int32_t segment, segments;
  int32_t lane, lanes;
};

// Whether products run over heads: where heads fill panels, and their scores are added.
inline bool joins_heads(const SelectParams& p) {
  return (p.score == Score::kReluSum || p.score == Score::kDot) && !p.rounded && !p.bounds &&
         !pools_keys(p) && heads_per_list(p) % kPanel == 0 && p.lists % p.key_heads == 0;
}

class Lanes {
 public:
  Lanes(const SelectParams& p, int32_t first_list, int32_t lists, int32_t rows) : rows_(rows) {
    const int32_t each = heads_per_list(p);
    int32_t key_head_before = -1;
    for (int32_t head = 0; head < lists * each; ++head) {
      const int64_t all = int64_t{1} * first_list * each + head;
      const int32_t key_head = static_cast<int32_t>(all * p.key_heads / p.heads);
      const bool in_list = head % each != 0, in_segment = key_head == key_head_before;
      if (!in_list && (!in_segment || joins_heads(p))) {
        end_segment();
        teams_[team_count_++] = {head / each, 0, segment_count_, 0, count_, 0};
      }
      Team& team = teams_[team_count_ - 1];
      if (!in_list) ++team.lists;
      if (!in_segment || team.segments == 0) {
        end_segment();
        segments_[segment_count_++] = {key_head, head, 0, count_, 0};
        ++team.segments;
      }
      ++segments_[segment_count_ - 1].heads;
      key_head_before = key_head;
    }
    end_segment();
    for (int32_t i = 0; i < team_count_; ++i) {
      const int32_t end = i + 1 < team_count_ ? teams_[i + 1].lane : count_;
      teams_[i].lanes = end - teams_[i].lane;
      if (teams_[i].lanes > largest_team_) largest_team_ = teams_[i].lanes;
    }
    count_ = static_cast<int32_t>(round_up(count_, kWidth));
  }

  // All lanes: whole vectors of them.
  int32_t count() const { return count_; }
  int32_t largest_team() const { return largest_team_; }

  int32_t segments() const { return segment_count_; }
  const Segment& segment(int32_t i) const { return segments_[i]; }
  int32_t teams() const { return team_count_; }
  const Team& team(int32_t i) const { return teams_[i]; }

  // The lane of a segment's head in row r.
  static int32_t lane_of(const Segment& segment, int32_t r, int32_t head) {
    return segment.lane + r * segment.heads + head - segment.head;
  }

  // Calls visit(lane) for heads [begin, end) of the team in row r.
  template <class Visit>
  SPARSE_ATTN_INLINE void visit(const Team& team, int32_t r, int32_t begin, int32_t end,
                                const Visit& visit) const {
    for (int32_t i = team.segment; i < team.segment + team.segments; ++i) {
      const Segment& s = segments_[i];
      const int32_t first = begin > s.head ? begin : s.head;
      const int32_t last = end < s.head + s.heads ? end : s.head + s.heads;
      for (int32_t head = first; head < last; ++head) visit(lane_of(s, r, head));
    }
  }

 private:
  void end_segment() {
    if (segment_count_ == 0 || segments_[segment_count_ - 1].lanes > 0) return;
    Segment& segment = segments_[segment_count_ - 1];
    segment.lanes = static_cast<int32_t>(round_up(int64_t{1} * segment.heads * rows_, kFour));
    count_ += segment.lanes;
  }

  const int32_t rows_;
  int32_t count_ = 0, largest_team_ = 0;
  int32_t segment_count_ = 0, team_count_ = 0;
  Segment segments_[kMaxLanes];
  Team teams_[kMaxLanes];
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
