#define SPARSE_ATTN_ISA portable
#define SPARSE_ATTN_LIMIT_KERNELS kPortableLimitKernels
#include "limits_kernel.h"
