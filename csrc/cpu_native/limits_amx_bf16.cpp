#define SPARSE_ATTN_ISA amx_bf16
#define SPARSE_ATTN_LIMIT_KERNELS kAmxBf16LimitKernels
#include "limits_kernel.h"
