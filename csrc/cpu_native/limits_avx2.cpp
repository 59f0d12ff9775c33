#define SPARSE_ATTN_ISA avx2
#define SPARSE_ATTN_LIMIT_KERNELS kAvx2LimitKernels
#include "limits_kernel.h"
