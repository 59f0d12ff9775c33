#define SPARSE_ATTN_ISA avx512
#define SPARSE_ATTN_SELECT_KERNELS kAvx512SelectKernels
#include "select_kernel.h"
