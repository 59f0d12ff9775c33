// The kernel of `select`, compiled once for each instruction set. The including file defines
// SPARSE_ATTN_ISA, the namespace, and SPARSE_ATTN_SELECT_KERNELS, the name of the table of entry
// points.
//
// Lists that read the same keys are found together. Four steps of a key at a time are multiplied
// with those of a few queries (`qk_fours`), a lane's products lie side by side, and are joined with
// those of other heads key by key. Where heads fill panels and their scores are added, queries are
// transposed instead, once: products of a key run over heads, and are joined as they come. Tile
// registers (select_amx.h) take both kinds.
#pragma once

#include <algorithm>

#include "best_cut.h"
#if defined(__AMX_BF16__)
#include "select_amx.h"
#endif
#include "select_keys.h"
#include "select_pooling.h"
#include "select_products.h"
#include "select_softmax.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

constexpr double kLog2E = 1.44269504088896341;

// Floats that are kept of a tile: what the products of each lane have become, and their maxima.
inline int64_t kept_floats_of_tile(int64_t lanes) { return lanes * (kTile + 1); }

template <class Mode>
class Scorer {
 public:
  static int64_t scratch_bytes(const SelectParams& p, const SelectBlock& block) {
    Carver carver(nullptr);
    Scorer scorer(p, block, &carver);
    return carver.taken();
  }

  Scorer(const SelectParams& p, const SelectBlock& block, Carver* carver)
      : p_(p),
        block_(block),
        lanes_(p, block.list, block.lists, block.rows),
        heads_(heads_per_list(p)),
        multiplies_fours_(!joins_heads(p) && !p.rounded && !p.bounds),
        keys_(p, block, carver),
        amx_(heads_, carver),
        tiles_(p, block, lanes_.segment(0).key_head) {
    const int64_t dim = round_up(p.dim, kPanel), lanes = lanes_.count();
    const bool softmax = p.score == Score::kSoftmaxSum;
    q_ = carver->take<const char*>(lanes);
    q_buffer_ = carver->take<Element>(p.q_format != Mode::kFormat ? lanes * dim : 0);
    q_packed_ = carver->take<float>(packed_floats());
    panel_ = carver->take<float>(p.rounded || p.bounds ? 2 * kPanel * dim : 0);
    weights_ = carver->take<float>(lanes);
    q_scales_ = carver->take<float>(lanes);
    starts_ = carver->take<int32_t>(Mode::kGroup == 4 && !kAmx ? lanes : 0);
    factors_ = carver->take<float>(softmax ? lanes : 0);
    chunk_sums_ = carver->take<float>(softmax ? 2 * lanes : 0);
    tile_sums_ = carver->take<float>(softmax ? 2 * lanes : 0);
    buffer_ = carver->take<float>((joins_heads(p) ? block.rows : lanes_.largest_team()) * kTile);
    const int64_t lists = block.lists * block.rows;
    units_ = carver->take<Pooling>(pools_scores() ? lists : 0);
    blocks_ = carver->take<Pooling>(p.candidate_k > 0 ? lists : 0);
    ld_ = dim;
  }

  bool sum(PlaceQueue* queue, float* kept, float* into, int64_t step) {
    [[maybe_unused]] const typename Mode::Registers registers;
    prepare();
    const Sums sums = sums_at(chunk_sums_, lanes_.count());
    int64_t chunk = -1;
    const auto merge_chunk = [&] {
      if (chunk < 0) return;
      float* to = into + (chunk - block_.first_chunk()) * step;
      merge_into(sums_at(to, lanes_.count()), sums, lanes_.count());
    };
    const bool paged = for_tiles(queue, true, [&] {
      if (tile_->base / kChunk != chunk) {
        merge_chunk();
        clear(sums, lanes_.count());
        chunk = tile_->base / kChunk;
      }
      float* tile_kept = kept_of_tile(kept);
      const Sums tile_sums = sums_at(tile_sums_, lanes_.count());
      clear(tile_sums, lanes_.count());
      for (int32_t i = 0; i < lanes_.teams(); ++i) {
        const Team& team = lanes_.team(i);
        float* products = tile_kept ? tile_kept + team.lane * kTile : buffer_;
        if (!multiply(team, products)) return false;
        softmax(team, products, tile_sums);
      }
      if (tile_kept) {
        memcpy(tile_kept + lanes_.count() * kTile, tile_sums.maximum,
               static_cast<size_t>(lanes_.count()) * 4);
      }
      merge_into(sums, tile_sums, lanes_.count());
      return true;
    });
    merge_chunk();
    return paged;
  }

