#define SPARSE_ATTN_ISA amx_bf16
#define SPARSE_ATTN_KERNELS kAmxBf16Kernels
#include "attend_kernel.h"
