#include "arguments.h"

#include <string.h>

namespace sparse_attn {
namespace {

namespace py = pybind11;

// A name that is looked up by identity after the first use.
class Name {
 public:
  explicit Name(const char* name) : object_(PyUnicode_InternFromString(name)) {}
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

#define SPARSE_ATTN_NAME(name)        \
  ([]() -> PyObject* {                \
    static const Name interned(name); \
    return interned.get();            \
  }())

py::object attribute(py::handle from, PyObject* name) {
  PyObject* value = PyObject_GetAttr(from.ptr(), name);
  if (!value) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

py::object call_method(py::handle from, PyObject* name) {
  PyObject* value = PyObject_CallMethodNoArgs(from.ptr(), name);
  if (!value) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

int64_t integer(py::handle x) {
  const int64_t value = PyLong_AsLongLong(x.ptr());
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

Format format_named(py::handle name) {
  const char* text = PyUnicode_AsUTF8(name.ptr());
  if (!text) throw py::error_already_set();
  for (const FormatInfo& info : kFormats) {
    if (strcmp(info.name, text) == 0) return info.format;
  }
  throw py::value_error("unknown format");
}

// The number of a word in the list of an option's words.
template <class Word, size_t kCount>
Word word(py::handle name, const char* const (&words)[kCount]) {
  const char* text = PyUnicode_AsUTF8(name.ptr());
  if (!text) throw py::error_already_set();
  for (size_t i = 0; i < kCount; ++i) {
    if (strcmp(words[i], text) == 0) return static_cast<Word>(i);
  }
  throw py::value_error("unknown word");
}

// A tensor's address, sizes and strides. The caller's tuple keeps the tensor alive.
class TensorView {
 public:
  explicit TensorView(py::handle tensor) : tensor_(tensor) {}

  bool given() const { return !tensor_.is_none(); }

  template <class T>
  T* data() const {
    if (!given()) return nullptr;
    return reinterpret_cast<T*>(
        PyLong_AsVoidPtr(call_method(tensor_, SPARSE_ATTN_NAME("data_ptr")).ptr()));
  }

  // Sizes of the first `count` axes.
  void sizes(int count, int64_t* to) const {
    read(attribute(tensor_, SPARSE_ATTN_NAME("shape")), count, 1, to);
  }

  // Strides of the first `count` axes in units of 1 / `unit` elements.
  void strides(int count, int64_t unit, int64_t* to) const {
    read(call_method(tensor_, SPARSE_ATTN_NAME("stride")), count, unit, to);
  }

 private:
  static void read(const py::object& tuple, int count, int64_t unit, int64_t* to) {
    for (int i = 0; i < count; ++i) to[i] = integer(PyTuple_GET_ITEM(tuple.ptr(), i)) * unit;
  }

  py::handle tensor_;
};

// Rows of `items` items of `bytes` bytes.
PagedRows paged_rows(py::handle tensor, Number type, int64_t items, int64_t bytes) {
  PagedRows rows;
  const TensorView view(tensor);
  if (!view.given()) return rows;
  rows.data = view.data<const char>();
  int64_t strides[3];
  view.strides(3, bytes, strides);
  rows.page_stride = strides[0];
  rows.entry_stride = strides[1];
  rows.head_stride = strides[2];
  rows.dim = static_cast<int32_t>(items * bytes * 8 / number_bits(type));
  rows.type = type;
  return rows;
}

PagedRows paged_rows(py::handle tensor, Number type) {
  const TensorView view(tensor);
  int64_t sizes[4] = {0, 0, 0, 0};
  if (view.given()) view.sizes(4, sizes);
  return paged_rows(tensor, type, sizes[3], (number_bits(type) + 7) / 8);
}

PagedRows paged_scales(py::handle tensor) { return paged_rows(tensor, Number::kFp16, 1, 2); }

void read_indices(py::handle tensor, PlaneParams* plane) {
  const TensorView view(tensor);
  if (!view.given()) return;
  int64_t sizes[3];
  view.sizes(3, sizes);
  view.strides(3, 1, plane->index_strides);
  plane->index_heads = sizes[1];
  plane->selected = sizes[2];
  plane->listed = true;
  plane->indices = view.data<const int32_t>();
}

// Reads a plane's rows and scales, and how many pages, entries a page and heads it has. `page_size`
// counts in planar formats only, which do not show it.
int32_t read_plane(py::handle tensor, Format format, py::handle scale, py::handle page_size,
                   PlaneParams* plane) {
  const TensorView view(tensor);
  int64_t sizes[3] = {0, 0, 1}, strides[2] = {0, 0};
  view.sizes(planar(format) ? 1 : 3, sizes);
  if (planar(format)) sizes[1] = integer(page_size);
  plane->given = true;
  plane->pages = sizes[0];
  plane->page_size = sizes[1];
  if (packed(format)) {
    view.strides(planar(format) ? 1 : 2, 1, strides);
    set_packed(plane, format, view.data<const char>(), sizes[1], strides[0], strides[1]);
  } else {
    plane->k = paged_rows(tensor, codec_of(format).element);
    plane->k_scale = paged_scales(scale);
  }
  return static_cast<int32_t>(sizes[2]);
}

void read_page_table(py::handle tensor, PlaneParams* plane) {
  int64_t sizes[2], strides[1];
  const TensorView table(tensor);
  table.sizes(2, sizes);
  table.strides(1, 1, strides);
  plane->page_table = table.data<const int32_t>();
  plane->page_table_stride = strides[0];
  plane->max_pages = sizes[1];
}

#define FIELD(name) attribute(call, SPARSE_ATTN_NAME(name))

// Which query rows belong to which sequence, and how long these are.
template <class Params>
void read_lengths(py::handle call, Params* p) {
  int64_t starts;
  const py::object cu_seqlens_q = FIELD("cu_seqlens_q");
  TensorView(cu_seqlens_q).sizes(1, &starts);
  p->batch = starts - 1;
  p->cu_seqlens_q = TensorView(cu_seqlens_q).data<const int32_t>();
  p->seq_lens = TensorView(FIELD("seq_lens")).data<const int32_t>();
  p->max_seqlen_q = integer(FIELD("max_seqlen_q"));
  p->max_seq_len = integer(FIELD("max_seq_len"));
}

}  // namespace

AttendParams attend_params(py::handle call, py::handle out, py::handle lse, Format q_format,
                           Format rope_format) {
  AttendParams p;
  int64_t sizes[4];

  const py::object q = FIELD("q");
  const TensorView q_view(q);
  q_view.sizes(3, sizes);
  q_view.strides(2, element_bytes(q_format), p.q_strides);
  p.q = q_view.data<const char>();
  p.q_format = q_format;
  p.tokens = sizes[0];
  p.heads = static_cast<int32_t>(sizes[1]);
  p.qk_dim = static_cast<int32_t>(sizes[2]);
  p.out = TensorView(out).data<char>();
  p.lse = TensorView(lse).data<float>();

  read_lengths(call, &p);
  p.sinks = TensorView(FIELD("sinks")).data<const float>();
  p.scale = PyFloat_AsDouble(FIELD("scale").ptr());
  p.v_dim = static_cast<int32_t>(integer(FIELD("v_dim")));
  p.causal = FIELD("causal").ptr() == Py_True;

  const py::object kv = FIELD("kv");
  if (!kv.is_none()) {
    PlaneParams& main = p.main;
    const py::object v = FIELD("v"), v_format = FIELD("v_format");
    const Format k_format = format_named(FIELD("format"));
    p.kv_heads = read_plane(kv, k_format, FIELD("kv_scale"), FIELD("page_size"), &main);
    if (!packed(k_format)) {
      main.rope = paged_rows(FIELD("kv_rope"), codec_of(rope_format).element);
      main.v_scale = main.k_scale;
    }
    if (!v.is_none()) {
      const Format format =
          PyUnicode_GetLength(v_format.ptr()) > 0 ? format_named(v_format) : k_format;
      main.v = paged_rows(v, codec_of(format).element);
      main.v_scale = paged_scales(FIELD("v_scale"));
    }
    read_page_table(FIELD("page_table"), &main);
    main.range = TensorView(FIELD("kv_range")).data<const int32_t>();
    read_indices(FIELD("indices"), &main);
    main.counts = TensorView(FIELD("index_counts")).data<const int32_t>();
    main.select_block = integer(FIELD("select_block"));
    main.ratio = integer(FIELD("ratio"));
  }
  const py::object win = FIELD("win");
  if (!win.is_none()) {
    PlaneParams& window = p.window;
    p.kv_heads = read_plane(win, format_named(FIELD("win_format")), py::none(),
                            FIELD("win_page_size"), &window);
    read_page_table(FIELD("win_page_table"), &window);
    window.range = TensorView(FIELD("win_range")).data<const int32_t>();
    read_indices(FIELD("win_indices"), &window);
    window.window = integer(FIELD("window"));
  }
  return p;
}

SelectParams select_params(py::handle call, py::handle indices, py::handle counts,
                           py::handle values, py::handle candidate_blocks, Format q_format,
                           Format weight_format) {
  SelectParams p;
  int64_t sizes[4];

  const py::object q = FIELD("q"), weights = FIELD("weights");
  const TensorView q_view(q), weight_view(weights);
  q_view.sizes(3, sizes);
  q_view.strides(2, element_bytes(q_format), p.q_strides);
  p.q = q_view.data<const char>();
  p.q_format = q_format;
  p.tokens = sizes[0];
  p.heads = static_cast<int32_t>(sizes[1]);
  p.dim = static_cast<int32_t>(sizes[2]);
  if (weight_view.given()) {
    p.weights = weight_view.data<const char>();
    weight_view.strides(2, element_bytes(weight_format), p.weight_strides);
    p.weight_format = weight_format;
  }
  read_lengths(call, &p);

  const py::object keys = FIELD("keys");
  p.key_heads = read_plane(keys, format_named(FIELD("format")), FIELD("key_scale"),
                           FIELD("page_size"), &p.keys);
  read_page_table(FIELD("page_table"), &p.keys);
  p.keys.range = TensorView(FIELD("kv_range")).data<const int32_t>();
  p.keys.ratio = integer(FIELD("ratio"));

  p.k = integer(FIELD("k"));
  p.scale = PyFloat_AsDouble(FIELD("scale").ptr());
  p.row_k = TensorView(FIELD("row_k")).data<const int32_t>();
  p.causal = FIELD("causal").ptr() == Py_True;
  p.score = word<Score>(FIELD("score"), kScoreNames);
  p.rounded = word<int>(FIELD("score_dtype"), kScoreTypeNames) == 1;
  p.lists = static_cast<int32_t>(integer(FIELD("out_heads")));
  p.bounds = FIELD("bounds").ptr() == Py_True;
  p.strides = integer(FIELD("strides"));
  p.block = integer(FIELD("block"));
  p.pool = word<Pool>(FIELD("pool"), kPoolNames);
  p.keep_first = integer(FIELD("keep_first"));
  p.keep_last = integer(FIELD("keep_last"));
  p.tail = word<Tail>(FIELD("tail"), kTailNames);
  p.by_score = word<int>(FIELD("order"), kOrderNames) == 2;

  const py::object candidates = FIELD("candidates");
  const TensorView candidate_view(candidates);
  p.takes_candidates = candidate_view.given();
  if (p.takes_candidates) {
    candidate_view.sizes(3, sizes);
    candidate_view.strides(3, 1, p.candidate_strides);
    p.candidates = candidate_view.data<const int32_t>();
    p.candidate_heads = sizes[1];
    p.candidate_count = sizes[2];
  }
  p.candidate_block = integer(FIELD("candidate_block"));
  p.candidate_k = integer(FIELD("candidate_k"));

  p.indices = TensorView(indices).data<int32_t>();
  p.counts = TensorView(counts).data<int32_t>();
  p.values = TensorView(values).data<float>();
  p.has_values = TensorView(values).given();
  p.candidate_blocks = TensorView(candidate_blocks).data<int32_t>();
  return p;
}

// Bytes of an item of a plane's tensor: two numbers of 4 bits share one.
int64_t item_bytes(Format format) {
  const int32_t bits = number_bits(codec_of(format).element);
  return bits < 8 ? 1 : bits / 8;
}

EntryPlane entry_plane(py::handle tensor, py::handle scale, py::handle format, py::handle page_size,
                       int64_t dim) {
  EntryPlane plane;
  const TensorView view(tensor), scale_view(scale);
  plane.format = format_named(format);
  int64_t sizes[4], strides[3] = {0, 0, 0}, scale_strides[3] = {0, 0, 0};
  const int axes = planar(plane.format) ? 1 : 3;
  view.sizes(axes, sizes);
  plane.pages = sizes[0];
  plane.page_size = axes == 1 ? integer(page_size) : sizes[1];
  plane.heads = axes == 1 ? 1 : sizes[2];
  plane.dim = dim;
  view.strides(axes, item_bytes(plane.format), strides);
  if (scale_view.given()) scale_view.strides(3, 2, scale_strides);
  place_parts(&plane, view.data<char>(), strides, scale_view.data<char>(), scale_strides);
  return plane;
}

// Elements of a row of a plane.
int64_t row_dim(py::handle tensor, py::handle format_name) {
  const Format format = format_named(format_name);
  const Codec& codec = codec_of(format);
  if (packed(format)) return codec.dim + codec.rope;
  int64_t sizes[4];
  TensorView(tensor).sizes(4, sizes);
  return sizes[3] * item_bytes(format) * 8 / number_bits(codec.element);
}

CompressParams compress_params(py::handle call, py::handle latent, Format row_format,
                               Format gate_format) {
  CompressParams p;
  int64_t sizes[3];
  const auto token_rows = [](py::handle tensor, Format format) {
    TokenRows rows;
    const TensorView view(tensor);
    if (!view.given()) return rows;
    rows.data = view.data<const char>();
    rows.format = format;
    view.strides(2, element_bytes(format), rows.strides);
    return rows;
  };
  const auto page_table = [](py::handle tensor) {
    PageTable table;
    int64_t axes[2];
    const TensorView view(tensor);
    table.pages = view.data<const int32_t>();
    view.sizes(2, axes);
    table.columns = axes[1];
    view.strides(1, 1, &table.stride);
    return table;
  };
  const py::object rows = FIELD("rows"), plane = FIELD("plane"), format = FIELD("format");
  TensorView(rows).sizes(3, sizes);
  p.tokens = sizes[0];
  p.heads = sizes[1];
  p.width = sizes[2];
  p.rows = token_rows(rows, row_format);
  p.gates = token_rows(FIELD("gates"), gate_format);

  read_lengths(call, &p);

  p.plane = entry_plane(plane, FIELD("scale"), format, FIELD("page_size"), row_dim(plane, format));
  p.page_table = page_table(FIELD("page_table"));
  const py::object state = FIELD("state");
  if (!state.is_none()) {
    const int64_t columns = p.gates.data ? 2 * p.width : p.width;
    p.state = entry_plane(state, py::none(), py::str("fp32"), py::int_(0), columns);
    p.state_page_table = page_table(FIELD("state_page_table"));
  }
  p.stride = integer(FIELD("stride"));
  p.span = integer(FIELD("covered"));
  p.kept = integer(FIELD("kept"));

  const py::object bias = FIELD("bias"), cos_sin = FIELD("cos_sin");
  p.bias = TensorView(bias).data<const float>();
  if (p.bias) TensorView(bias).strides(1, 1, &p.bias_stride);
  p.norm = TensorView(FIELD("norm")).data<const float>();
  p.eps = static_cast<float>(PyFloat_AsDouble(FIELD("eps").ptr()));
  p.cos_sin = TensorView(cos_sin).data<const float>();
  if (TensorView(cos_sin).given()) {
    TensorView(cos_sin).sizes(2, sizes);
    p.positions = sizes[0];
    p.rotated = sizes[1];
    TensorView(cos_sin).strides(1, 1, &p.cos_sin_stride);
  }
  p.rope_stride = integer(FIELD("rope_step"));
  p.dtype = format_named(FIELD("dtype"));
  p.latent = TensorView(latent).data<char>();
  p.latents = integer(FIELD("entries"));
  return p;
}

StoreParams store_params(py::handle call, Format row_format) {
  StoreParams p;
  int64_t sizes[3];
  const py::object rows = FIELD("rows");
  const TensorView row_view(rows);
  row_view.sizes(3, sizes);
  p.tokens = sizes[0];
  p.rows = row_view.data<const char>();
  p.row_format = row_format;
  row_view.strides(2, element_bytes(row_format), p.row_strides);
  p.plane =
      entry_plane(FIELD("plane"), FIELD("scale"), FIELD("format"), FIELD("page_size"), sizes[2]);
  p.slots = TensorView(FIELD("slots")).data<const int64_t>();
  return p;
}

LoadParams load_params(py::handle call, py::handle out, Format out_format) {
  LoadParams p;
  const py::object plane = FIELD("plane"), format = FIELD("format"), slots = FIELD("slots");
  p.plane = entry_plane(plane, FIELD("scale"), format, FIELD("page_size"), row_dim(plane, format));
  TensorView(slots).sizes(1, &p.tokens);
  p.slots = TensorView(slots).data<const int64_t>();
  p.out = TensorView(out).data<char>();
  p.out_format = out_format;
  return p;
}

ConvertParams convert_params(py::handle call) {
  ConvertParams p;
  const py::object src = FIELD("src"), src_format = FIELD("src_format");
  const int64_t dim = row_dim(src, src_format);
  p.src = entry_plane(src, FIELD("src_scale"), src_format, FIELD("src_page_size"), dim);
  p.dst = entry_plane(FIELD("dst"), FIELD("dst_scale"), FIELD("dst_format"), FIELD("dst_page_size"),
                      dim);
  const py::object slots = FIELD("src_slots");
  p.entries = p.src.slots();
  if (TensorView(slots).given()) TensorView(slots).sizes(1, &p.entries);
  p.src_slots = TensorView(slots).data<const int64_t>();
  p.dst_slots = TensorView(FIELD("dst_slots")).data<const int64_t>();
  return p;
}

MergeParams merge_params(py::handle call, py::handle out, py::handle lse, Format format) {
  MergeParams p;
  int64_t sizes[4];
  const py::object outs = FIELD("outs"), lses = FIELD("lses");
  TensorView(outs).sizes(4, sizes);
  TensorView(outs).strides(3, element_bytes(format), p.out_strides);
  TensorView(lses).strides(3, 1, p.lse_strides);
  p.outs = TensorView(outs).data<const char>();
  p.lses = TensorView(lses).data<const float>();
  p.format = format;
  p.sinks = TensorView(FIELD("sinks")).data<const float>();
  p.base_2 = word<int>(FIELD("base"), kBaseNames) == 1;
  p.inf_is_empty = FIELD("inf_is_empty").ptr() == Py_True;
  p.parts = sizes[0];
  p.tokens = sizes[1];
  p.heads = sizes[2];
  p.dim = sizes[3];
  p.out = TensorView(out).data<char>();
  p.lse = TensorView(lse).data<float>();
  return p;
}

SelectMergeParams select_merge_params(py::handle call, py::handle indices, py::handle counts,
                                      py::handle values) {
  SelectMergeParams p;
  int64_t sizes[4];
  const py::object shard_indices = FIELD("shard_indices"), shard_values = FIELD("shard_values");
  const py::object shard_offsets = FIELD("shard_offsets");
  TensorView(shard_indices).sizes(4, sizes);
  TensorView(shard_indices).strides(4, 1, p.index_strides);
  TensorView(shard_values).strides(4, 1, p.value_strides);
  TensorView(shard_offsets).strides(2, 1, p.offset_strides);
  p.shard_indices = TensorView(shard_indices).data<const int32_t>();
  p.shard_values = TensorView(shard_values).data<const float>();
  p.shard_offsets = TensorView(shard_offsets).data<const int32_t>();
  p.shards = sizes[0];
  p.tokens = sizes[1];
  p.lists = sizes[2];
  p.width = sizes[3];
  p.k = integer(FIELD("k"));
  p.run = integer(FIELD("run"));
  p.stride = integer(FIELD("stride"));
  p.row_k = TensorView(FIELD("row_k")).data<const int32_t>();
  p.by_score = word<int>(FIELD("order"), kOrderNames) == 2;
  p.indices = TensorView(indices).data<int32_t>();
  p.counts = TensorView(counts).data<int32_t>();
  p.values = TensorView(values).data<float>();
  return p;
}
#undef FIELD

}  // namespace sparse_attn