  bool score(int32_t first_list, int32_t lists, PlaceQueue* queue, float* kept, const float* into,
             uint64_t* spare, RowBest* best) {
    [[maybe_unused]] const typename Mode::Registers registers;
    prepare();
    const float* maximum = into;
    const int32_t last_list = first_list + lists;
    const auto for_lists = [&](const auto& visit) {
      for (int32_t list = first_list; list < last_list; ++list) {
        for (int32_t r = 0; r < block_.rows; ++r) visit(list, r);
      }
    };
    if (p_.score == Score::kSoftmaxSum) {
      divide_weights(into);
      clear(sums_at(tile_sums_, lanes_.count()), lanes_.count());
    }
    for_lists([&](int32_t list, int32_t r) {
      open_pooling(list, r, &best[(list - first_list) * kMaxRows + r]);
    });
    const bool multiplies = !kept || p_.score != Score::kSoftmaxSum;
    const auto close = [&](int32_t list, int32_t r) { close_pooling(list, r, spare); };
    const bool paged = for_tiles(queue, multiplies, [&] {
      if (!tile_->follows) for_lists(close);
      float* tile_kept = multiplies ? nullptr : kept_of_tile(kept);
      if (tile_kept) {
        scale_weights(weights_, tile_kept + lanes_.count() * kTile, maximum, lanes_.count(),
                      factors_);
      }
      for (int32_t i = 0; i < lanes_.teams(); ++i) {
        const Team& team = lanes_.team(i);
        const int32_t first = std::max(first_list, team.list);
        const int32_t last = std::min(last_list, team.list + team.lists);
        if (first >= last) continue;
        float* products = tile_kept ? tile_kept + team.lane * kTile : buffer_;
        if (tile_kept) {  // what follows is too short for processors to fetch it by themselves
          const float* next = products + kept_floats_of_tile(lanes_.count());
          for (int at = 0; at < team.lanes * kTile; at += 64 / 4)
            prefetch(reinterpret_cast<const char*>(next + at));
        } else {
          if (!multiply(team, products)) return false;
          if (p_.score == Score::kSoftmaxSum) {
            const Sums tile_sums = sums_at(tile_sums_, lanes_.count());
            softmax(team, products, tile_sums);
            scale_weights(weights_, tile_sums.maximum, maximum, lanes_.count(), factors_);
          }
        }
        for (int32_t list = first; list < last; ++list) {
          for (int32_t r = 0; r < block_.rows; ++r) {
            const EntryRange places = places_in_tile(r);
            if (places.low >= places.high) continue;
            const float* scores = joins_heads(p_) ? products + r * kTile : scores_;
            if (!joins_heads(p_)) join(team, list, r, products);
            hand_on(list, r, places, scores, spare, &best[(list - first_list) * kMaxRows + r]);
          }
        }
      }
      return true;
    });
    for_lists(close);
    return paged;
  }

 private:
  typedef typename Mode::Element Element;

  static constexpr bool kAmx = Mode::kAmx;

  // Steps of four bytes of a packed query; what is multiplied together is whole.
  int64_t steps() const {
    const int64_t steps = (p_.dim + Mode::kGroup - 1) / Mode::kGroup;
    return round_up(steps, multiplies_fours_ && !kAmx ? 4 : Mode::kSteps);
  }

  int64_t packed_floats() const {
    if (!multiplies_fours_ && !joins_heads(p_)) return 0;
    // Registers take what follows few lanes too.
    return lanes_.count() * steps() + (kAmx ? kRegister : 0);
  }

  bool pools_scores() const { return pools(p_) && !pools_keys(p_); }

  float* kept_of_tile(float* kept) const {
    const int64_t tile = tile_->base / kTile - block_.first_chunk() * (kChunk / kTile);
    return kept ? kept + tile * kept_floats_of_tile(lanes_.count()) : nullptr;
  }

