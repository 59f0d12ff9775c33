#define SPARSE_ATTN_ISA neon_bf16
#define SPARSE_ATTN_SELECT_KERNELS kNeonBf16SelectKernels
#include "select_kernel.h"
