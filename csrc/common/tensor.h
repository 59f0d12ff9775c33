// Tensors of Python without torch's headers: DLPack's table of C functions, which the type of a
// tensor of torch 2.10 and newer carries. An attribute costs several times as much.
#pragma once

#include <Python.h>
#include <stdint.h>

namespace sparse_attn {

// DLPack's description of a tensor. Sizes and strides are the tensor's own, in elements.
struct TensorInfo {
  char* memory;
  int32_t device_type, device_index;
  int32_t axes;
  uint8_t type, bits;
  uint16_t lanes;
  const int64_t* sizes;
  const int64_t* strides;
  uint64_t offset;

  char* data() const { return memory + offset; }
};

// DLPack's table, version 1.
struct TensorTable {
  uint32_t major, minor;
  const TensorTable* older;
  void (*not_used[3])();
  int (*describe)(void* tensor, TensorInfo* to);
};

// The table that tensors of a type carry, or null. No exception is left.
inline const TensorTable* tensor_table(PyTypeObject* type) {
  static PyTypeObject* known = nullptr;  // nearly every tensor is of one type
  static const TensorTable* its_table = nullptr;
  if (type == known) return its_table;
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  void* found = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr;
  Py_XDECREF(capsule);
  PyErr_Clear();
  const auto* table = static_cast<const TensorTable*>(found);
  while (table && table->major != 1) table = table->older;
  if (!table || !table->describe) return nullptr;
  Py_INCREF(type);
  Py_XDECREF(known);
  known = type;
  its_table = table;
  return table;
}

// Describes a tensor, without owning anything of it. False, and no exception, for what is no tensor
// and for tensors that DLPack cannot describe.
inline bool describe(PyObject* tensor, TensorInfo* to) {
  const TensorTable* table = tensor_table(Py_TYPE(tensor));
  if (!table) return false;
  if (table->describe(tensor, to) != 0) {
    PyErr_Clear();
    return false;
  }
  return to->axes == 0 || (to->sizes && to->strides);
}

}  // namespace sparse_attn
