#define SPARSE_ATTN_ISA portable
#define SPARSE_ATTN_ROW_KERNELS kPortableRowKernels
#include "entry_kernel.h"
