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

}  // namespace

char* thread_memory(int slot, int64_t bytes) {
  static thread_local Slot slots[2];
  Slot& used = slots[slot];
  if (bytes > used.bytes) {
    used.memory.reset();
    used.bytes = 0;
    used.memory.reset(static_cast<char*>(::operator new(static_cast<size_t>(bytes), kAlignment)));
    used.bytes = bytes;
  }
  return used.memory.get();
}

}  // namespace sparse_attn
