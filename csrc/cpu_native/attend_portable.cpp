#define SPARSE_ATTN_ISA portable
#define SPARSE_ATTN_KERNELS kPortableKernels
#include "attend_kernel.h"
