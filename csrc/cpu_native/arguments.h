// Reads the ops' argument tuples (sparse_attn.ops.attend.Attend, and so on) into
// plain parameters. The op's card has checked the tuple: nothing here checks again.
#pragma once

#include <pybind11/pybind11.h>

#include "attend.h"
#include "compress.h"
#include "merge.h"
#include "select.h"
#include "store.h"

namespace sparse_attn {

// `formats` are those of q and, if it is given, of kv_rope.
AttendParams attend_params(pybind11::handle call, pybind11::handle out, pybind11::handle lse,
                           Format q_format, Format rope_format);

// `formats` are those of q and, if they are given, of the weights.
SelectParams select_params(pybind11::handle call, pybind11::handle indices, pybind11::handle counts,
                           pybind11::handle values, pybind11::handle candidate_blocks,
                           Format q_format, Format weight_format);

// `gate_format` counts if gates are given.
CompressParams compress_params(pybind11::handle call, pybind11::handle latent, Format row_format,
                               Format gate_format);

StoreParams store_params(pybind11::handle call, Format row_format);

LoadParams load_params(pybind11::handle call, pybind11::handle out, Format out_format);

ConvertParams convert_params(pybind11::handle call);

MergeParams merge_params(pybind11::handle call, pybind11::handle out, pybind11::handle lse,
                         Format format);

SelectMergeParams select_merge_params(pybind11::handle call, pybind11::handle indices,
                                      pybind11::handle counts, pybind11::handle values);

}  // namespace sparse_attn
