#include "memory.h"

#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <memory>
#include <new>

namespace sparse_attn {
namespace {

constexpr size_t kLine = 64;

// Memory of at least half of a huge page is one or several: look-ups of many small pages would take
// a few percent of a call.
constexpr size_t kHugePage = size_t{1} << 21;

struct Release {
  void operator()(char* memory) const { free(memory); }
};

char* allocate(size_t bytes) {
  const bool huge = bytes >= kHugePage / 2;
  const size_t unit = huge ? kHugePage : kLine;
  const size_t size = (bytes + unit - 1) / unit * unit;
  void* memory = aligned_alloc(unit, size);
  if (!memory) throw std::bad_alloc();
#if defined(__linux__)
  if (huge) madvise(memory, size, MADV_HUGEPAGE);
#endif
  return static_cast<char*>(memory);
}

struct Slot {
  std::unique_ptr<char, Release> memory;
  int64_t bytes = 0;
};

thread_local Slot slots[2];

}  // namespace

char* thread_memory(int slot, int64_t bytes) {
  Slot& used = slots[slot];
  if (bytes > used.bytes) {
    used.memory.reset();
    used.bytes = 0;
    used.memory.reset(allocate(static_cast<size_t>(bytes)));
    used.bytes = bytes;
  }
  return used.memory.get();
}

void release_thread_memory(int slot, int64_t above) {
  if (slots[slot].bytes > above) slots[slot] = Slot();
}

}  // namespace sparse_attn
