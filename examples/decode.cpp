// Sparse decoding from C++: finds the ops with PyTorch's dispatcher, by name, and links to nothing
// of sparse_attn. The ops are registered from Python, so `import sparse_attn` must have run in the
// process.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <torch/library.h>

#include <string>
#include <unordered_map>

namespace {

using Arguments = std::unordered_map<std::string, c10::IValue>;

// Calls an op by name with named arguments. Those not given have the defaults of the schema.
torch::jit::Stack call(const std::string& name, const Arguments& given) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
  torch::jit::Stack stack;
  size_t used = 0;
  for (const auto& argument : op.schema().arguments()) {
    const auto found = given.find(argument.name());
    if (found != given.end()) {
      stack.push_back(found->second);
      ++used;
    } else {
      TORCH_CHECK(argument.default_value(), name, ": ", argument.name(), " is missing");
      stack.push_back(*argument.default_value());
    }
  }
  TORCH_CHECK(used == given.size(), name, ": an argument that its schema does not have");
  op.callBoxed(stack);
  return stack;
}

// One query token for each sequence, `q [B, Hq, D]`. Each KV head attends the `k` tokens that have
// most attention, of those in float32 planes `keys`, `values [pages, page_size, Hkv, D]`.
at::Tensor decode(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                  const at::Tensor& page_table, const at::Tensor& seq_lens, double scale, int64_t k,
                  int64_t max_seq_len) {
  const Arguments batch = {{"q", q},
                           {"cu_seqlens_q", at::arange(q.size(0) + 1, seq_lens.options())},
                           {"seq_lens", seq_lens},
                           {"page_table", page_table},
                           {"scale", scale},
                           {"max_seqlen_q", 1},
                           {"max_seq_len", max_seq_len},
                           {"format", std::string("fp32")}};
  Arguments selection = {{"weights", c10::IValue()},
                         {"keys", keys},
                         {"k", k},
                         {"score", std::string("softmax_sum")},
                         {"out_heads", keys.size(2)}};
  selection.insert(batch.begin(), batch.end());
  const auto selected = call("sparse_attn::select", selection);
  Arguments attention = {{"kv", keys},
                         {"v", values},
                         {"v_dim", values.size(3)},
                         {"indices", selected[0]},
                         {"index_counts", selected[1]}};
  attention.insert(batch.begin(), batch.end());
  return call("sparse_attn::attend", attention)[0].toTensor();
}

}  // namespace

TORCH_LIBRARY(sparse_attn_example, m) {
  m.def(
      "decode(Tensor q, Tensor keys, Tensor values, Tensor page_table, Tensor seq_lens, "
      "float scale, int k, int max_seq_len) -> Tensor",
      decode);
}
