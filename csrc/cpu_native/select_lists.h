// The lists that a call of `select` returns.
#pragma once

#include <vector>

#include "select_rows.h"

namespace sparse_attn {

// Empties the lists of all rows but these.
void empty_others(const SelectParams& p, const std::vector<Rows>& rows);

// Writes a list of row r of a block. The best of it are cut, and ascend.
void write_list(const SelectParams& p, const SelectBlock& block, int32_t list, int32_t r,
                const RowBest& best);

}  // namespace sparse_attn
