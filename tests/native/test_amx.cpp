// AMX's instructions, or their model where SPARSE_ATTN_AMX_MODEL is set, against the model and
// against sums in double precision; and configurations and operands that a processor refuses.
#include <math.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <vector>

#define SPARSE_ATTN_ISA amx_bf16
#include "cpu_native/amx.h"
#include "cpu_native/isa.h"
#include "hostile.h"

namespace {

using namespace sparse_attn;
using namespace sparse_attn::amx_bf16;

constexpr int kStride = kAmxRowBytes + 4;  // of rows in memory, with a gap

// Rows in memory.
struct Square {
  char bytes[kAmxRows * kStride];

  explicit Square(char fill = 0x55) { memset(bytes, fill, sizeof(bytes)); }
  uint16_t half(int row, int i) const {
    uint16_t x;
    memcpy(&x, bytes + row * kStride + 2 * i, 2);
    return x;
  }
  float number(int row, int i) const {
    float x;
    memcpy(&x, bytes + row * kStride + 4 * i, 4);
    return x;
  }
  void set(int row, int i, uint16_t x) { memcpy(bytes + row * kStride + 2 * i, &x, 2); }
  void set(int row, int i, float x) { memcpy(bytes + row * kStride + 4 * i, &x, 4); }
};

AmxConfig shape(int rows, int pairs, int columns) {
  AmxConfig config = {};
  config.palette = 1;
  const int of[3][2] = {{rows, columns}, {rows, pairs}, {pairs, columns}};
  for (int tile = 0; tile < 3; ++tile) {
    config.rows[tile] = static_cast<uint8_t>(of[tile][0]);
    config.row_bytes[tile] = static_cast<uint16_t>(4 * of[tile][1]);
  }
  return config;
}

// c + a b, of tiles 0, 1 and 2.
void multiply(const AmxConfig& config, const Square& a, const Square& b, Square* c) {
  amx_configure(config);
  amx_zero<0>();
  amx_load<0>(c->bytes, kStride);
  amx_load<1>(a.bytes, kStride);
  amx_load<2>(b.bytes, kStride);
  amx_dot_bf16<0, 1, 2>();
  amx_store<0>(c->bytes, kStride);
  amx_release();
}

void multiply_in_model(const AmxConfig& config, const Square& a, const Square& b, Square* c) {
  AmxModel model;
  model.configure(config);
  model.load(0, c->bytes, kStride);
  model.load(1, a.bytes, kStride);
  model.load(2, b.bytes, kStride);
  model.dot_bf16(0, 1, 2);
  model.store(0, c->bytes, kStride);
}

// Integers of 8 bits, sums of 32.
void test_integers() {
  for (int i = 0; i < 200; ++i) {
    const int rows = static_cast<int>(between(1, 16)), steps = static_cast<int>(between(1, 16)),
              columns = static_cast<int>(between(1, 16));
    const bool largest = i % 4 == 0;  // sums beyond 32 bits wrap around
    Square a, b, c;
    const auto any = [&] { return largest ? INT8_MIN : static_cast<int8_t>(between(-128, 127)); };
    for (Square* operand : {&a, &b}) {
      for (char& byte : operand->bytes) byte = static_cast<char>(any());
    }
    for (int m = 0; m < rows; ++m) {
      for (int n = 0; n < columns; ++n) {
        const int32_t start =
            largest ? INT32_MAX : static_cast<int32_t>(between(INT32_MIN, INT32_MAX));
        memcpy(c.bytes + m * kStride + 4 * n, &start, 4);
      }
    }
    Square expected = c, sum = c;
    for (int m = 0; m < rows; ++m) {
      for (int n = 0; n < columns; ++n) {
        char* const at = expected.bytes + m * kStride + 4 * n;
        uint32_t x;
        memcpy(&x, at, 4);
        for (int k = 0; k < 4 * steps; ++k) {
          const auto of_a = static_cast<int8_t>(a.bytes[m * kStride + k]);
          const auto of_b = static_cast<int8_t>(b.bytes[k / 4 * kStride + 4 * n + k % 4]);
          x += static_cast<uint32_t>(of_a * of_b);
        }
        memcpy(at, &x, 4);
      }
    }
    amx_configure(shape(rows, steps, columns));
    amx_zero<0>();
    amx_load<0>(c.bytes, kStride);
    amx_load<1>(a.bytes, kStride);
    amx_load<2>(b.bytes, kStride);
    amx_dot_int8<0, 1, 2>();
    amx_store<0>(sum.bytes, kStride);
    amx_release();
    CHECK(memcmp(&sum, &expected, sizeof(sum)) == 0, "%d x %d x %d", rows, steps, columns);
  }
}

float any_number() {
  constexpr float kNumbers[] = {0.0f, -0.0f, 0x1p-126f, -0x1p-127f, 0x1p-70f, 3e38f, INFINITY, NAN};
  return below(20) == 0 ? kNumbers[below(8)] : below(10) == 0 ? normal() * 0x1p-63f : normal();
}

void test_products() {
  for (int i = 0; i < 300; ++i) {
    const int rows = static_cast<int>(between(1, 16)), pairs = static_cast<int>(between(1, 16)),
              columns = static_cast<int>(between(1, 16));
    const bool hostile = i % 2 == 1;
    Square a, b, c;
    for (int k = 0; k < pairs; ++k) {
      for (int m = 0; m < rows; ++m) {
        for (int j = 0; j < 2; ++j)
          a.set(m, 2 * k + j, float_to_bf16(hostile ? any_number() : normal()));
      }
      for (int n = 0; n < 2 * columns; ++n)
        b.set(k, n, float_to_bf16(hostile ? any_number() : normal()));
    }
    for (int m = 0; m < rows; ++m) {
      for (int n = 0; n < columns; ++n) c.set(m, n, hostile ? any_number() : normal());
    }
    Square expected = c, sum = c;
    const AmxConfig config = shape(rows, pairs, columns);
    multiply_in_model(config, a, b, &expected);
    multiply(config, a, b, &sum);
    for (int m = 0; m < kAmxRows; ++m) {
      for (int n = 0; n < kStride / 4; ++n) {
        const float got = sum.number(m, n), wanted = expected.number(m, n);
        CHECK(memcmp(&got, &wanted, 4) == 0 || (isnan(got) && isnan(wanted)),
              "%d x %d x %d, row %d column %d: %a, not %a", rows, pairs, columns, m, n, got,
              wanted);
        if (hostile || m >= rows || n >= columns) continue;
        double exact = c.number(m, n);
        for (int k = 0; k < 2 * pairs; ++k) {
          exact += static_cast<double>(bf16_to_float(a.half(m, k))) *
                   bf16_to_float(b.half(k / 2, 2 * n + k % 2));
        }
        CHECK(fabs(got - exact) < 1e-4, "row %d column %d: %g, not %g", m, n, got, exact);
      }
    }
  }
}

// c + a b where every element of b is one. The first and the third element are added up, and the
// others; then both sums, which are added to c.
void test_order() {
  const struct {
    float a[4], c, sum;
  } kSums[] = {
      {{0x1p24f, 1, 1, 0}, 0, 0x1p24f},
      {{0x1p24f, 1, 0, 1}, 0, 0x1p24f + 2},
      {{1, 1, 0, 0}, 0x1p24f, 0x1p24f + 2},
      {{0x1p-126f, -0x1p-127f, 0, 0}, 0, 0x1p-126f},  // denormal operands are zero
      {{0, 0, 0, 0}, 0x1p-127f, 0},
      {{0x1.8p-126f, -0x1p-126f, 0, 0}, 0, 0},  // and results
  };
  for (const auto& s : kSums) {
    Square a, b, c;
    for (int i = 0; i < 4; ++i) {
      a.set(0, i, float_to_bf16(s.a[i]));
      b.set(i / 2, i % 2, float_to_bf16(1));
    }
    c.set(0, 0, s.c);
    multiply(shape(1, 2, 1), a, b, &c);
    CHECK(c.number(0, 0) == s.sum, "%a, not %a", c.number(0, 0), s.sum);
  }
}

// Whether `act` ends its process.
bool ends(const std::function<void()>& act) {
  const pid_t child = fork();
  CHECK(child >= 0, "fork");
  if (child == 0) {
    if (!freopen("/dev/null", "w", stderr)) _exit(0);
    for (int number : {SIGABRT, SIGILL, SIGSEGV}) signal(number, SIG_DFL);
    act();
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child, "waitpid");
  return WIFSIGNALED(status);
}

void test_refusals() {
  const auto configures = [](const std::function<void(AmxConfig*)>& spoil) {
    return [=] {
      AmxConfig config = shape(16, 16, 16);
      spoil(&config);
      amx_configure(config);
    };
  };
  CHECK(!ends(configures([](AmxConfig*) {})), "a configuration");
  CHECK(ends(configures([](AmxConfig* c) { c->palette = 2; })), "a palette");
  CHECK(ends(configures([](AmxConfig* c) { c->reserved[3] = 1; })), "reserved bytes");
  CHECK(ends(configures([](AmxConfig* c) { c->rows[8] = c->row_bytes[8] = 1; })), "a ninth tile");
  CHECK(ends(configures([](AmxConfig* c) { c->rows[1] = 17; })), "too many rows");
  CHECK(ends(configures([](AmxConfig* c) { c->row_bytes[1] = 68; })), "too many bytes");
  CHECK(ends(configures([](AmxConfig* c) { c->row_bytes[1] = 0; })), "rows without bytes");

  bool integers = false;
  const auto multiplies = [&](const AmxConfig& config) {
    return [=] {
      amx_configure(config);
      integers ? amx_dot_int8<0, 1, 2>() : amx_dot_bf16<0, 1, 2>();
    };
  };
  for (bool of_integers : {false, true}) {
    integers = of_integers;
    CHECK(!ends(multiplies(shape(16, 16, 16))), "tiles that match");
    CHECK(!ends(multiplies(shape(3, 5, 7))), "small tiles that match");
    AmxConfig config = shape(16, 16, 16);
    config.rows[0] = 8;
    CHECK(ends(multiplies(config)), "other rows");
    config = shape(16, 16, 16);
    config.row_bytes[0] = 32;
    CHECK(ends(multiplies(config)), "other columns");
    config = shape(16, 16, 16);
    config.rows[2] = 8;
    CHECK(ends(multiplies(config)), "other pairs");
  }

  char row[kAmxRows * kAmxRowBytes] = {};
  CHECK(ends([&] { amx_load<0>(row, kAmxRowBytes); }), "no configuration");
  CHECK(ends([&] { amx_zero<0>(); }), "no configuration");
  CHECK(ends([&] {
          amx_configure(shape(16, 16, 16));
          amx_release();
          amx_store<0>(row, kAmxRowBytes);
        }),
        "a configuration that was released");
  CHECK(ends([&] {
          amx_configure(shape(16, 16, 16));
          amx_load<3>(row, kAmxRowBytes);
        }),
        "a tile that was left out");
}

}  // namespace

int main() {
#if !defined(SPARSE_ATTN_AMX_MODEL)
  const std::vector<Isa> isas = isas_of_machine();
  if (std::count(isas.begin(), isas.end(), Isa::kAmxBf16) == 0) {
    printf("skipped: this machine has no AMX\n");
    return 0;
  }
#endif
  test_products();
  test_order();
  test_integers();
  test_refusals();
  printf("passed\n");
}
