// AMX: eight tile registers of up to 16 rows of 64 bytes, and products of them. (Elsewhere in these
// files a tile is a run of entries.) Functions take the numbers of registers as constants.
//
// SPARSE_ATTN_AMX_MODEL replaces the instructions by their model, for machines without them.
#pragma once

#include "amx_model.h"
#include "simd.h"

namespace sparse_attn {
namespace SPARSE_ATTN_ISA {
namespace {

#if !defined(SPARSE_ATTN_AMX_MODEL)

// Not the compiler's intrinsics: those of GCC take numbers of registers as literals only, and do
// not tell the compiler which of them read or write memory.

SPARSE_ATTN_INLINE void amx_configure(const AmxConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config));
}

// Also leaves nothing for the system to save when it switches threads.
SPARSE_ATTN_INLINE void amx_release() { asm volatile("tilerelease"); }

template <int kTo>
SPARSE_ATTN_INLINE void amx_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTo));
}

// Rows lie `stride` bytes apart.
template <int kTo>
SPARSE_ATTN_INLINE void amx_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTo) : "memory");
}

template <int kFrom>
SPARSE_ATTN_INLINE void amx_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kFrom) : "memory");
}

// c[m][n] += sum of a[m][2k + i] * b[k][2n + i] over k and i, of bf16. Products are added one after
// the other, for each i by itself, each step rounded to float32; then the two sums to each other
// and to c. Denormal inputs count as zero and denormal results become zero.
template <int kC, int kA, int kB>
SPARSE_ATTN_INLINE void amx_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

// The same of integers of 8 bits with a sign, four to a lane: c[m][n] += sum of a[m][4k + i] *
// b[k][4n + i], exact but for overflows, which wrap around.
template <int kC, int kA, int kB>
SPARSE_ATTN_INLINE void amx_dot_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

#else

static thread_local AmxModel amx_model;

inline void amx_configure(const AmxConfig& config) { amx_model.configure(config); }

inline void amx_release() { amx_model.release(); }

template <int kTo>
inline void amx_zero() {
  amx_model.zero(kTo);
}

template <int kTo>
inline void amx_load(const void* from, int64_t stride) {
  amx_model.load(kTo, static_cast<const char*>(from), stride);
}

template <int kFrom>
inline void amx_store(void* to, int64_t stride) {
  amx_model.store(kFrom, static_cast<char*>(to), stride);
}

template <int kC, int kA, int kB>
inline void amx_dot_bf16() {
  amx_model.dot_bf16(kC, kA, kB);
}

template <int kC, int kA, int kB>
inline void amx_dot_int8() {
  amx_model.dot_int8(kC, kA, kB);
}

#endif

// All registers with 16 rows of 64 bytes, as long as it lives. Other code of the thread, which may
// use them too, never finds a configuration that is not its own.
class AmxRegisters {
 public:
  AmxRegisters() {
    AmxConfig config = {};
    config.palette = 1;
    for (int i = 0; i < kAmxTiles; ++i) {
      config.rows[i] = kAmxRows;
      config.row_bytes[i] = kAmxRowBytes;
    }
    amx_configure(config);
  }
  ~AmxRegisters() { amx_release(); }
  AmxRegisters(const AmxRegisters&) = delete;
  AmxRegisters& operator=(const AmxRegisters&) = delete;
};

}  // namespace
}  // namespace SPARSE_ATTN_ISA
}  // namespace sparse_attn
