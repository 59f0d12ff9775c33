#define SPARSE_ATTN_ISA sve256_bf16
#define SPARSE_ATTN_LIMIT_KERNELS kSve256Bf16LimitKernels
#include "limits_kernel.h"
