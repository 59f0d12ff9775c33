// Entries of a paged plane of any format: `write_row` and `read_row` are all that an op needs to
// know of a format.
#pragma once

#include <stdint.h>

#include "../common/layout.h"
#include "isa.h"

namespace sparse_attn {

// Where one part of every row lies: `bytes` bytes at each [page, offset, head]. No bytes: the
// format lacks the part. Strides are in bytes.
struct PartRows {
  char* first = nullptr;
  int64_t strides[3] = {0, 0, 0};
  int64_t bytes = 0;

  char* at(int64_t page, int64_t offset, int64_t head) const {
    return first + page * strides[0] + offset * strides[1] + head * strides[2];
  }
};

struct EntryPlane {
  Format format = Format::kFp32;
  PartRows values, scales, rope, pad;
  int64_t pages = 0;
  int64_t page_size = 1;
  int64_t heads = 1;
  int64_t dim = 0;  // elements of a row

  int64_t slots() const { return pages * page_size; }
};

// Fills in the parts of a plane whose other fields are set. Strides, in bytes, are those of pages,
// entries and heads; of pages alone in planar formats. `scale` is the scale plane, if the format
// has one.
void place_parts(EntryPlane* plane, char* data, const int64_t strides[3], char* scale,
                 const int64_t scale_strides[3]);

// The kernels of one instruction set: a row of `dim` numbers to and from the parts of an entry.
struct RowKernels {
  // From fp32, bf16 or fp16.
  void (*encode)(const Codec& codec, Number from, const char* row, int64_t dim,
                 const PartsToWrite& to);
  void (*decode)(const Codec& codec, const EntryParts& parts, int64_t dim, float* to);
  void (*decode_bf16)(const Codec& codec, const EntryParts& parts, int64_t dim, uint16_t* to);
  // Copies past the caches.
  void (*stream)(char* to, const char* from, int64_t bytes);
};

extern const RowKernels SPARSE_ATTN_ISAS(RowKernels);

// Quantises a row of plane.dim numbers (fp32, bf16 or fp16) into a slot, which must not lie past
// the plane.
void write_row(const RowKernels& kernels, const EntryPlane& plane, int64_t slot, int64_t head,
               Number from, const char* row);

void read_row(const RowKernels& kernels, const EntryPlane& plane, int64_t slot, int64_t head,
              float* row);

EntryParts parts_of(const EntryPlane& plane, int64_t slot, int64_t head);

// Asks for the memory of an entry. Negative slots have none.
void fetch_to_read(const EntryPlane& plane, int64_t slot);
void fetch_to_write(const EntryPlane& plane, int64_t slot);

// Writes the padding of an entry, if its format has some: zeros.
void clear_pad(const EntryPlane& plane, int64_t slot);

}  // namespace sparse_attn
