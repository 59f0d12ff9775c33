#define SPARSE_ATTN_ISA avx512
#define SPARSE_ATTN_KERNELS kAvx512Kernels
#include "attend_kernel.h"
