#define SPARSE_ATTN_ISA sve256_bf16
#define SPARSE_ATTN_KERNELS kSve256Bf16Kernels
#include "attend_kernel.h"
