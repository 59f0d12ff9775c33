#include "parallel.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <string.h>

#include <atomic>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace sparse_attn {
namespace {

using ParallelRegion = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

struct Runtime {
  ParallelRegion region = nullptr;
  std::string path = "std::thread";
};

int find_torch(dl_phdr_info* info, size_t, void* result) {
  if (!strstr(info->dlpi_name, "libtorch_cpu.so")) return 0;
  *static_cast<void**>(result) = dlopen(info->dlpi_name, RTLD_NOW | RTLD_NOLOAD);
  return 1;
}

// Ends the idle threads of the one that calls it. They start again when they are needed.
int (*pause_threads)(int kind) = nullptr;

// A forked process has none of the threads that GNU's runtime still counts in it, and would wait
// for them without end: they end before, of torch's work and of ours. Other runtimes see to it
// themselves.
void survive_forks(void* torch) {
  if (dlsym(torch, "__kmpc_fork_call")) return;  // LLVM's or Intel's
  pause_threads = reinterpret_cast<int (*)(int)>(dlsym(torch, "omp_pause_resource_all"));
  constexpr int kSoft = 1;
  if (pause_threads) pthread_atfork([] { pause_threads(kSoft); }, nullptr, nullptr);
}

// The OpenMP runtime that torch is linked with, looked up through torch's library: wheels carry one
// of their own under a changed name, and a process can hold several. Nothing is loaded: a second
// runtime would fight the first for cores.
Runtime find_runtime() {
  void* torch = nullptr;
  dl_iterate_phdr(find_torch, &torch);
  if (!torch) torch = RTLD_DEFAULT;
  void* symbol = dlsym(torch, "GOMP_parallel");  // LLVM's and Intel's runtimes have it too
  Runtime result;
  Dl_info library;
  if (symbol && dladdr(symbol, &library) != 0) {
    result.region = reinterpret_cast<ParallelRegion>(symbol);
    result.path = library.dli_fname;
    survive_forks(torch);
  }
  return result;
}

const Runtime& runtime() {
  static const Runtime found = find_runtime();
  return found;
}

struct Job {
  const std::function<void(int64_t, int32_t)>* task;
  int64_t count;
  std::atomic<int64_t> next{0};
  std::atomic<int32_t> workers{0};
};

void work(void* argument) {
  auto* job = static_cast<Job*>(argument);
  int32_t worker = -1;  // numbered at its first task: there are no more workers than tasks
  for (;;) {
    const int64_t index = job->next.fetch_add(1, std::memory_order_relaxed);
    if (index >= job->count) return;
    if (worker < 0) worker = job->workers.fetch_add(1, std::memory_order_relaxed);
    (*job->task)(index, worker);
  }
}

}  // namespace

void parallel_for(int64_t count, int32_t threads,
                  const std::function<void(int64_t, int32_t)>& task) {
  Job job;
  job.task = &task;
  job.count = count;
  if (threads <= 1 || count <= 1) {
    work(&job);
  } else if (runtime().region) {
    // Always the full team: libgomp ends and restarts threads when the size of the team changes.
    runtime().region(work, &job, static_cast<unsigned>(threads), 0);
  } else {
    std::vector<std::thread> team;
    try {
      for (int32_t i = 1; i < threads; ++i) team.emplace_back(work, &job);
    } catch (const std::system_error&) {  // no more threads to be had: those there are do it all
    }
    work(&job);
    for (std::thread& thread : team) thread.join();
  }
}

const char* thread_runtime() { return runtime().path.c_str(); }

}  // namespace sparse_attn
