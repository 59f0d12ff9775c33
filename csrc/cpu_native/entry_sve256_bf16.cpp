#define SPARSE_ATTN_ISA sve256_bf16
#define SPARSE_ATTN_ROW_KERNELS kSve256Bf16RowKernels
#include "entry_kernel.h"
