#define SPARSE_ATTN_ISA avx2
#define SPARSE_ATTN_KERNELS kAvx2Compress
#include "compress_kernel.h"
