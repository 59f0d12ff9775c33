#define SPARSE_ATTN_ISA amx_bf16
#define SPARSE_ATTN_KERNELS kAmxBf16Compress
#include "compress_kernel.h"
