#define SPARSE_ATTN_ISA sve256_bf16
#define SPARSE_ATTN_KERNELS kSve256Bf16Compress
#include "compress_kernel.h"
