#define SPARSE_ATTN_ISA avx2
#define SPARSE_ATTN_ROW_KERNELS kAvx2RowKernels
#include "entry_kernel.h"