  void prepare() {
    keys_.init();
    for (int32_t lane = 0; lane < lanes_.count(); ++lane) {
      q_[lane] = keys_.zeros();
      weights_[lane] = q_scales_[lane] = 0;
    }
    if (kAmx) memset(q_packed_, 0, static_cast<size_t>(packed_floats()) * 4);
    for (int32_t i = 0; i < lanes_.segments(); ++i) {
      const Segment& segment = lanes_.segment(i);
      for (int32_t r = 0; r < block_.rows; ++r) {
        for (int32_t head = segment.head; head < segment.head + segment.heads; ++head)
          prepare_lane(Lanes::lane_of(segment, r, head), block_.row[r].row,
                       block_.list * heads_ + head);
      }
      if (multiplies_fours_) pack_fours(segment);
    }
    for (int32_t lane = 0; joins_heads(p_) && lane < lanes_.count(); lane += kWidth) {
      const int32_t panel = lane / kPanel * kPanel;
      float* to = q_packed_ + panel * steps() + (lane - panel);
      pack_queries<Mode>(q_ + lane, p_.dim, to, kPanel);
    }
  }

  void prepare_lane(int32_t lane, int64_t row, int32_t head) {
    const char* q = p_.q + row * p_.q_strides[0] + head * p_.q_strides[1];
    q_[lane] = q;
    const auto read = [=](const char* numbers, Format format, const int64_t* strides, float* to) {
      *to = 1;
      if (!numbers) return;
      const char* at = numbers + row * strides[0] + head * strides[1];
      convert_row(codec_of(format).element, at, 1, to);
    };
    read(p_.weights, p_.weight_format, p_.weight_strides, weights_ + lane);
    read(p_.q_scale, p_.q_scale_format, p_.q_scale_strides, q_scales_ + lane);
    if constexpr (Mode::kGroup == 1) {
      if (p_.q_format == Mode::kFormat) return;
      float* converted = q_buffer_ + lane * ld_;
      convert_row(codec_of(p_.q_format).element, q, p_.dim, converted);
      for (int32_t d = 0; p_.q_scale && d < p_.dim; ++d) converted[d] *= q_scales_[lane];
      q_[lane] = reinterpret_cast<const char*>(converted);
    }
#if defined(__AVX512VNNI__)
    if constexpr (Mode::kGroup == 4 && !kAmx) {
      int32_t sum = 0;
      for (int32_t d = 0; d < p_.dim; ++d) sum += reinterpret_cast<const int8_t*>(q)[d];
      starts_[lane] = -Int8::kMove * sum;
    }
#endif
  }

  // Lanes of a vector of `qk_fours`. Two vectors are multiplied at a time, as long as there are
  // two.
  static constexpr int32_t kLanes = kWidth / 4;

  // Packs a segment's queries as `qk_fours` takes them.
  void pack_fours(const Segment& segment) {
    float* const packed = q_packed_ + segment.lane * steps();
    if (kAmx) {
      const int64_t bytes = p_.dim * static_cast<int64_t>(sizeof(Element));
      for (int32_t i = 0; i < segment.lanes; ++i) {
        const char* from = q_[segment.lane + i];
        float* to = packed + i;
        for (int64_t at = 0; at < bytes; at += 4, to += segment.lanes)
          memcpy(to, from + at, static_cast<size_t>(bytes - at < 4 ? bytes - at : 4));
      }
      return;
    }
    memset(packed, 0, static_cast<size_t>(segment.lanes * steps()) * 4);
    const int32_t pairs = segment.lanes / (2 * kLanes) * 2 * kLanes;  // lanes in pairs of vectors
    for (int32_t i = 0; i < segment.lanes; ++i) {
      const int32_t together = i < pairs ? 2 * kLanes : kLanes;
      float* to = packed + i / together * together * steps() + i % together * 4;
      for (int32_t d = 0; d < p_.dim; d += 4 * Mode::kGroup, to += together * 4) {
        const int32_t count = p_.dim - d < 4 * Mode::kGroup ? p_.dim - d : 4 * Mode::kGroup;
        memcpy(to, q_[segment.lane + i] + d * static_cast<int64_t>(sizeof(Element)),
               static_cast<size_t>(count) * sizeof(Element));
      }
    }
  }

