#include "memory.h"

#include <memory>
#include <new>

namespace sparse_attn {
namespace {

constexpr std::align_val_t kAlignment{64};

struct Release {
  void operator()(char* memory) const { ::operator delete(memory, kAlignment); }
};

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
    used.memory.reset(static_cast<char*>(::operator new(static_cast<size_t>(bytes), kAlignment)));
    used.bytes = bytes;
  }
  return used.memory.get();
}

void release_thread_memory(int slot, int64_t above) {
  if (slots[slot].bytes > above) slots[slot] = Slot();
}

}  // namespace sparse_attn
