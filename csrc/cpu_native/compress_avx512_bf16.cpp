#define SPARSE_ATTN_ISA avx512_bf16
#define SPARSE_ATTN_KERNELS kAvx512Bf16Compress
#include "compress_kernel.h"