  // The places of row r in the tile.
  EntryRange places_in_tile(int32_t r) const {
    const EntryRange& places = block_.row[r].places;
    return {places.low - tile_->base > 0 ? places.low - tile_->base : 0,
            places.high - tile_->base < kTile ? places.high - tile_->base : kTile};
  }

  // Visits the tiles of the queue's places that some row scores until a visit is false. False if
  // one is, and if an entry has no page. Keys are found if they are to be multiplied.
  template <class Visit>
  bool for_tiles(PlaceQueue* queue, bool multiplies, const Visit& visit) {
    const bool paged = multiplies && !pools_keys(p_);
    tiles_.open(queue, paged);
    SelectTile tiles[2];
    bool more = tiles_.next(&tiles[0]);
    if (more && paged && (kAmx || !joins_heads(p_))) {
      fetcher_.open(p_, lanes_, &tiles[0], 1);
      fetcher_.finish();
    }
    for (int i = 0; more; i = 1 - i) {
      tile_ = &tiles[i];
      more = tiles_.next(&tiles[1 - i]);
      if (tiles_.failed()) return false;
      next_tile_ = more && paged ? &tiles[1 - i] : nullptr;
      fetcher_.open(p_, lanes_, joins_heads(p_) && !kAmx ? nullptr : next_tile_, steps_of_tile());
      if (!visit()) return false;
    }
    return !tiles_.failed();
  }

  // How often `fetcher_` is stepped while the keys of a whole tile are multiplied, at least.
  int64_t steps_of_tile() const {
    if constexpr (kAmx) {
      int64_t registers = 0;
      for (int32_t i = 0; i < lanes_.segments(); ++i)
        registers += (lanes_.segment(i).lanes + kRegister - 1) / kRegister;
      return registers * (kTile / kRegister) * (steps() / kRegister);
    }
    if (joins_heads(p_)) return int64_t{1} * block_.lists * block_.rows * kTile / kQkRows;
    if (!multiplies_fours_) return int64_t{1} * lanes_.segments() * kTile / kPanel;
    const int64_t step = 4 * Mode::kGroup;
    const int64_t vectors = lanes_.count() / kLanes * (kTile / (2 * kQkRows));
    return vectors * (p_.dim / step) > 0 ? vectors * (p_.dim / step) : 1;
  }

  // Products of a team's lanes with the tile; scores of the rows, where heads are joined. False if
  // an entry has no page.
  bool multiply(const Team& team, float* products) {
    if constexpr (kAmx) {
      if (joins_heads(p_)) {
        p_.score == Score::kDot ? join_in_registers<false>(team, products)
                                : join_in_registers<true>(team, products);
        return true;
      }
    }
    for (int32_t i = team.segment; i < team.segment + team.segments; ++i) {
      const Segment& segment = lanes_.segment(i);
      if (pools_keys(p_) && !keys_.pool(*tile_, tiles_, segment.key_head)) return false;
      float* s = products + (segment.lane - team.lane) * kTile;
      for (int n = tile_->first; n < tile_->last; n += kKeys) {
        if (!pools_keys(p_)) keys_.read(*tile_, n, segment.key_head);
        if constexpr (!kAmx) {
          if (joins_heads(p_)) {
            for (int32_t r = 0; r < block_.rows; ++r) join_heads(team, r, n, products + r * kTile);
            continue;
          }
        }
        if (multiplies_fours_) {
          multiply_fours(segment, n, s + n);
        } else if constexpr (Mode::kGroup == 1) {
          for (int j = n; j < n + kKeys; j += kPanel) multiply_panel(segment, j, s + j);
        }
        if (p_.rounded || !keys_.scales_rows() || pools_keys(p_)) continue;
        for (int32_t lane = 0; lane < segment.lanes; ++lane) {
          for (int j = n; j < n + kKeys; j += kWidth) {
            float* at = s + lane * kTile + j;
            store(at, load(at) * load(keys_.scales() + j));
          }
        }
      }
    }
    return true;
  }

  void multiply_fours(const Segment& segment, int n, float* s) {
    const float* q = q_packed_ + segment.lane * steps();
    if constexpr (kAmx) {
      amx_.multiply_lanes(keys_.registers(), q, segment.lanes, steps(), s, kTile, fetcher_);
    } else {
      int32_t lane = 0;
      for (; lane + 2 * kLanes <= segment.lanes; lane += 2 * kLanes)
        multiply_fours<2>(n, q + lane * steps(), s + lane * kTile);
      if (lane < segment.lanes) multiply_fours<1>(n, q + lane * steps(), s + lane * kTile);
    }
  }

