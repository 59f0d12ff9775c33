#define SPARSE_ATTN_ISA amx_bf16
#define SPARSE_ATTN_ROW_KERNELS kAmxBf16RowKernels
#include "entry_kernel.h"
