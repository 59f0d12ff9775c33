#define SPARSE_ATTN_ISA sve256_bf16
#define SPARSE_ATTN_SELECT_KERNELS kSve256Bf16SelectKernels
#include "select_kernel.h"
