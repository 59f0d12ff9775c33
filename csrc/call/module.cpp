// The Python module sparse_attn._call: what every call of an op does to all of its arguments (see
// sparse_attn/reading.py). It is plain Python C API, as every call pays for it.
#include <Python.h>
#include <string.h>

#include "../common/tensor.h"

namespace {

using sparse_attn::describe;
using sparse_attn::TensorInfo;

// A key. It grows in place, then on the heap.
class Bytes {
 public:
  Bytes() = default;
  Bytes(const Bytes&) = delete;
  ~Bytes() {
    if (data_ != local_) PyMem_Free(data_);
  }

  // False without memory.
  bool add(const void* data, size_t size) {
    if (!reserve(size)) return false;
    memcpy(data_ + size_, data, size);
    size_ += size;
    return true;
  }

  bool add(char byte) { return add(&byte, 1); }

  // In groups of seven bits, so that the end of a number shows.
  bool add_number(int64_t number) {
    char groups[10];
    size_t size = 0;
    auto rest = static_cast<uint64_t>(number);
    for (; rest >= 128; rest >>= 7) groups[size++] = static_cast<char>(rest | 128);
    groups[size++] = static_cast<char>(rest);
    return add(groups, size);
  }

  PyObject* object() const {
    return PyBytes_FromStringAndSize(data_, static_cast<Py_ssize_t>(size_));
  }

 private:
  bool reserve(size_t more) {
    if (size_ + more <= capacity_) return true;
    const size_t capacity = 2 * (size_ + more);
    char* grown = static_cast<char*>(PyMem_Malloc(capacity));
    if (!grown) return false;
    memcpy(grown, data_, size_);
    if (data_ != local_) PyMem_Free(data_);
    data_ = grown;
    capacity_ = capacity;
    return true;
  }

  char local_[512];
  char* data_ = local_;
  size_t size_ = 0, capacity_ = sizeof(local_);
};

bool is_dtype(PyObject* value) { return strcmp(Py_TYPE(value)->tp_name, "torch.dtype") == 0; }

bool add_text(Bytes* key, PyObject* text) {
  Py_ssize_t size;
  const char* utf8 = PyUnicode_AsUTF8AndSize(text, &size);
  if (!utf8) PyErr_Clear();  // half of a surrogate pair: a text of no known kind
  return utf8 && key->add_number(size) && key->add(utf8, static_cast<size_t>(size));
}

// Adds what checks and choice may depend on, so that no two values look alike: of a tensor that is
// all but its address. False for a value of no known kind, or with an exception.
bool add_value(Bytes* key, PyObject* value) {
  if (value == Py_None) return key->add('n');
  if (value == Py_True) return key->add('t');
  if (value == Py_False) return key->add('f');
  if (PyUnicode_CheckExact(value)) return key->add('s') && add_text(key, value);
  if (PyLong_CheckExact(value)) {
    int overflow;
    const int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow == 0 && key->add('i') && key->add_number(number);
  }
  if (PyFloat_CheckExact(value)) {
    const double number = PyFloat_AS_DOUBLE(value);
    return key->add('d') && key->add(&number, sizeof(number));
  }
  TensorInfo info;
  if (describe(value, &info)) {
    bool ok = key->add('T') && key->add_number(info.type) && key->add_number(info.bits) &&
              key->add_number(info.lanes) && key->add_number(info.device_type) &&
              key->add_number(info.device_index) && key->add_number(info.axes);
    for (int32_t i = 0; ok && i < info.axes; ++i) {
      ok = key->add_number(info.sizes[i]) && key->add_number(info.strides[i]);
    }
    return ok;
  }
  // There is one object of each dtype, for ever.
  return is_dtype(value) && key->add('p') && key->add(&value, sizeof(value));
}

// Reads the calls of one op.
struct Reader {
  PyObject_HEAD PyObject* op;
  PyObject* arguments;  // the class of the op's argument tuple
  PyObject* names;      // of its fields
  PyObject* defaults;   // of its fields, with the class itself where a field has none
  Py_ssize_t start, stop;
};

void reader_dealloc(PyObject* self) {
  auto* reader = reinterpret_cast<Reader*>(self);
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(reader->op);
  Py_XDECREF(reader->arguments);
  Py_XDECREF(reader->names);
  Py_XDECREF(reader->defaults);
  type->tp_free(self);
  Py_DECREF(type);
}

// Not in two steps: no method meets a reader without its fields.
PyObject* reader_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *op, *arguments;
  Py_ssize_t start, stop;
  if (!PyArg_ParseTuple(args, "UO!nn", &op, &PyType_Type, &arguments, &start, &stop))
    return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) return nullptr;
  auto* reader = reinterpret_cast<Reader*>(self);
  Py_INCREF(op);
  Py_INCREF(arguments);
  reader->op = op;
  reader->arguments = arguments;
  reader->start = start;
  reader->stop = stop;
  reader->names = PyObject_GetAttrString(arguments, "_fields");
  PyObject* defaults = PyObject_GetAttrString(arguments, "_field_defaults");
  if (defaults && reader->names && PyDict_Check(defaults) && PyTuple_Check(reader->names) &&
      PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(arguments), &PyTuple_Type)) {
    const Py_ssize_t count = PyTuple_GET_SIZE(reader->names);
    reader->defaults = PyTuple_New(count);
    for (Py_ssize_t i = 0; reader->defaults && i < count; ++i) {
      PyObject* value = PyDict_GetItem(defaults, PyTuple_GET_ITEM(reader->names, i));
      if (!value) value = arguments;
      Py_INCREF(value);
      PyTuple_SET_ITEM(reader->defaults, i, value);
    }
  } else if (!PyErr_Occurred()) {
    PyErr_SetString(PyExc_TypeError, "arguments: expected a class of named tuples");
  }
  Py_XDECREF(defaults);
  if (reader->defaults) return self;
  Py_DECREF(self);
  return nullptr;
}

