#define SPARSE_ATTN_ISA portable
#define SPARSE_ATTN_KERNELS kPortableCompress
#include "compress_kernel.h"
