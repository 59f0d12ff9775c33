// Working memory that calls of one thread reuse.
#pragma once

#include <stdint.h>

namespace sparse_attn {

// At least `bytes` bytes, aligned to 64, valid until this thread asks again for the same slot (0 or
// 1). What they hold is undefined. Throws std::bad_alloc.
char* thread_memory(int slot, int64_t bytes);

// Gives the memory of a slot back if it has more than `above` bytes.
void release_thread_memory(int slot, int64_t above);

}  // namespace sparse_attn
