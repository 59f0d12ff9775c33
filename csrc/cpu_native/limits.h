// What a machine can do at most, by loops that do nothing else: the scale for measured kernels.
#pragma once

#include <stdint.h>

#include "isa.h"

namespace sparse_attn {

enum class Limit : int32_t { kFp32, kBf16, kInt8, kCopy, kBlocks };

constexpr const char* kLimitNames[] = {"fp32", "bf16", "int8", "copy", "blocks"};

// Bytes of a block of Limit::kBlocks, which are read in random order.
constexpr int64_t kLimitBlock = int64_t{1} << 14;

struct LimitParams {
  Limit limit = Limit::kFp32;
  char* memory = nullptr;  // of kCopy and kBlocks, `bytes` of it
  int64_t bytes = 0;
  int32_t threads = 1;
  Isa isa = Isa::kPortable;
};

// Does a fixed amount of work on every thread. Returns how many operations (a product and its sum
// are two) or bytes, read and written; 0 if the instruction set lacks the instruction.
double work_at_limit(const LimitParams& p);

// Rows that are read here and written there: what a call that computes nothing would move.
struct MoveParams {
  const char* from = nullptr;
  int64_t read = 0;                    // bytes of a row
  const int64_t* from_rows = nullptr;  // their numbers
  char* to = nullptr;
  int64_t written = 0;
  const int64_t* to_rows = nullptr;
  int64_t rows = 0;
  int32_t threads = 1;
  Isa isa = Isa::kPortable;
};

void move_rows(const MoveParams& p);

struct Move {
  const char* from;
  int64_t read;
  char* to;
  int64_t written;
};

// The kernels of one instruction set: each returns its operations.
struct LimitKernels {
  double (*fp32)(int64_t rounds);
  double (*bf16)(int64_t rounds);  // null: no products of bf16
  double (*int8)(int64_t rounds);  // null: no products of int8
  // Reads a block while it fetches another.
  void (*read)(const char* block, const char* next);
  void (*fetch)(const Move& move);  // some rows before it is done
  void (*move)(const Move& move);
};

extern const LimitKernels SPARSE_ATTN_ISAS(LimitKernels);

}  // namespace sparse_attn
