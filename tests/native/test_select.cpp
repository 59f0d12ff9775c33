// `select` of csrc/cpu_native on random hostile calls, against plain loops in double precision.
//
// Every tensor is an allocation of exactly its size. Entries that no row sees hold NaN, page tables
// hold rubbish outside of what is seen.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <vector>

#include "common/decode.h"
#include "common/number.h"
#include "cpu_native/select.h"
#include "hostile.h"

namespace {

using namespace sparse_attn;

constexpr int64_t kSizes[] = {1, 3, 8, 16, 32, 48, 64};

// Numbers in a format, which read back exactly: integers of 8 bits are of any size, others normal.
struct Numbers {
  Numbers(int64_t count, Format format_) : format(format_) {
    bytes.assign(static_cast<size_t>(count * size()), '\xff');  // NaN, but for integers
    bytes.shrink_to_fit();
  }

  int64_t size() const { return number_bits(type()) / 8; }
  Number type() const { return codec_of(format).element; }

  void set(int64_t i, float x) {
    const uint16_t half = float_to_bf16(x);
    const auto integer = static_cast<int8_t>(x);
    const void* from = &x;
    if (format == Format::kBf16) from = &half;
    if (format == Format::kInt8) from = &integer;
    memcpy(bytes.data() + i * size(), from, static_cast<size_t>(size()));
  }

  void draw(int64_t i) {
    set(i, format == Format::kInt8 ? static_cast<float>(between(-128, 127)) : normal());
  }

  double at(int64_t i) const { return read_number(type(), bytes.data(), i); }

  Format format;
  std::vector<char> bytes;
};

// Scales that make integers about normal. Some keys are zeros, and some change their sign.
float any_scale() {
  const auto size = static_cast<float>(between(2, 10));
  return below(9) == 0 ? 0 : (below(5) ? size : -size) / 740;
}

struct Call {
  SelectParams p;
  std::vector<int32_t> starts, lengths, table;
  std::vector<double> scores;  // [T, lists, longest]
  int64_t longest = 0;
};

// Fails unless the outputs are the best of what each row sees. `error`: of a score.
void check(const Call& c, const char* isa, const std::vector<int32_t>& indices,
           const std::vector<int32_t>& counts, double error) {
  const SelectParams& p = c.p;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t t = c.starts[b]; t < c.starts[b + 1]; ++t) {
      const int64_t seen = std::max<int64_t>(c.lengths[b] - (c.starts[b + 1] - t) + 1, 0);
      for (int64_t list = 0; list < p.lists; ++list) {
        const int64_t at = t * p.lists + list, count = counts[static_cast<size_t>(at)];
        CHECK(count == std::min(seen, p.k), "%s row %d: %d", isa, int(t), int(count));
        const double* scores = c.scores.data() + at * c.longest;
        std::vector<double> sorted(scores, scores + seen);
        std::sort(sorted.rbegin(), sorted.rend());
        int64_t before = -1;
        for (int64_t i = 0; i < p.k; ++i) {
          const int64_t index = indices[static_cast<size_t>(at * p.k + i)];
          if (i >= count) {
            CHECK(index == -1, "%s row %d: %d after the list", isa, int(t), int(index));
            continue;
          }
          CHECK(index > before && index < seen, "%s row %d: index %d", isa, int(t), int(index));
          before = index;
          CHECK(scores[index] >= sorted[static_cast<size_t>(count - 1)] - error,
                "%s row %d list %d: entry %d scores %g, the last %g", isa, int(t), int(list),
                int(index), scores[index], sorted[static_cast<size_t>(count - 1)]);
        }
      }
    }
  }
}

