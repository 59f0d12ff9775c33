// Instruction sets that kernels are compiled for, best last. Which of them runs is decided at run
// time.
#pragma once

namespace sparse_attn {

enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

constexpr const char* kIsaNames[] = {"portable", "avx2", "avx512", "avx512_bf16"};

// Whether this build has kernels for `isa` and this machine can run them.
bool supported(Isa isa);

Isa best_isa();

}  // namespace sparse_attn
