#define SPARSE_ATTN_ISA avx512
#define SPARSE_ATTN_ROW_KERNELS kAvx512RowKernels
#include "entry_kernel.h"
