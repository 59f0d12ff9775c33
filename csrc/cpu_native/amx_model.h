// What Intel's manual says of AMX's instructions ("Intel 64 and IA-32 Architectures Software
// Developer's Manual", volume 2). Where a processor would raise an exception, the model ends the
// program; so it does where a configuration was left to whoever runs next.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../common/number.h"

namespace sparse_attn {
namespace {

constexpr int kAmxTiles = 8, kAmxRows = 16, kAmxRowBytes = 64;

// The operand of LDTILECFG.
struct alignas(64) AmxConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(AmxConfig) == 64, "as the processor reads it");

struct AmxModel {
  bool configured = false;
  AmxConfig config = {};
  char tiles[kAmxTiles][kAmxRows][kAmxRowBytes] = {};

  static void require(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "AMX: %s\n", what);
    abort();
  }

  void configure(const AmxConfig& c) {
    require(!configured, "the configuration before was not released");
    require(c.palette == 1, "the palette is 1");
    bool reserved_are_zero = true;
    for (uint8_t byte : c.reserved) reserved_are_zero = reserved_are_zero && byte == 0;
    for (int i = kAmxTiles; i < 16; ++i)
      reserved_are_zero = reserved_are_zero && c.row_bytes[i] == 0 && c.rows[i] == 0;
    require(reserved_are_zero, "reserved bytes of a configuration are zero");
    for (int i = 0; i < kAmxTiles; ++i) {
      require(c.row_bytes[i] <= kAmxRowBytes && c.rows[i] <= kAmxRows, "a tile is too large");
      require((c.row_bytes[i] == 0) == (c.rows[i] == 0), "a tile has rows and bytes, or neither");
    }
    config = c;
    configured = true;
    memset(tiles, 0, sizeof(tiles));
  }

  void release() {
    configured = false;
    memset(tiles, 0, sizeof(tiles));
  }

  void check(int tile) const {
    require(configured, "tiles are not configured");
    require(config.rows[tile] > 0, "the tile is not configured");
    require(config.row_bytes[tile] % 4 == 0, "rows are whole numbers of four bytes");
    require(config.start_row == 0, "operations start at the first row");
  }

  void zero(int tile) {
    require(configured && config.rows[tile] > 0, "the tile is not configured");
    memset(tiles[tile], 0, sizeof(tiles[tile]));
  }

  void load(int tile, const char* from, int64_t stride) {
    check(tile);
    zero(tile);
    for (int row = 0; row < config.rows[tile]; ++row)
      memcpy(tiles[tile][row], from + row * stride, config.row_bytes[tile]);
  }

  void store(int tile, char* to, int64_t stride) const {
    check(tile);
    for (int row = 0; row < config.rows[tile]; ++row)
      memcpy(to + row * stride, tiles[tile][row], config.row_bytes[tile]);
  }

  static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

  static float element(uint16_t x) { return flushed(bf16_to_float(x)); }

  void check_product(int c, int a, int b) const {
    require(c != a && c != b && a != b, "operands are three tiles");
    check(c);
    check(a);
    check(b);
    require(config.rows[a] == config.rows[c] && config.row_bytes[a] == 4 * config.rows[b] &&
                config.row_bytes[b] == config.row_bytes[c],
            "shapes of tiles do not match");
  }

  // Sets row m of the sums; bytes beyond the last column become zero.
  void set_row(int c, int m, const void* sums) {
    memset(tiles[c][m], 0, kAmxRowBytes);
    memcpy(tiles[c][m], sums, config.row_bytes[c]);
  }

  void dot_int8(int c, int a, int b) {
    check_product(c, a, b);
    const int rows = config.rows[c], columns = config.row_bytes[c] / 4;
    for (int m = 0; m < rows; ++m) {
      uint32_t sum[kAmxRowBytes / 4];
      memcpy(sum, tiles[c][m], sizeof(sum));
      for (int k = 0; k < config.rows[b]; ++k) {
        int8_t of_a[4], of_b[kAmxRowBytes];
        memcpy(of_a, tiles[a][m] + 4 * k, sizeof(of_a));
        memcpy(of_b, tiles[b][k], sizeof(of_b));
        for (int n = 0; n < columns; ++n) {
          for (int i = 0; i < 4; ++i)
            sum[n] += static_cast<uint32_t>(int32_t{of_a[i]} * int32_t{of_b[4 * n + i]});
        }
      }
      set_row(c, m, sum);
    }
    for (int m = rows; m < kAmxRows; ++m) memset(tiles[c][m], 0, kAmxRowBytes);
  }

  void dot_bf16(int c, int a, int b) {
    check_product(c, a, b);
    const int rows = config.rows[c], columns = config.row_bytes[c] / 4, pairs = config.rows[b];
    for (int m = 0; m < rows; ++m) {
      float sum[2][kAmxRowBytes / 4] = {}, total[kAmxRowBytes / 4] = {};
      for (int k = 0; k < pairs; ++k) {
        uint16_t of_a[2], of_b[kAmxRowBytes / 2];
        memcpy(of_a, tiles[a][m] + 4 * k, sizeof(of_a));
        memcpy(of_b, tiles[b][k], sizeof(of_b));
        for (int n = 0; n < columns; ++n) {
          for (int i = 0; i < 2; ++i)
            sum[i][n] = flushed(fmaf(element(of_a[i]), element(of_b[2 * n + i]), sum[i][n]));
        }
      }
      memcpy(total, tiles[c][m], sizeof(total));
      for (int n = 0; n < columns; ++n)
        total[n] = flushed(flushed(total[n]) + flushed(sum[0][n] + sum[1][n]));
      set_row(c, m, total);
    }
    for (int m = rows; m < kAmxRows; ++m) memset(tiles[c][m], 0, kAmxRowBytes);
  }
};

}  // namespace
}  // namespace sparse_attn