  template <int kVectors>
  void multiply_fours(int n, const float* q, float* s) {
    constexpr int kRows = 2 * kQkRows / kVectors;
    static_assert(kKeys % kRows == 0, "keys are multiplied in whole groups");
    for (int i = 0; i < kKeys; i += kRows)
      qk_fours<Mode, kRows, kVectors>(keys_.rows() + n + i, p_.dim, q, false, s + i, kTile,
                                      fetcher_);
  }

  // Rounded products, or bounds, with a panel of keys.
  void multiply_panel(const Segment& segment, int n, float* s) {
    float* const upper = panel_ + kPanel * ld_;
    fetcher_.step();
    pack_panel(keys_.rows() + n, 0, p_.dim, panel_);
    if (p_.bounds) pack_panel(keys_.rows() + n, p_.dim, p_.dim, upper);
    for (int32_t lane = 0; lane < segment.lanes; lane += kFour, s += kFour * kTile) {
      const char* const* q = q_ + segment.lane + lane;
      if (!p_.rounded) {
        qk_bounds<kFour>(q, p_.dim, panel_, upper, s, kTile);
      } else if (p_.bounds) {
        qk_rounded<kFour, true>(q, p_.dim, panel_, upper, keys_.scales() + n, s, kTile);
      } else {
        qk_rounded<kFour, false>(q, p_.dim, panel_, nullptr, keys_.scales() + n, s, kTile);
      }
    }
  }

  // The products of a team become 2^(x - m); leaves the tile's sums.
  void softmax(const Team& team, float* products, const Sums& sums) const {
    const float factor = static_cast<float>(p_.scale * kLog2E);
    const int begin = tile_->first, end = static_cast<int>(round_up(tile_->last, kWidth));
    for (int32_t i = team.segment; i < team.segment + team.segments; ++i) {
      const Segment& segment = lanes_.segment(i);
      for (int32_t lane = 0; lane < segment.lanes; lane += kFour) {
        EntryRange seen[kFour];
        bool mixed = false;
        for (int32_t j = 0; j < kFour; ++j) {
          const int32_t r = (lane + j) / segment.heads;
          seen[j] = r < block_.rows ? places_in_tile(r) : EntryRange{0, 0};
          mixed = mixed || seen[j].low > begin || seen[j].high < end;
        }
        const int32_t at = segment.lane + lane;
        float* s = products + (at - team.lane) * kTile;
        float *maximum = sums.maximum + at, *sum = sums.sum + at;
        if (mixed) {
          softmax_four<true>(s, factor, begin, end, seen, maximum, sum);
        } else {
          softmax_four<false>(s, factor, begin, end, seen, maximum, sum);
        }
      }
    }
  }

  // The weight of each probability becomes that of each 2^(x - M). An infinite maximum leaves
  // probabilities of 0 and NaN, a sum of 0 only NaN.
  void divide_weights(const float* into) {
    const float *maximum = into, *sum = into + lanes_.count();
    for (int32_t lane = 0; lane < lanes_.count(); ++lane) {
      if (maximum[lane] < kInfinity) weights_[lane] /= sum[lane];
    }
  }

  // Joins the products of a list's lanes in row r to scores of the tile.
  void join(const Team& team, int32_t list, int32_t r, const float* products) {
    const auto join_with = [&](Floats start, Floats scale, const auto& with) {
      for (int n = tile_->first; n < tile_->last; n += kWidth) {
        Floats joined = start;
        lanes_.visit(team, r, list * heads_, (list + 1) * heads_, [&](int32_t lane) {
          joined = with(joined, load(products + (lane - team.lane) * kTile + n), lane);
        });
        store(scores_ + n, joined * scale);
      }
    };
    const Floats scale = broadcast(static_cast<float>(p_.scale));
    const auto add_weighted = [&](Floats sum, Floats x, int32_t lane) {
      return fma(broadcast(weights_[lane]), x, sum);
    };
    const auto add_relu = [&](Floats sum, Floats x, int32_t lane) {
      return fma(broadcast(weights_[lane]), max(Floats{}, x), sum);
    };
    switch (p_.score) {
      case Score::kReluSum:
        if (p_.rounded) return join_rounded<true>(team, list, r, products);
        return join_with(Floats{}, scale, add_relu);
      case Score::kDot:
        if (p_.rounded) return join_rounded<false>(team, list, r, products);
        return join_with(Floats{}, scale, add_weighted);
      case Score::kMax:
        return join_with(broadcast(-kInfinity), scale, [&](Floats best, Floats x, int32_t lane) {
          const Floats y = broadcast(weights_[lane]) * x;
          return larger(best, y);
        });
      case Score::kSoftmaxSum:
        return join_with(Floats{}, broadcast(1.0f), [&](Floats sum, Floats e, int32_t lane) {
          return fma(broadcast(factors_[lane]), e, sum);
        });
    }
  }

