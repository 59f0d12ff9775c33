#define SPARSE_ATTN_ISA avx512_bf16
#define SPARSE_ATTN_LIMIT_KERNELS kAvx512Bf16LimitKernels
#include "limits_kernel.h"
