// Runs tasks on the threads that torch already has.
#pragma once

#include <stdint.h>

#include <functional>

namespace sparse_attn {

// Calls task(index, worker) for every index in [0, count), the lowest first, on at most `threads`
// threads at a time. Workers are numbered from 0; there are no more of them than tasks. A task must
// not throw. Uses the OpenMP runtime that is in the process, so that its idle threads do our work
// instead of spinning beside it; without one it starts threads for this call. Works in a forked
// process, too.
void parallel_for(int64_t count, int32_t threads,
                  const std::function<void(int64_t, int32_t)>& task);

// Which runtime parallel_for uses: the path of the OpenMP library, or "std::thread".
const char* thread_runtime();

}  // namespace sparse_attn