// The place of a field, or -1. `next` is where it is looked for first: names come in order, and as
// new strings.
Py_ssize_t place_of(const Reader& reader, PyObject* name, Py_ssize_t next) {
  const Py_ssize_t count = PyTuple_GET_SIZE(reader.names);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Py_ssize_t place = next + i < count ? next + i : next + i - count;
    if (PyUnicode_Compare(PyTuple_GET_ITEM(reader.names, place), name) == 0) return place;
  }
  return -1;
}

// The argument tuple of a call. What does not fit is left to the class, for its exceptions.
PyObject* bind(const Reader& reader, PyObject* args, PyObject* kwargs) {
  const Py_ssize_t count = PyTuple_GET_SIZE(reader.names), leading = PyTuple_GET_SIZE(args);
  if (leading > count) return PyObject_Call(reader.arguments, args, kwargs);
  auto* type = reinterpret_cast<PyTypeObject*>(reader.arguments);
  PyObject* bound = type->tp_alloc(type, count);
  if (!bound) return nullptr;
  for (Py_ssize_t i = 0; i < leading; ++i) {
    PyObject* value = PyTuple_GET_ITEM(args, i);
    Py_INCREF(value);
    PyTuple_SET_ITEM(bound, i, value);
  }
  bool fits = true;
  Py_ssize_t next = leading;
  PyObject *name, *value;
  for (Py_ssize_t at = 0; fits && PyDict_Next(kwargs, &at, &name, &value);) {
    const Py_ssize_t place = place_of(reader, name, next < count ? next : 0);
    fits = place >= 0 && !PyTuple_GET_ITEM(bound, place);
    if (!fits) break;
    Py_INCREF(value);
    PyTuple_SET_ITEM(bound, place, value);
    next = place + 1;
  }
  for (Py_ssize_t i = leading; fits && i < count; ++i) {
    if (PyTuple_GET_ITEM(bound, i)) continue;
    value = PyTuple_GET_ITEM(reader.defaults, i);
    fits = value != reader.arguments;
    if (!fits) break;
    Py_INCREF(value);
    PyTuple_SET_ITEM(bound, i, value);
  }
  if (fits) return bound;
  Py_DECREF(bound);
  return PyErr_Occurred() ? nullptr : PyObject_Call(reader.arguments, args, kwargs);
}