  JoinedHeads joined_heads(const Team& team, int32_t r) const {
    const int32_t lane = team.lane + r * heads_;
    return {heads_ / kPanel, q_packed_ + lane * steps(), weights_ + lane, starts_ + lane,
            q_scales_ + lane};
  }

  // Scores of row r and kKeys keys.
  void join_heads(const Team& team, int32_t r, int from, float* scores) {
    const JoinedHeads heads = joined_heads(team, r);
    const auto dim = static_cast<int32_t>(Mode::kGroup == 4 ? round_up(p_.dim, 4) : p_.dim);
    constexpr int kStep = kQkRows > kWidth ? kQkRows : kWidth;
    static_assert(kKeys % kStep == 0, "keys are read in whole groups");
    const auto join = [&](const auto& join, int n, float* to) {
      Floats sum[kStep];
      for (int i = 0; i < kStep; i += kQkRows)
        join(keys_.rows() + n + i, dim, heads, keys_.scales() + n + i, ahead(n + i), sum + i);
      for (int i = 0; i < kStep; i += kWidth) store(to + i, add_across(sum + i));
    };
    const bool dot = p_.score == Score::kDot;
    for (int n = from; n < from + kKeys; n += kStep) {
      join(dot ? join_keys<Mode, kQkRows, false, false> : join_keys<Mode, kQkRows, true, false>, n,
           scores + n);
      scale_scores<kStep>(n, scores, [&](float* scaled) {
        join(dot ? join_keys<Mode, kQkRows, false, true> : join_keys<Mode, kQkRows, true, true>, n,
             scaled);
      });
    }
  }

  // Scores of all rows and a tile, from products in tile registers.
  template <bool kRelu>
  void join_in_registers(const Team& team, float* scores) {
    const int32_t key_head = lanes_.segment(team.segment).key_head;
    int joined = -1;
    float* to = nullptr;
    const auto finish = [&] {
      for (int n = joined; n < joined + kKeys; n += kWidth) {
        store(to + n, amx_.joined(n - joined));
        scale_scores<kWidth>(n, to, [&](float* scaled) {
          store(scaled, amx_.template joined_scaled<kRelu>(n - joined, keys_.scales() + joined));
        });
      }
    };
    for (int n = tile_->first; n < tile_->last; n += kKeys) {
      keys_.read(*tile_, n, key_head);
      for (int32_t r = 0; r < block_.rows; ++r) {
        amx_.template multiply_heads<kRelu>(keys_.registers(), joined_heads(team, r), steps(),
                                            fetcher_);
        if (to) finish();
        joined = n;
        to = scores + r * kTile;
      }
    }
    amx_.template join_last<kRelu>();
    finish();
  }

  // Scores of kStep keys from sums over heads. Scales come out of the sums, where they change no
  // product's sign; for others, `join_scaled` finds the sums.
  template <int kStep, class Join>
  SPARSE_ATTN_INLINE void scale_scores(int n, float* scores, const Join& join_scaled) const {
    const Floats scale = broadcast(static_cast<float>(p_.scale));
    for (int i = n; i < n + kStep; i += kWidth) store(scores + i, load(scores + i) * scale);
    if (!keys_.scales_rows()) return;
    auto others = static_cast<uint32_t>(tile_->seen >> n) & ((1u << kStep) - 1);
    for (int i = 0; i < kStep; i += kWidth) {
      const Floats key_scale = load(keys_.scales() + n + i);
      store(scores + n + i, load(scores + n + i) * key_scale);
      others &= ~((greater(key_scale, Floats{}) & greater(broadcast(kInfinity), key_scale)) << i);
    }
    if (!others) return;
    float scaled[kStep];
    join_scaled(scaled);
    for (; others; others &= others - 1)
      scores[n + __builtin_ctz(others)] =
          scaled[__builtin_ctz(others)] * static_cast<float>(p_.scale);
  }

