// The Python module sparse_attn._cpu_native. It only registers: arguments.cpp reads, the
// other files work.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "arguments.h"
#include "limits.h"
#include "parallel.h"

namespace py = pybind11;
using namespace sparse_attn;

namespace {

// Runs an op without Python's lock. None, or (name of the error, in the second plane, first value,
// second value).
template <class Params>
py::object run(CallStatus (*op)(const Params&), Params& p, int threads, int isa) {
  p.threads = threads;
  p.isa = static_cast<Isa>(isa);
  CallStatus status;
  {
    py::gil_scoped_release release;
    status = op(p);
  }
  if (status.error == CallError::kNone) return py::none();
  return py::make_tuple(kCallErrorNames[static_cast<int>(status.error)], status.in_window,
                        status.values[0], status.values[1]);
}

}  // namespace

PYBIND11_MODULE(_cpu_native, m) {
  m.doc() = "Kernels of the backend cpu_native.";

  m.def(
      "attend",
      [](py::handle call, py::handle out, py::handle lse, int threads, int isa) -> py::object {
        AttendParams p = attend_params(call, out, lse);
        return run(attend, p, threads, isa);
      },
      "Runs attend. Returns None, or (name of the error, in the window plane, first value, second "
      "value).");

  m.def(
      "select",
      [](py::handle call, py::handle indices, py::handle counts, py::handle values,
         py::handle candidate_blocks, int threads, int isa) -> py::object {
        SelectParams p = select_params(call, indices, counts, values, candidate_blocks);
        return run(select, p, threads, isa);
      },
      "Runs select. Returns as attend does.");

  m.def(
      "compress",
      [](py::handle call, py::handle latent, int threads, int isa) -> py::object {
        CompressParams p = compress_params(call, latent);
        return run(compress, p, threads, isa);
      },
      "Runs compress. Returns as attend does, with the state for the window plane.");

  m.def(
      "store",
      [](py::handle call, int threads, int isa) {
        StoreParams p = store_params(call);
        p.threads = threads;
        p.isa = static_cast<Isa>(isa);
        py::gil_scoped_release release;
        return store(p);
      },
      "Runs store. Returns -1, or the largest slot if it lies past the plane.");

  m.def(
      "load",
      [](py::handle call, py::handle out, int threads, int isa) {
        LoadParams p = load_params(call, out);
        p.threads = threads;
        p.isa = static_cast<Isa>(isa);
        py::gil_scoped_release release;
        return load(p);
      },
      "Runs load. Returns as store does.");

  m.def(
      "convert",
      [](py::handle call, int threads, int isa) -> py::object {
        ConvertParams p = convert_params(call);
        p.threads = threads;
        p.isa = static_cast<Isa>(isa);
        PastPlane past;
        {
          py::gil_scoped_release release;
          past = convert(p);
        }
        if (past.slot < 0) return py::none();
        return py::make_tuple(past.in_dst, past.slot);
      },
      "Runs convert. Returns None, or (in dst, the largest slot) if it lies past its plane.");

  m.def(
      "merge",
      [](py::handle call, py::handle out, py::handle lse, int threads) {
        MergeParams p = merge_params(call, out, lse);
        p.threads = threads;
        py::gil_scoped_release release;
        merge(p);
      },
      "Runs merge.");

  m.def(
      "select_merge",
      [](py::handle call, py::handle indices, py::handle counts, py::handle values, int threads,
         int isa) {
        SelectMergeParams p = select_merge_params(call, indices, counts, values);
        p.threads = threads;
        p.isa = static_cast<Isa>(isa);
        py::gil_scoped_release release;
        select_merge(p);
      },
      "Runs select_merge.");

  m.def(
      "instruction_sets",
      [] {
        py::dict numbers;
        for (Isa isa : isas_of_machine()) numbers[name_of(isa)] = static_cast<int>(isa);
        return numbers;
      },
      "Numbers by name of the instruction sets that this machine runs, best last. Ops take a "
      "number.");

  m.def(
      "work_at_limit",
      [](const std::string& limit, py::buffer memory, int threads, int isa) {
        LimitParams p;
        const py::buffer_info info = memory.request(true);
        const auto name = std::find(std::begin(kLimitNames), std::end(kLimitNames), limit);
        if (name == std::end(kLimitNames)) throw py::value_error("unknown limit");
        p.limit = static_cast<Limit>(name - std::begin(kLimitNames));
        p.memory = static_cast<char*>(info.ptr);
        p.bytes = info.size * info.itemsize;
        p.threads = threads;
        p.isa = static_cast<Isa>(isa);
        py::gil_scoped_release release;
        return work_at_limit(p);
      },
      "Does work that binds a machine: 'fp32', 'bf16', 'int8', 'copy' or 'blocks' (of 16 KB, in "
      "random order). Returns its operations or bytes; 0 where the instruction is missing.");

  m.def(
      "move_rows",
      [](py::buffer from, py::buffer from_rows, int64_t read, py::buffer to, py::buffer to_rows,
         int64_t written, int threads, int isa) {
        MoveParams p;
        p.from = static_cast<const char*>(from.request().ptr);
        p.from_rows = static_cast<const int64_t*>(from_rows.request().ptr);
        p.read = read;
        p.to = static_cast<char*>(to.request(true).ptr);
        p.to_rows = static_cast<const int64_t*>(to_rows.request().ptr);
        p.written = written;
        p.rows = from_rows.request().size;
        p.threads = threads;
        p.isa = static_cast<Isa>(isa);
        py::gil_scoped_release release;
        move_rows(p);
      },
      "Reads rows of `read` bytes and writes others of `written`, by their numbers (int64).");

  m.def(
      "formats",
      [] {
        py::list rows;
        for (const FormatInfo& f : kFormats) {
          const auto name = [](Number number) { return kNumbers[static_cast<int>(number)].name; };
          const Codec& c = f.codec;
          py::list sections;
          for (const Section& section : f.sections) {
            if (width(section) == 0) continue;
            py::list parts;
            for (const PartSize& size : section.parts) {
              if (size.part == Part::kNone) continue;
              parts.append(py::make_tuple(kPartNames[static_cast<int>(size.part)], size.bytes));
            }
            sections.append(py::tuple(parts));
          }
          rows.append(
              py::make_tuple(f.name, static_cast<int>(f.format),
                             py::make_tuple(name(c.element), name(c.scale), c.group, c.dim, c.rope),
                             py::tuple(sections), f.page_multiple));
        }
        return rows;
      },
      "(name, code, codec, sections, page multiple) of every format, as csrc/common/layout.h has "
      "them.");

  m.def(
      "numbers",
      [] {
        py::dict bits;
        for (const NumberInfo& number : kNumbers) {
          if (number.bits > 0) bits[number.name] = number.bits;
        }
        return bits;
      },
      "Bits of every type of number, as csrc/common/layout.h has them.");

  m.def("thread_runtime", &thread_runtime,
        "Path of the OpenMP runtime whose threads do the work, or 'std::thread'.");
}
