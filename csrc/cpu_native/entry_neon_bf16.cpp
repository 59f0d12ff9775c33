#define SPARSE_ATTN_ISA neon_bf16
#define SPARSE_ATTN_ROW_KERNELS kNeonBf16RowKernels
#include "entry_kernel.h"
