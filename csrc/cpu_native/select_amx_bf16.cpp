#define SPARSE_ATTN_ISA amx_bf16
#define SPARSE_ATTN_SELECT_KERNELS kAmxBf16SelectKernels
#include "select_kernel.h"
