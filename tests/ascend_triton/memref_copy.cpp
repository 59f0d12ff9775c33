// What code that MLIR lowers asks of its runtime: a copy between two memories of one shape and any
// strides.

#include <cstdint>
#include <cstring>

namespace {

struct Memory {
  char* allocated;
  char* aligned;
  int64_t offset;
  int64_t sizes_and_strides[];
};

struct Unranked {
  int64_t rank;
  Memory* memory;
};

void copy(int64_t bytes, int64_t rank, const int64_t* sizes, const char* from,
          const int64_t* from_strides, char* to, const int64_t* to_strides) {
  if (rank == 0) {
    std::memcpy(to, from, bytes);
    return;
  }
  if (rank == 1 && *from_strides == 1 && *to_strides == 1) {
    std::memcpy(to, from, *sizes * bytes);
    return;
  }
  for (int64_t i = 0; i < *sizes; ++i) {
    copy(bytes, rank - 1, sizes + 1, from + i * *from_strides * bytes, from_strides + 1,
         to + i * *to_strides * bytes, to_strides + 1);
  }
}

}  // namespace

extern "C" void memrefCopy(int64_t bytes, const Unranked* from, const Unranked* to) {
  const Memory& source = *from->memory;
  const Memory& target = *to->memory;
  const int64_t rank = from->rank;
  const int64_t* sizes = source.sizes_and_strides;
  copy(bytes, rank, sizes, source.aligned + source.offset * bytes, sizes + rank,
       target.aligned + target.offset * bytes, target.sizes_and_strides + rank);
}
