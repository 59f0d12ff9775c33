// Instruction sets that kernels are compiled for, best last. Which of them runs is decided at run
// time.
#pragma once

#include <vector>

namespace sparse_attn {

// Their names, each before `name`.
#if defined(__x86_64__)
#define SPARSE_ATTN_ISAS(name) \
  kPortable##name, kAvx2##name, kAvx512##name, kAvx512Bf16##name, kAmxBf16##name
constexpr const char* kIsaNames[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"};
#elif defined(__aarch64__) && defined(__linux__)
#define SPARSE_ATTN_ISAS(name) kPortable##name, kNeonBf16##name, kSve256Bf16##name
constexpr const char* kIsaNames[] = {"portable", "neon_bf16", "sve256_bf16"};
#else
#define SPARSE_ATTN_ISAS(name) kPortable##name
constexpr const char* kIsaNames[] = {"portable"};
#endif

enum class Isa { SPARSE_ATTN_ISAS() };

inline const char* name_of(Isa isa) { return kIsaNames[static_cast<int>(isa)]; }

// Those that this machine can run.
std::vector<Isa> isas_of_machine();

// The kernels for `isa`, of those for each instruction set.
template <class Kernels, class... Others>
const Kernels& kernels_for(Isa isa, const Kernels& portable, const Others&... others) {
  const Kernels* const all[] = {&portable, &others...};
  return *all[static_cast<int>(isa)];
}

}  // namespace sparse_attn
