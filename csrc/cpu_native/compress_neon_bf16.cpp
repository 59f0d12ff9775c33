#define SPARSE_ATTN_ISA neon_bf16
#define SPARSE_ATTN_KERNELS kNeonBf16Compress
#include "compress_kernel.h"