  // Where the keys that follow place n of the tile at some distance lie.
  const char* ahead(int n) const {
    constexpr int kAhead = 32;
    const SelectTile* tile = tile_;
    if ((n += kAhead) >= tile->last) {
      tile = next_tile_;
      n = n > kTile ? n - kTile : 0;  // a tile may end early
    }
    return tile && tile->seen >> n & 1 ? p_.keys.k.data + tile->key[n] : keys_.zeros();
  }

  template <bool kRelu>
  void join_rounded(const Team& team, int32_t list, int32_t r, const float* products) {
    for (int n = tile_->first; n < tile_->last; n += kWidth) {
      Doubles sum[2] = {};
      lanes_.visit(team, r, list * heads_, (list + 1) * heads_, [&](int32_t lane) {
        Floats x = load(products + (lane - team.lane) * kTile + n);
        if (kRelu) x = max(Floats{}, x);
        float term[kWidth];
        store(term, round_to_bf16(x * broadcast(weights_[lane])));
        sum[0] += load_doubles(term);
        sum[1] += load_doubles(term + kDoubles);
      });
      for (int i = 0; i < 2; ++i) store_floats(scores_ + n + i * kDoubles, sum[i] * p_.scale);
      store(scores_ + n, round_to_bf16(load(scores_ + n)));
    }
  }

  void open_pooling(int32_t list, int32_t r, RowBest* best) {
    const SelectRow& row = block_.row[r];
    const int32_t at = list * block_.rows + r;
    if (pools_scores())
      units_[at].open(p_.block, p_.strides, p_.pool == Pool::kSum, row.free, &best->units);
    if (p_.candidate_k == 0) return;
    // All blocks but that of the newest unit, which is returned anyhow.
    const EntryRange others = {0,
                               row.units.high > 0 ? (row.units.high - 1) / p_.candidate_block : 0};
    blocks_[at].open(p_.candidate_block, 1, false, others, &best->blocks);
  }

  void close_pooling(int32_t list, int32_t r, uint64_t* spare) {
    const int32_t at = list * block_.rows + r;
    if (pools_scores()) units_[at].finish(spare);
    if (p_.candidate_k > 0) blocks_[at].finish(spare);
  }

  // Hands the scores of a list at `places` of the tile on to the best of its units and blocks.
  void hand_on(int32_t list, int32_t r, EntryRange places, const float* scores, uint64_t* spare,
               RowBest* best) {
    const int32_t pooling = list * block_.rows + r;
    for (int64_t n = places.low; pools_scores() && n < places.high; ++n)
      units_[pooling].take(tile_->number[n], scores[n], spare);
    for (int64_t n = places.low; p_.candidate_k > 0 && n < places.high; ++n)
      blocks_[pooling].take(tile_->number[n], scores[n], spare);
    if (pools_scores()) return;
    const EntryRange& free = block_.row[r].free;
    while (places.low < places.high && tile_->number[places.low] < free.low) ++places.low;
    while (places.low < places.high && tile_->number[places.high - 1] >= free.high) --places.high;
    static_assert(kTile <= kBestStep, "room for a tile");
    const RowBits taken = row_bits(places.low, places.high);
    Best* units = &best->units;
    make_room(units, spare);
    for (int n = tile_->first; n < tile_->last; n += kWidth)
      add(units, scores + n, tile_->number + n, static_cast<uint32_t>(taken >> n));
  }

