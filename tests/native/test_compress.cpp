// `compress` of csrc/cpu_native on random calls, against plain loops in double precision. Every
// tensor is an allocation of exactly its size, so that the address sanitizer sees what is read
// beyond; the state holds NaN in every slot that no needed token has, and columns of page tables
// that no step needs hold rubbish.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/number.h"
#include "cpu_native/compress.h"

namespace {

using namespace sparse_attn;

std::mt19937_64 generator(2);

int64_t between(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(generator() % static_cast<uint64_t>(high - low + 1));
}

std::vector<float> numbers(int64_t count) {
  std::vector<float> x(static_cast<size_t>(count));
  for (float& value : x) value = std::normal_distribution<float>()(generator);
  return x;
}

#define CHECK(condition)                                     \
  do {                                                       \
    if (!(condition)) {                                      \
      printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                               \
    }                                                        \
  } while (0)

struct Pages {
  std::vector<int32_t> table;
  PageTable view;

  // Of one sequence: distinct pages for `entries` entries, and a column of rubbish after them.
  Pages(int64_t entries, int64_t page_size, int64_t pool) {
    std::vector<int32_t> order(static_cast<size_t>(pool));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), generator);
    const auto needed = static_cast<size_t>((entries + page_size - 1) / page_size);
    table.assign(order.begin(), order.begin() + static_cast<int64_t>(needed));
    table.push_back(1 << 30);
    view = {table.data(), 0, static_cast<int64_t>(table.size())};
  }

  int64_t slot(int64_t entry, int64_t page_size) const {
    return table[static_cast<size_t>(entry / page_size)] * page_size + entry % page_size;
  }
};

EntryPlane plane_of(std::vector<float>* data, int64_t pages, int64_t page_size, int64_t heads,
                    int64_t dim) {
  EntryPlane plane;
  plane.pages = pages;
  plane.page_size = page_size;
  plane.heads = heads;
  plane.dim = dim;
  const int64_t strides[3] = {page_size * heads * dim * 4, heads * dim * 4, dim * 4};
  place_parts(&plane, reinterpret_cast<char*>(data->data()), strides, nullptr, strides);
  return plane;
}

