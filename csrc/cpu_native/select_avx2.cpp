#define SPARSE_ATTN_ISA avx2
#define SPARSE_ATTN_SELECT_KERNELS kAvx2SelectKernels
#include "select_kernel.h"
