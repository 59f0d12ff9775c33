// Instruction sets that kernels are compiled for, best last. Which of them runs is decided at run
// time.
#pragma once

namespace sparse_attn {

enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

constexpr const char* kIsaNames[] = {"portable", "avx2", "avx512", "avx512_bf16"};

// Whether this build has kernels for `isa` and this machine can run them.
bool supported(Isa isa);

Isa best_isa();

// Of kernels kPortable<name>, kAvx2<name> and so on, those for `isa`. Processors other than x86
// have the first alone.
#if defined(__x86_64__)
#define SPARSE_ATTN_KERNELS_FOR(isa, name)     \
  (isa == Isa::kAvx512Bf16 ? kAvx512Bf16##name \
   : isa == Isa::kAvx512   ? kAvx512##name     \
   : isa == Isa::kAvx2     ? kAvx2##name       \
                           : kPortable##name)
#else
#define SPARSE_ATTN_KERNELS_FOR(isa, name) (static_cast<void>(isa), kPortable##name)
#endif

}  // namespace sparse_attn
