#include "arguments.h"

#include <string.h>

#include <string>

#include "../common/tensor.h"

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

// A tensor's address, dtype, sizes and strides. The caller's tuple keeps the tensor alive.
class TensorView {
 public:
  explicit TensorView(py::handle tensor) : given_(!tensor.is_none()) {
    if (given_ && !describe(tensor.ptr(), &info_)) ask(tensor);
  }
  TensorView(const TensorView&) = delete;

  bool given() const { return given_; }

  template <class T>
  T* data() const {
    return given_ ? reinterpret_cast<T*>(info_.data()) : nullptr;
  }

  // The plain format of a tensor of floating point numbers.
  Format format() const {
    const bool brain = info_.type == kBrainFloat;
    if (info_.bits == 16 && (brain || info_.type == kFloat))
      return brain ? Format::kBf16 : Format::kFp16;
    if (info_.bits == 32 && info_.type == kFloat) return Format::kFp32;
    if (info_.bits == 8 && info_.type == kInt) return Format::kInt8;
    throw py::value_error("unexpected dtype");
  }

  // Sizes of the first `count` axes.
  void sizes(int count, int64_t* to) const {
    for (int i = 0; i < count; ++i) to[i] = info_.sizes[i];
  }

  // Strides of the first `count` axes in units of 1 / `unit` elements.
  void strides(int count, int64_t unit, int64_t* to) const {
    for (int i = 0; i < count; ++i) to[i] = info_.strides[i] * unit;
  }

 private:
  static constexpr int kMostAxes = 4;
  static constexpr uint8_t kInt = 0, kFloat = 2, kBrainFloat = 4;  // DLPack's numbers of types

  // Reads attributes, of tensors without DLPack's table.
  void ask(py::handle tensor) {
    const py::object sizes = attribute(tensor, SPARSE_ATTN_NAME("shape"));
    const py::object strides = call_method(tensor, SPARSE_ATTN_NAME("stride"));
    for (int i = 0; i < kMostAxes && i < PyTuple_GET_SIZE(sizes.ptr()); ++i) {
      asked_[0][i] = integer(PyTuple_GET_ITEM(sizes.ptr(), i));
      asked_[1][i] = integer(PyTuple_GET_ITEM(strides.ptr(), i));
    }
    info_.memory = static_cast<char*>(
        PyLong_AsVoidPtr(call_method(tensor, SPARSE_ATTN_NAME("data_ptr")).ptr()));
    const py::str dtype(attribute(tensor, SPARSE_ATTN_NAME("dtype")));
    const char* name = PyUnicode_AsUTF8(dtype.ptr());
    if (!name) throw py::error_already_set();
    const auto is = [=](const char* other) { return strcmp(name, other) == 0; };
    info_.type = is("torch.bfloat16") ? kBrainFloat : is("torch.int8") ? kInt : kFloat;
    info_.bits = is("torch.float32") ? 32 : is("torch.int8") ? 8 : 16;
    info_.offset = 0;
    info_.sizes = asked_[0];
    info_.strides = asked_[1];
  }

  bool given_;
  TensorInfo info_ = {};
  int64_t asked_[2][kMostAxes];
};

// Rows of `items` items of `bytes` bytes.
PagedRows paged_rows(const TensorView& view, Number type, int64_t items, int64_t bytes) {
  PagedRows rows;
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

PagedRows paged_rows(const TensorView& view, Number type) {
  int64_t sizes[4] = {0, 0, 0, 0};
  if (view.given()) view.sizes(4, sizes);
  return paged_rows(view, type, sizes[3], (number_bits(type) + 7) / 8);
}

PagedRows paged_scales(py::handle tensor) {
  return paged_rows(TensorView(tensor), Number::kFp16, 1, 2);
}

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
    plane->k = paged_rows(view, codec_of(format).element);
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

// The place of a field in an op's argument tuple.
Py_ssize_t place_of(py::handle call, const char* name) {
  const py::tuple names = call.attr("_fields");
  for (size_t i = 0; i < names.size(); ++i) {
    if (py::cast<std::string>(names[i]) == name) return static_cast<Py_ssize_t>(i);
  }
  throw py::attribute_error(name);
}

py::handle field(py::handle call, Py_ssize_t place) { return PyTuple_GET_ITEM(call.ptr(), place); }

// A field of the argument tuple, whose place is looked up once for each reader: a reader reads the
// tuples of one op.
#define FIELD(name)                                       \
  field(call, [&call] {                                   \
    static const Py_ssize_t place = place_of(call, name); \
    return place;                                         \
  }())

// What the tuple's class derives from its fields.
#define DERIVED(name) attribute(call, SPARSE_ATTN_NAME(name))

// Which query rows belong to which sequence, and how long these are.
template <class Params>
void read_lengths(py::handle call, Params* p) {
  int64_t starts;
  const TensorView cu_seqlens_q(FIELD("cu_seqlens_q"));
  cu_seqlens_q.sizes(1, &starts);
  p->batch = starts - 1;
  p->cu_seqlens_q = cu_seqlens_q.data<const int32_t>();
  p->seq_lens = TensorView(FIELD("seq_lens")).data<const int32_t>();
  p->max_seqlen_q = integer(FIELD("max_seqlen_q"));
  p->max_seq_len = integer(FIELD("max_seq_len"));
}

}  // namespace