void one(Isa isa) {
  const int64_t stride = between(1, 5), parts = between(1, 3), span = stride * parts;
  const bool apart = between(0, 1), gated = between(0, 1), normed = between(0, 1);
  const int64_t dim = between(1, 40), heads = between(1, 3), width = apart ? parts * dim : dim;
  const int64_t length = between(0, 60),
                rotated = std::min<int64_t>(dim / 2 * 2, 2 * between(0, 4));
  const int64_t page_size = between(1, 7), state_page_size = between(1, 7);
  const int64_t entries = length / stride, columns = width * (gated ? 2 : 1);
  const int64_t pool = entries / page_size + 3, state_pool = length / state_page_size + 3;
  const std::vector<float> rows = numbers(length * heads * width);
  const std::vector<float> gates = numbers(length * heads * width);
  const std::vector<float> bias = numbers(stride * width), norm = numbers(dim);
  const std::vector<float> angles = numbers((entries + 1) * stride * rotated);
  std::vector<float> plane(static_cast<size_t>(pool * page_size * heads * dim), 7);
  std::vector<float> state(static_cast<size_t>(state_pool * state_page_size * heads * columns),
                           NAN);
  const Pages pages(entries, page_size, pool), state_pages(length, state_page_size, state_pool);

  for (int64_t done = 0; done < length;) {
    const int64_t count = std::min(between(1, 20), length - done);
    const auto begin = static_cast<size_t>(done * heads * width);
    const auto end = static_cast<size_t>((done + count) * heads * width);
    const auto part = [&](const std::vector<float>& x) {
      auto copy = std::make_unique<float[]>(end - begin);
      std::copy(x.begin() + static_cast<int64_t>(begin), x.begin() + static_cast<int64_t>(end),
                copy.get());
      return copy;
    };
    const auto step_rows = part(rows), step_gates = part(gates);
    const int32_t starts[2] = {0, static_cast<int32_t>(count)};
    const auto after = static_cast<int32_t>(done + count);
    CompressParams p;
    const auto tokens = [&](const float* data) {
      return TokenRows{
          reinterpret_cast<const char*>(data), {heads * width * 4, width * 4}, Format::kFp32};
    };
    p.rows = tokens(step_rows.get());
    if (gated) p.gates = tokens(step_gates.get());
    p.tokens = p.max_seqlen_q = count;
    p.heads = heads;
    p.width = width;
    p.cu_seqlens_q = starts;
    p.seq_lens = &after;
    p.batch = 1;
    p.max_seq_len = after;
    p.plane = plane_of(&plane, pool, page_size, heads, dim);
    p.page_table = pages.view;
    if (span > 1) {
      p.state = plane_of(&state, state_pool, state_page_size, heads, columns);
      p.state_page_table = state_pages.view;
      p.kept = span - 1;
    }
    p.stride = stride;
    p.span = span;
    if (gated) p.bias = bias.data();
    p.bias_stride = width;
    if (normed) p.norm = norm.data();
    p.eps = 0.1f;
    if (rotated > 0) p.cos_sin = angles.data();
    p.cos_sin_stride = p.rotated = rotated;
    p.positions = (entries + 1) * stride;
    p.rope_stride = stride;
    p.isa = isa;
    p.threads = static_cast<int32_t>(between(1, 2));
    std::vector<float> latent(static_cast<size_t>((count / stride + 1) * heads * dim));
    p.latent = reinterpret_cast<char*>(latent.data());
    p.latents = count / stride + 1;
    const CallStatus status = compress(p);
    CHECK(status.error == CallError::kNone);
    done += count;
    for (int64_t i = 0; span > 1 && i + span - 1 < done; ++i) {  // tokens that no step needs again
      const int64_t slot = state_pages.slot(i, state_page_size);
      std::fill_n(state.begin() + slot * heads * columns, heads * columns, NAN);
    }
  }

  for (int64_t entry = 0; entry < entries; ++entry) {
    for (int64_t h = 0; h < heads; ++h) {
      std::vector<double> expected(static_cast<size_t>(dim));
      double squares = 0;
      for (int64_t c = 0; c < dim; ++c) {
        double above = 0, below = 0;
        for (int64_t i = 0; i < span; ++i) {
          const int64_t position = (entry + 1) * stride - span + i;
          if (position < 0) continue;
          const int64_t channel = c + (apart ? i / stride * dim : 0);
          const auto at = static_cast<size_t>((position * heads + h) * width + channel);
          const auto biased = static_cast<size_t>(position % stride * width + channel);
          const double weight = gated ? exp(double{gates[at]} + double{bias[biased]}) : 1.0;
          above += weight * double{rows[at]};
          below += weight;
        }
        expected[static_cast<size_t>(c)] = above / below;
        squares += above / below * above / below;
      }
      for (int64_t c = 0; normed && c < dim; ++c) {
        const auto i = static_cast<size_t>(c);
        expected[i] *= double{norm[i]} / sqrt(squares / static_cast<double>(dim) + double{0.1f});
      }
      for (int64_t i = 0; i < rotated / 2; ++i) {
        const float* row = angles.data() + entry * stride * rotated;
        double& x = expected[static_cast<size_t>(dim - rotated + 2 * i)];
        double& y = expected[static_cast<size_t>(dim - rotated + 2 * i + 1)];
        const double cosine = double{row[i]}, sine = double{row[rotated / 2 + i]}, even = x;
        x = even * cosine - y * sine;
        y = y * cosine + even * sine;
      }
      const int64_t slot = pages.slot(entry, page_size);
      for (int64_t c = 0; c < dim; ++c) {
        const double got = double{plane[static_cast<size_t>((slot * heads + h) * dim + c)]};
        const double wanted = expected[static_cast<size_t>(c)];
        CHECK(fabs(got - wanted) <= 2e-5 * (1 + fabs(wanted)));
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 100;
  std::string passed = "passed:";
  for (Isa isa : isas_of_machine()) {
    for (int i = 0; i < rounds; ++i) one(isa);
    passed += std::string(" ") + name_of(isa);
  }
  printf("%s\n", passed.c_str());
}
