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

AttendParams attend_params(pybind11::handle call, pybind11::handle out, pybind11::handle lse);

SelectParams select_params(pybind11::handle call, pybind11::handle indices, pybind11::handle counts,
                           pybind11::handle values, pybind11::handle candidate_blocks);

CompressParams compress_params(pybind11::handle call, pybind11::handle latent);

StoreParams store_params(pybind11::handle call);

LoadParams load_params(pybind11::handle call, pybind11::handle out);

ConvertParams convert_params(pybind11::handle call);

MergeParams merge_params(pybind11::handle call, pybind11::handle out, pybind11::handle lse);

SelectMergeParams select_merge_params(pybind11::handle call, pybind11::handle indices,
                                      pybind11::handle counts, pybind11::handle values);

}  // namespace sparse_attn