  const SelectParams& p_;
  const SelectBlock& block_;
  const Lanes lanes_;
  const int32_t heads_;  // of a list
  const bool multiplies_fours_;
  SelectKeys<Mode> keys_;
  typename Mode::Products amx_;
  SelectTiles tiles_;
  KeyFetcher fetcher_;
  const SelectTile* tile_ = nullptr;
  const SelectTile* next_tile_ = nullptr;
  int64_t ld_;
  const char** q_;
  Element* q_buffer_;
  float* q_packed_;  // for `qk_fours`, or panels of [steps][kPanel]
  float* panel_;     // of keys; then that of upper bounds
  float* weights_;
  float* q_scales_;
  int32_t* starts_;  // of sums of integers
  float* factors_;
  float* chunk_sums_;
  float* tile_sums_;
  float* buffer_;  // [lanes of a team][kTile]
  Pooling *units_, *blocks_;
  alignas(64) float scores_[kTile];
};

// bf16 products where queries are bf16 and keys, but for the scales of rows, are too.
#if defined(SPARSE_ATTN_BF16)
inline bool computes_in_bf16(const SelectParams& p) {
  const Number type = p.keys.k.type;
  return p.q_format == Format::kBf16 && !p.rounded && !p.bounds && !pools_keys(p) &&
         type != Number::kFp32 && type != Number::kFp16;
}
#endif

// Products of integers where queries and keys are, but for the scales of heads and rows.
#if defined(__AVX512VNNI__)
inline bool computes_in_int8(const SelectParams& p) {
  return p.q_format == Format::kInt8 && p.keys.k.type == Number::kInt8 && p.keys.group == 0 &&
         joins_heads(p);
}
#endif

template <class Use>
SPARSE_ATTN_INLINE auto with_mode(const SelectParams& p, const Use& use) {
#if defined(__AMX_BF16__)
  if (computes_in_int8(p)) return use(Int8Tiles());
  if (computes_in_bf16(p)) return use(Bf16Tiles());
#else
#if defined(__AVX512VNNI__)
  if (computes_in_int8(p)) return use(Int8());
#endif
#if defined(SPARSE_ATTN_BF16)
  if (computes_in_bf16(p)) return use(Bf16());
#endif
#endif
  (void)p;
  return use(F32());
}

int64_t lanes_of(const SelectParams& p, const SelectBlock& block) {
  return Lanes(p, block.list, block.lists, block.rows).count();
}

SelectSizes sizes(const SelectParams& p, const SelectBlock& block) {
  const bool softmax = p.score == Score::kSoftmaxSum;
  const int64_t lanes = lanes_of(p, block);
  const int64_t bytes =
      with_mode(p, [&](auto mode) { return Scorer<decltype(mode)>::scratch_bytes(p, block); });
  return {bytes, softmax ? 2 * lanes : 0,
          softmax ? kChunk / kTile * kept_floats_of_tile(lanes) : 0};
}

void clear(const SelectParams& p, const SelectBlock& block, float* sums) {
  const int64_t lanes = lanes_of(p, block);
  clear(sums_at(sums, lanes), lanes);
}

void merge(const SelectParams& p, const SelectBlock& block, float* from, float* sums) {
  const int64_t lanes = lanes_of(p, block);
  merge_into(sums_at(sums, lanes), sums_at(from, lanes), lanes);
}

bool sum(const SelectParams& p, const SelectBlock& block, PlaceQueue* queue, char* scratch,
         float* kept, float* sums, int64_t step) {
  Carver carver(scratch);
  return with_mode(p, [&](auto mode) {
    Scorer<decltype(mode)> scorer(p, block, &carver);
    return scorer.sum(queue, kept, sums, step);
  });
}

bool score(const SelectParams& p, const SelectBlock& block, int32_t first_list, int32_t lists,
           PlaceQueue* queue, char* scratch, float* kept, const float* sums, uint64_t* spare,
           RowBest* best) {
  Carver carver(scratch);
  return with_mode(p, [&](auto mode) {
    Scorer<decltype(mode)> scorer(p, block, &carver);
    return scorer.score(first_list, lists, queue, kept, sums, spare, best);
  });
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA

extern const SelectKernels SPARSE_ATTN_SELECT_KERNELS = {
    SPARSE_ATTN_ISA::sizes,    SPARSE_ATTN_ISA::clear, SPARSE_ATTN_ISA::sum,
    SPARSE_ATTN_ISA::merge,    SPARSE_ATTN_ISA::score, SPARSE_ATTN_ISA::cut,
    SPARSE_ATTN_ISA::add_step, SPARSE_ATTN_ISA::join};

}  // namespace sparse_attn