// Bytes; None if a value is of no known kind; null with an exception.
PyObject* key_of(const Reader& reader, PyObject* bound, PyObject* given) {
  Bytes key;
  bool ok = add_text(&key, reader.op);
  for (Py_ssize_t i = 0; ok && i < PyTuple_GET_SIZE(bound); ++i) {
    PyObject* value = PyTuple_GET_ITEM(bound, i);
    if (value == PyTuple_GET_ITEM(reader.defaults, i) || (reader.start <= i && i < reader.stop))
      continue;
    ok = key.add_number(i) && add_value(&key, value);
  }
  ok = ok && key.add_number(PyTuple_GET_SIZE(bound));
  for (Py_ssize_t i = 0; ok && i < PyTuple_GET_SIZE(given); ++i) {
    ok = add_value(&key, PyTuple_GET_ITEM(given, i));
  }
  if (ok) return key.object();
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyObject* reader_read(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3 || !PyTuple_Check(arguments[0]) || !PyDict_Check(arguments[1]) ||
      !PyTuple_Check(arguments[2])) {
    PyErr_SetString(PyExc_TypeError, "read takes (tuple, dict, tuple)");
    return nullptr;
  }
  const Reader& reader = *reinterpret_cast<Reader*>(self);
  PyObject* bound = bind(reader, arguments[0], arguments[1]);
  if (!bound) return nullptr;
  PyObject* key = key_of(reader, bound, arguments[2]);
  PyObject* both = key ? PyTuple_New(2) : nullptr;
  if (!both) {
    Py_DECREF(bound);
    Py_XDECREF(key);
    return nullptr;
  }
  PyTuple_SET_ITEM(both, 0, bound);
  PyTuple_SET_ITEM(both, 1, key);
  return both;
}

// The memory from a tensor's first to its last element.
struct Span {
  const char *begin, *end;

  bool meets(const Span& other) const { return begin < other.end && other.begin < end; }
};

// False for what is no tensor that DLPack describes.
bool span_of(PyObject* tensor, Span* span) {
  TensorInfo info;
  if (!describe(tensor, &info)) return false;
  int64_t last = 0;
  bool empty = false;
  for (int32_t i = 0; i < info.axes; ++i) {
    empty = empty || info.sizes[i] == 0;
    last += (info.sizes[i] - 1) * info.strides[i];
  }
  span->begin = span->end = info.data();
  if (!empty) span->end += ((last + 1) * info.bits * info.lanes + 7) / 8;
  return true;
}

bool holds_memory(PyObject* value) {
  return value != Py_None && !PyLong_Check(value) && !PyFloat_Check(value) &&
         !PyUnicode_Check(value) && !is_dtype(value);
}

PyObject* reader_apart(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyTuple_Check(arguments[0]) || !PyTuple_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "apart takes (tuple, tuple)");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments[0]); ++i) {
    PyObject* written = PyTuple_GET_ITEM(arguments[0], i);
    if (written == Py_None) continue;
    Span span, other;
    if (!span_of(written, &span)) Py_RETURN_FALSE;
    int meeting = 0;
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(arguments[1]); ++j) {
      PyObject* value = PyTuple_GET_ITEM(arguments[1], j);
      if (!holds_memory(value)) continue;
      if (!span_of(value, &other)) Py_RETURN_FALSE;
      meeting += span.meets(other);
    }
    if (meeting > 1) Py_RETURN_FALSE;  // more than itself
  }
  Py_RETURN_TRUE;
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef reader_methods[] = {
    {"read", as_method(reader_read), METH_FASTCALL,
     "read(args, kwargs, given): the argument tuple, and bytes that differ where two calls of the "
     "op differ in anything but memory and the fields from start to stop, or None if a value is "
     "of no known kind."},
    {"apart", as_method(reader_apart), METH_FASTCALL,
     "apart(written, arguments): whether each of the written tensors lies apart from all but one "
     "of the arguments, itself. False also where first and last elements do not tell."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot reader_slots[] = {{Py_tp_new, reinterpret_cast<void*>(reader_new)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(reader_dealloc)},
                              {Py_tp_methods, reader_methods},
                              {0, nullptr}};

PyType_Spec reader_spec = {"sparse_attn._call.Reader", sizeof(Reader), 0, Py_TPFLAGS_DEFAULT,
                           reader_slots};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_call",
                          "What every call of an op does to all of its arguments.",
                          0,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__call() {
  PyObject* module = PyModule_Create(&definition);
  PyObject* type = module ? PyType_FromSpec(&reader_spec) : nullptr;
  if (type && PyModule_AddObject(module, "Reader", type) == 0) return module;
  Py_XDECREF(type);
  Py_XDECREF(module);
  return nullptr;
}
