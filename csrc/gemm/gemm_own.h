// A product of matrices as the kernel of grouped products takes it: one expert has all rows.
#pragma once

#include "gemm/gemm.h"
#include "gemm/gemm_grouped.h"

namespace te {

// The scales of operands are of tensors; workspace: kGroupedWorkspace bytes or more.
inline grouped::Problem OneGroup(const GemmKey& key, grouped::Sums sums, const GemmOperands& operands) {
  grouped::Problem p{};
  p.experts = 1, p.rows = int(key.m), p.columns = int(key.n), p.k = int(key.k);
  p.lhs = key.lhs, p.rhs = key.rhs, p.result = key.out;
  p.sums = sums, p.layout = grouped::Layout::kAlong;
  p.left = operands.lhs, p.right = operands.rhs, p.bias = operands.bias, p.c = operands.c;
  p.left_inv = operands.lhs_scale_inv, p.right_inv = operands.rhs_scale_inv;
  p.out = operands.out, p.counter = static_cast<int*>(operands.workspace);
  return p;
}

}  // namespace te
