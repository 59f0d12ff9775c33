#define SPARSE_ATTN_ISA avx2
#define SPARSE_ATTN_KERNELS kAvx2Kernels
#include "attend_kernel.h"
