#include "isa.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sparse_attn {
namespace {

#if defined(__x86_64__)
// Whether this process may use AMX's tile registers. Linux wants to be asked before it makes room
// for them; threads, and processes that are forked, inherit what it answers.
bool may_use_amx() {
#if defined(SPARSE_ATTN_AMX_MODEL)
  return true;
#elif defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted =
      __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
      __builtin_cpu_supports("amx-int8") && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

bool supported(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return supported(Isa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    case Isa::kAvx512Bf16:
      return supported(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16") &&
             __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
    case Isa::kAmxBf16:
      return supported(Isa::kAvx512Bf16) && may_use_amx();
  }
  return false;
}
#elif defined(__aarch64__) && defined(__linux__)
// Bits of AT_HWCAP and AT_HWCAP2, which the kernel's interface fixes: older headers lack some.
constexpr unsigned long kAtomics = 1ul << 8, kRdm = 1ul << 12, kDotProd = 1ul << 20,
                        kSve = 1ul << 22;
constexpr unsigned long kSveI8mm = 1ul << 9, kSveBf16 = 1ul << 12, kI8mm = 1ul << 13,
                        kBf16 = 1ul << 14;

// Whether vectors of SVE have so many bytes in this process: kernels are compiled for one length.
bool sve_has(int bytes) {
  constexpr int kGetLength = 51, kLengthMask = 0xffff;  // PR_SVE_GET_VL and PR_SVE_VL_LEN_MASK
  const int length = prctl(kGetLength);
  return length > 0 && (length & kLengthMask) == bytes;
}

bool supported(Isa isa) {
  const auto has = [](unsigned long bits, unsigned long bits2) {
    return (getauxval(AT_HWCAP) & bits) == bits && (getauxval(AT_HWCAP2) & bits2) == bits2;
  };
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kNeonBf16:
      return has(kAtomics | kRdm | kDotProd, kI8mm | kBf16);
    case Isa::kSve256Bf16:
      return supported(Isa::kNeonBf16) && has(kSve, kSveI8mm | kSveBf16) && sve_has(32);
  }
  return false;
}
#else
bool supported(Isa isa) { return isa == Isa::kPortable; }
#endif

}  // namespace

std::vector<Isa> isas_of_machine() {
  std::vector<Isa> result;
  for (int i = 0; i < static_cast<int>(sizeof(kIsaNames) / sizeof(*kIsaNames)); ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (supported(isa)) result.push_back(isa);
  }
  return result;
}

}  // namespace sparse_attn
