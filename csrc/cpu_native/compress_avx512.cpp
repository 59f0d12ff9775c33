#define SPARSE_ATTN_ISA avx512
#define SPARSE_ATTN_KERNELS kAvx512Compress
#include "compress_kernel.h"