AttendParams attend_params(py::handle call, py::handle out, py::handle lse) {
  AttendParams p;
  int64_t sizes[4];

  const TensorView q_view(FIELD("q"));
  q_view.sizes(3, sizes);
  p.q_format = q_view.format();
  q_view.strides(2, element_bytes(p.q_format), p.q_strides);
  p.q = q_view.data<const char>();
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

  const py::handle kv = FIELD("kv");
  if (!kv.is_none()) {
    PlaneParams& main = p.main;
    const py::handle v = FIELD("v"), v_format = FIELD("v_format");
    const Format k_format = format_named(FIELD("format"));
    p.kv_heads = read_plane(kv, k_format, FIELD("kv_scale"), FIELD("page_size"), &main);
    if (!packed(k_format)) {
      const TensorView rope(FIELD("kv_rope"));
      if (rope.given()) main.rope = paged_rows(rope, codec_of(rope.format()).element);
      main.v_scale = main.k_scale;
    }
    if (!v.is_none()) {
      const Format format =
          PyUnicode_GetLength(v_format.ptr()) > 0 ? format_named(v_format) : k_format;
      main.v = paged_rows(TensorView(v), codec_of(format).element);
      main.v_scale = paged_scales(FIELD("v_scale"));
    }
    read_page_table(FIELD("page_table"), &main);
    main.range = TensorView(FIELD("kv_range")).data<const int32_t>();
    read_indices(FIELD("indices"), &main);
    main.counts = TensorView(FIELD("index_counts")).data<const int32_t>();
    main.select_block = integer(FIELD("select_block"));
    main.ratio = integer(FIELD("ratio"));
  }
  const py::handle win = FIELD("win");
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
                           py::handle values, py::handle candidate_blocks) {
  SelectParams p;
  int64_t sizes[4];

  const TensorView q_view(FIELD("q")), weight_view(FIELD("weights"));
  q_view.sizes(3, sizes);
  p.q_format = q_view.format();
  q_view.strides(2, element_bytes(p.q_format), p.q_strides);
  p.q = q_view.data<const char>();
  p.tokens = sizes[0];
  p.heads = static_cast<int32_t>(sizes[1]);
  p.dim = static_cast<int32_t>(sizes[2]);
  const TensorView q_scale_view(FIELD("q_scale"));
  if (q_scale_view.given()) {
    p.q_scale = q_scale_view.data<const char>();
    p.q_scale_format = q_scale_view.format();
    q_scale_view.strides(2, element_bytes(p.q_scale_format), p.q_scale_strides);
  }
  if (weight_view.given()) {
    p.weights = weight_view.data<const char>();
    p.weight_format = weight_view.format();
    weight_view.strides(2, element_bytes(p.weight_format), p.weight_strides);
  }
  read_lengths(call, &p);

  const py::handle keys = FIELD("keys");
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
  p.strides = integer(DERIVED("strides"));
  p.block = integer(FIELD("block"));
  p.pool = word<Pool>(FIELD("pool"), kPoolNames);
  p.keep_first = integer(FIELD("keep_first"));
  p.keep_last = integer(FIELD("keep_last"));
  p.tail = word<Tail>(FIELD("tail"), kTailNames);
  p.by_score = word<int>(FIELD("order"), kOrderNames) == 2;

  const TensorView candidate_view(FIELD("candidates"));
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

CompressParams compress_params(py::handle call, py::handle latent) {
  CompressParams p;
  int64_t sizes[3];
  const auto token_rows = [](py::handle tensor) {
    TokenRows rows;
    const TensorView view(tensor);
    if (!view.given()) return rows;
    rows.data = view.data<const char>();
    rows.format = view.format();
    view.strides(2, element_bytes(rows.format), rows.strides);
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
  const py::handle rows = FIELD("rows"), plane = FIELD("plane"), format = FIELD("format");
  TensorView(rows).sizes(3, sizes);
  p.tokens = sizes[0];
  p.heads = sizes[1];
  p.width = sizes[2];
  p.rows = token_rows(rows);
  p.gates = token_rows(FIELD("gates"));

  read_lengths(call, &p);

  p.plane = entry_plane(plane, FIELD("scale"), format, FIELD("page_size"), row_dim(plane, format));
  p.page_table = page_table(FIELD("page_table"));
  const py::handle state = FIELD("state");
  if (!state.is_none()) {
    const int64_t columns = p.gates.data ? 2 * p.width : p.width;
    p.state = entry_plane(state, py::none(), py::str("fp32"), py::int_(0), columns);
    p.state_page_table = page_table(FIELD("state_page_table"));
  }
  p.stride = integer(FIELD("stride"));
  p.span = integer(DERIVED("covered"));
  p.kept = integer(DERIVED("kept"));

  const TensorView bias(FIELD("bias")), cos_sin(FIELD("cos_sin"));
  p.bias = bias.data<const float>();
  if (p.bias) bias.strides(1, 1, &p.bias_stride);
  p.norm = TensorView(FIELD("norm")).data<const float>();
  p.eps = static_cast<float>(PyFloat_AsDouble(FIELD("eps").ptr()));
  p.cos_sin = cos_sin.data<const float>();
  if (cos_sin.given()) {
    cos_sin.sizes(2, sizes);
    p.positions = sizes[0];
    p.rotated = sizes[1];
    cos_sin.strides(1, 1, &p.cos_sin_stride);
  }
  p.rope_stride = integer(DERIVED("rope_step"));
  p.dtype = format_named(FIELD("dtype"));
  p.latent = TensorView(latent).data<char>();
  p.latents = integer(FIELD("entries"));
  return p;
}

StoreParams store_params(py::handle call) {
  StoreParams p;
  int64_t sizes[3];
  const TensorView row_view(FIELD("rows"));
  row_view.sizes(3, sizes);
  p.tokens = sizes[0];
  p.rows = row_view.data<const char>();
  p.row_format = row_view.format();
  row_view.strides(2, element_bytes(p.row_format), p.row_strides);
  p.plane =
      entry_plane(FIELD("plane"), FIELD("scale"), FIELD("format"), FIELD("page_size"), sizes[2]);
  p.slots = TensorView(FIELD("slots")).data<const int64_t>();
  return p;
}

LoadParams load_params(py::handle call, py::handle out) {
  LoadParams p;
  const py::handle plane = FIELD("plane"), format = FIELD("format");
  const TensorView slots(FIELD("slots"));
  p.plane = entry_plane(plane, FIELD("scale"), format, FIELD("page_size"), row_dim(plane, format));
  slots.sizes(1, &p.tokens);
  p.slots = slots.data<const int64_t>();
  const TensorView out_view(out);
  p.out = out_view.data<char>();
  p.out_format = out_view.format();
  return p;
}

ConvertParams convert_params(py::handle call) {
  ConvertParams p;
  const py::handle src = FIELD("src"), src_format = FIELD("src_format");
  const int64_t dim = row_dim(src, src_format);
  p.src = entry_plane(src, FIELD("src_scale"), src_format, FIELD("src_page_size"), dim);
  p.dst = entry_plane(FIELD("dst"), FIELD("dst_scale"), FIELD("dst_format"), FIELD("dst_page_size"),
                      dim);
  const TensorView slots(FIELD("src_slots"));
  p.entries = p.src.slots();
  if (slots.given()) slots.sizes(1, &p.entries);
  p.src_slots = slots.data<const int64_t>();
  p.dst_slots = TensorView(FIELD("dst_slots")).data<const int64_t>();
  return p;
}

MergeParams merge_params(py::handle call, py::handle out, py::handle lse) {
  MergeParams p;
  int64_t sizes[4];
  const TensorView outs(FIELD("outs")), lses(FIELD("lses"));
  p.format = outs.format();
  outs.sizes(4, sizes);
  outs.strides(3, element_bytes(p.format), p.out_strides);
  lses.strides(3, 1, p.lse_strides);
  p.outs = outs.data<const char>();
  p.lses = lses.data<const float>();
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
  const TensorView shard_indices(FIELD("shard_indices")), shard_values(FIELD("shard_values"));
  const TensorView shard_offsets(FIELD("shard_offsets"));
  shard_indices.sizes(4, sizes);
  shard_indices.strides(4, 1, p.index_strides);
  shard_values.strides(4, 1, p.value_strides);
  shard_offsets.strides(2, 1, p.offset_strides);
  p.shard_indices = shard_indices.data<const int32_t>();
  p.shard_values = shard_values.data<const float>();
  p.shard_offsets = shard_offsets.data<const int32_t>();
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
#undef DERIVED
#undef FIELD

}  // namespace sparse_attn
