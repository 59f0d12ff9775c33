#define SPARSE_ATTN_ISA avx512_bf16
#define SPARSE_ATTN_ROW_KERNELS kAvx512Bf16RowKernels
#include "entry_kernel.h"
