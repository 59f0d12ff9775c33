#define SPARSE_ATTN_ISA avx512
#define SPARSE_ATTN_LIMIT_KERNELS kAvx512LimitKernels
#include "limits_kernel.h"