void run_case() {
  Call c;
  SelectParams& p = c.p;
  const Format format = below(2) ? Format::kBf16 : Format::kFp32;
  const bool integer_keys = below(2), integers = integer_keys && below(2);
  p.batch = between(1, 3);
  const int64_t size = kSizes[below(7)];
  p.lists = static_cast<int32_t>(between(1, std::min<int64_t>(128 / size, 5)));
  p.heads = static_cast<int32_t>(p.lists * size);
  p.key_heads = below(3) ? p.lists : below(2) ? p.heads : 1;
  p.dim = static_cast<int32_t>(below(3) ? 8 * between(1, 16) : between(1, 70));
  p.k = between(1, 300);
  p.scale = 0.5;
  p.score = static_cast<Score>(below(4));
  const int64_t page_size = between(1, 70);
  c.starts = {0};
  for (int64_t b = 0; b < p.batch; ++b) {
    c.starts.push_back(c.starts.back() + static_cast<int32_t>(below(4)));
    c.lengths.push_back(static_cast<int32_t>(below(4) ? between(0, 900) : between(0, 5000)));
    c.longest = std::max<int64_t>(c.longest, c.lengths.back());
  }
  p.tokens = c.starts.back();
  p.max_seqlen_q = 4;
  p.max_seq_len = c.longest;
  const int64_t columns = c.longest / page_size + 1, pages = columns * p.batch;
  Numbers keys(pages * page_size * p.key_heads * p.dim, integer_keys ? Format::kInt8 : format);
  Numbers key_scales(integer_keys ? pages * page_size * p.key_heads : 0, Format::kFp32);
  Numbers q(p.tokens * p.heads * p.dim, integers ? Format::kInt8 : format);
  Numbers q_scales(integers ? p.tokens * p.heads : 0, format);
  Numbers weights(p.tokens * p.heads, format);
  for (int64_t i = 0; i < p.tokens * p.heads * p.dim; ++i) q.draw(i);
  for (int64_t i = 0; i < p.tokens * p.heads; ++i) weights.draw(i);
  for (int64_t i = 0; integers && i < p.tokens * p.heads; ++i) q_scales.set(i, any_scale());
  std::vector<int32_t> order(static_cast<size_t>(pages));
  for (int64_t i = 0; i < pages; ++i) order[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  std::shuffle(order.begin(), order.end(), generator);
  c.table.assign(static_cast<size_t>(pages), INT32_MIN);
  c.scores.assign(static_cast<size_t>(p.tokens * p.lists * c.longest), 0);
  const int64_t heads = p.heads / p.lists;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t e = 0; e < c.lengths[b]; ++e) {
      const int64_t column = b * columns + e / page_size;
      const int64_t page = c.table[static_cast<size_t>(column)] =
          order[static_cast<size_t>(column)];
      const int64_t entry = (page * page_size + e % page_size) * p.key_heads * p.dim;
      for (int64_t i = 0; i < p.key_heads * p.dim; ++i) keys.draw(entry + i);
      for (int64_t i = 0; integer_keys && i < p.key_heads; ++i)
        key_scales.set(entry / p.dim + i, any_scale());
    }
    for (int64_t t = c.starts[b]; t < c.starts[b + 1]; ++t) {
      const int64_t seen = std::max<int64_t>(c.lengths[b] - (c.starts[b + 1] - t) + 1, 0);
      for (int64_t h = 0; h < p.heads; ++h) {
        std::vector<double> terms(static_cast<size_t>(seen));
        double sum = 0;
        for (int64_t e = 0; e < seen; ++e) {
          const int64_t page = c.table[static_cast<size_t>(b * columns + e / page_size)];
          const int64_t entry = (page * page_size + e % page_size) * p.key_heads * p.dim;
          const int64_t key = entry + h * p.key_heads / p.heads * p.dim;
          double product = 0;
          for (int64_t d = 0; d < p.dim; ++d)
            product += q.at((t * p.heads + h) * p.dim + d) * keys.at(key + d);
          if (integers) product *= q_scales.at(t * p.heads + h);
          if (integer_keys) product *= key_scales.at(key / p.dim);
          if (p.score == Score::kReluSum) product = std::max(product, 0.0);
          if (p.score == Score::kSoftmaxSum) product = exp(p.scale * product);
          sum += terms[static_cast<size_t>(e)] = product;
        }
        const double weight =
            weights.at(t * p.heads + h) * (p.score == Score::kSoftmaxSum ? 1 / sum : p.scale);
        double* scores = c.scores.data() + (t * p.lists + h / heads) * c.longest;
        for (int64_t e = 0; e < seen; ++e) {
          const double term = weight * terms[static_cast<size_t>(e)];
          scores[e] = p.score != Score::kMax ? scores[e] + term
                      : h % heads > 0        ? std::max(scores[e], term)
                                             : term;
        }
      }
    }
  }
  p.q = q.bytes.data();
  p.q_strides[0] = p.heads * p.dim * q.size();
  p.q_strides[1] = p.dim * q.size();
  p.q_format = q.format;
  if (integers) p.q_scale = q_scales.bytes.data();
  p.q_scale_format = p.weight_format = format;
  p.weights = weights.bytes.data();
  p.q_scale_strides[0] = p.weight_strides[0] = p.heads * weights.size();
  p.q_scale_strides[1] = p.weight_strides[1] = weights.size();
  p.cu_seqlens_q = c.starts.data();
  p.seq_lens = c.lengths.data();
  p.keys.given = true;
  const auto rows_of = [&](const Numbers& numbers, int32_t dim) {
    const int64_t row = dim * numbers.size(), entry = p.key_heads * row;
    return PagedRows{numbers.bytes.data(), page_size * entry, entry, row, dim, numbers.type()};
  };
  p.keys.k = rows_of(keys, p.dim);
  if (integer_keys) p.keys.k_scale = rows_of(key_scales, 1);
  p.keys.pages = pages;
  p.keys.page_size = page_size;
  p.keys.page_table = c.table.data();
  p.keys.page_table_stride = p.keys.max_pages = columns;
  const double error = p.score == Score::kSoftmaxSum
                           ? 1e-5
                           : 1e-4 * static_cast<double>(heads) * sqrt(static_cast<double>(p.dim));
  for (Isa isa : isas_of_machine()) {
    std::vector<int32_t> first;
    for (int32_t threads : {1, 3}) {
      std::vector<int32_t> indices(static_cast<size_t>(p.tokens * p.lists * p.k));
      std::vector<int32_t> counts(static_cast<size_t>(p.tokens * p.lists));
      p.indices = indices.data();
      p.counts = counts.data();
      p.threads = threads;
      p.isa = isa;
      const CallStatus status = select(p);
      CHECK(status.error == CallError::kNone, "%s: error %d", name_of(isa), int(status.error));
      check(c, name_of(isa), indices, counts, error);
      CHECK(threads == 1 || indices == first, "%s: threads change a list", name_of(isa));
      first = indices;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 100;
  for (int i = 0; i < rounds; ++i) run_case();
  printf("passed:");
  for (Isa isa : isas_of_machine()) printf(" %s", name_of(isa));
  printf("\n");
  return 0;
}
