// Working memory that calls of one thread reuse.
#pragma once

#include <stdint.h>

namespace sparse_attn {

// At least `bytes` bytes, aligned to 64, valid until this thread asks again for the same slot (0 or
// 1). What they hold is undefined. Throws std::bad_alloc.
char* thread_memory(int slot, int64_t bytes);

// Gives the memory of a slot back if it has more than `above` bytes.
void release_thread_memory(int slot, int64_t above);

// Asks for a line of memory to write into.
static inline __attribute__((always_inline)) void prefetch_to_write(const char* p) {
#if defined(__x86_64__)  // without a flag compilers ask for reading alone
  asm volatile("prefetchw %0" : : "m"(*p));
#else
  __builtin_prefetch(p, 1);
#endif
}

}  // namespace sparse_attn
