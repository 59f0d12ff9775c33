#define SPARSE_ATTN_ISA avx512_bf16
#define SPARSE_ATTN_SELECT_KERNELS kAvx512Bf16SelectKernels
#include "select_kernel.h"
