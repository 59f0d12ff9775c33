#define SPARSE_ATTN_ISA portable
#define SPARSE_ATTN_SELECT_KERNELS kPortableSelectKernels
#include "select_kernel.h"
