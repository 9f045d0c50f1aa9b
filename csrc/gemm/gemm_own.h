// A product of matrices as the kernel of grouped products takes it: one expert has all rows.
#pragma once

#include "gemm/gemm.h"
#include "gemm/gemm_grouped.h"

namespace te {

// FP8 of one scale with split accumulation, or of rows by squares; workspace: kGroupedWorkspace bytes or
// more.
inline grouped::Problem OneGroup(const GemmKey& key, const GemmOperands& operands) {
  const bool squares = key.scales == Scales::kRowsBySquares;
  grouped::Problem p{};
  p.experts = 1, p.rows = int(key.m), p.columns = int(key.n), p.k = int(key.k);
  p.lhs = key.lhs, p.rhs = key.rhs, p.result = key.out;
  p.sums = squares ? grouped::Sums::kSquares : grouped::Sums::kSplit, p.layout = grouped::Layout::kAlong;
  p.left = operands.lhs, p.right = operands.rhs, p.bias = operands.bias, p.c = operands.c;
  (squares ? p.left_blocks : p.left_inv) = operands.lhs_scale_inv;
  (squares ? p.right_blocks : p.right_inv) = operands.rhs_scale_inv;
  p.out = operands.out, p.counter = static_cast<int*>(operands.workspace);
  return p;
}

}  // namespace te
