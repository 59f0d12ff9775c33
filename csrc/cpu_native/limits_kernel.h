// The loops of `limits`, compiled once for each instruction set. The including file defines
// SPARSE_ATTN_ISA, the namespace, and SPARSE_ATTN_LIMIT_KERNELS, the name of the table of entry
// points.
#pragma once

#include "limits.h"
#include "memory.h"
#include "simd.h"
#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

// Sums that do not wait for each other.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 16;
#else
constexpr int kSums = 8;
#endif

// Makes the compiler forget what it knows of x.
template <class Vector>
SPARSE_ATTN_INLINE void forget(Vector& x) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(x));
#else
  asm volatile("" : "+w"(x));
#endif
}

// Repeats step(a, b, sum) for every sum. Returns all operations, `operations` a step.
template <class Vector, class Step>
SPARSE_ATTN_INLINE double repeat(int64_t rounds, double operations, const Step& step) {
  Vector sum[kSums] = {}, a = {}, b = {};
#pragma GCC unroll 16
  for (int j = 0; j < kSums; ++j) forget(sum[j]);  // else they were all the same
  for (int64_t i = 0; i < rounds; ++i) {
    forget(a);
#pragma GCC unroll 16
    for (int j = 0; j < kSums; ++j) sum[j] = step(a, b, sum[j]);
  }
#pragma GCC unroll 16
  for (int j = 0; j < kSums; ++j) forget(sum[j]);
  return operations * kSums * static_cast<double>(rounds);
}

double fp32(int64_t rounds) {
  return repeat<Floats>(rounds, 2 * kWidth,
                        [](Floats a, Floats b, Floats sum) { return fma(a, b, sum); });
}

#if defined(__AMX_BF16__)
// Repeats four products of `elements` in a row. About as many operations as of vectors.
template <class Products>
double repeat_products(int64_t rounds, int64_t elements, const Products& products) {
  const int64_t operations = 4 * 2 * kAmxRows * kAmxRows * elements;
  const int64_t steps = rounds * kSums * 4 * kWidth / operations;
  const AmxRegisters registers;
  for (int64_t i = 0; i < steps; ++i) products();
  return static_cast<double>(steps * operations);
}

double bf16(int64_t rounds) {
  return repeat_products(rounds, kAmxRowBytes / 2, [] {
    amx_dot_bf16<0, 4, 6>();
    amx_dot_bf16<1, 4, 7>();
    amx_dot_bf16<2, 5, 6>();
    amx_dot_bf16<3, 5, 7>();
  });
}

double int8(int64_t rounds) {
  return repeat_products(rounds, kAmxRowBytes, [] {
    amx_dot_int8<0, 4, 6>();
    amx_dot_int8<1, 4, 7>();
    amx_dot_int8<2, 5, 6>();
    amx_dot_int8<3, 5, 7>();
  });
}
#elif defined(SPARSE_ATTN_BF16)
double bf16(int64_t rounds) {
#if defined(SPARSE_ATTN_MATRICES)
  return repeat<Floats>(rounds, 8 * kWidth,
                        [](Floats a, Floats b, Floats sum) { return multiply_bf16(a, b, sum); });
#else
  return repeat<Floats>(rounds, 4 * kWidth,
                        [](Floats a, Floats b, Floats sum) { return dot_bf16(a, b, sum); });
#endif
}
#endif

#if defined(SPARSE_ATTN_BF16) && !defined(__AMX_BF16__)
double int8(int64_t rounds) {
#if defined(SPARSE_ATTN_MATRICES)
  constexpr int kOperations = 16 * kWidth;  // products of matrices
#else
  constexpr int kOperations = 8 * kWidth;
#endif
  return repeat<Ints>(rounds, kOperations, [](Ints a, Ints b, Ints sum) {
#if defined(__AVX512BF16__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(SPARSE_ATTN_SVE)
    return svusmmla((SveInts)sum, svreinterpret_u8((SveInts)a), svreinterpret_s8((SveInts)b));
#else
    return vusmmlaq_s32(sum, (uint8x16_t)a, (int8x16_t)b);
#endif
  });
}
#elif !defined(SPARSE_ATTN_BF16)
constexpr double (*bf16)(int64_t) = nullptr;
constexpr double (*int8)(int64_t) = nullptr;
#endif

void read(const char* block, const char* next) {
  constexpr int64_t kPage = 4096;
  for (int64_t at = 0; at < kLimitBlock; at += kPage) prefetch(next + at);
  Floats sum = {};
  for (int64_t at = 0; at < kLimitBlock; at += 64) {
    prefetch(next + at);
    for (int64_t i = 0; i < 64; i += kBytes) sum += load(block + at + i);
  }
  forget(sum);
}

constexpr int64_t kLine = 64;

// Lines that are written as a whole go past the caches.
bool whole_lines(const Move& m) {
  return reinterpret_cast<uintptr_t>(m.to) % kLine == 0 && m.written % kLine == 0;
}

void fetch(const Move& m) {
  constexpr int64_t kFetched = 4096;  // of longer rows the machine fetches the rest
  for (int64_t i = 0; i < m.read && i < kFetched; i += kLine) __builtin_prefetch(m.from + i);
  if (whole_lines(m)) return;
  for (int64_t i = 0; i < m.written && i < kFetched; i += kLine) prefetch_to_write(m.to + i);
}

void move(const Move& m) {
  constexpr int64_t kPart = 1024;
  const bool lines = whole_lines(m);
  const int64_t step = m.written * kPart / m.read / kLine * kLine;
  Floats x = {};
  int64_t written = 0;
  for (int64_t begin = 0; begin < m.read; begin += kPart) {
    const bool last = begin + kPart >= m.read;
    const int64_t end = last ? m.read : begin + kPart;
    for (int64_t i = begin; i + kBytes <= end; i += kBytes) {
      x = load(m.from + i);
      forget(x);
    }
    const int64_t to = last ? m.written : written + step;
    for (; lines && written + kBytes <= to; written += kBytes) stream(m.to + written, x);
    for (; written + kBytes <= to; written += kBytes) store(m.to + written, x);
  }
  memcpy(m.to + written, &x, static_cast<size_t>(m.written - written));
}

}  // namespace
}  // namespace SPARSE_ATTN_ISA

extern const LimitKernels SPARSE_ATTN_LIMIT_KERNELS = {
    SPARSE_ATTN_ISA::fp32, SPARSE_ATTN_ISA::bf16,  SPARSE_ATTN_ISA::int8,
    SPARSE_ATTN_ISA::read, SPARSE_ATTN_ISA::fetch, SPARSE_ATTN_ISA::move};

}  // namespace sparse_attn
