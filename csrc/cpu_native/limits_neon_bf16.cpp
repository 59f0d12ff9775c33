#define SPARSE_ATTN_ISA neon_bf16
#define SPARSE_ATTN_LIMIT_KERNELS kNeonBf16LimitKernels
#include "limits_kernel.h"
