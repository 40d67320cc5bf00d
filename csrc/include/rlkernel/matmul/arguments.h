// Arguments of the batch-invariant matrix product. Its bits are declared, the same for every instruction set:
//
//   lane l of out[m, n] starts at 0 and takes fma(a[m, k], b[k, n], lane) of k = l, l + 8, l + 16, ... in this order, or where both
//   operands are bf16 of k = 2l + 1, 2l, 2l + 17, 2l + 16, ...; where the last group is not whole, the lanes behind K take
//   fma(0, 0, lane)
//   sum = ((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7))
//   out[m, n] = round(sum + bias[n])
//
// fp16 and bf16 operands are converted to fp32, which is exact. Where both are bf16, an operand or a result of these lines below
// the normal range is 0. Nothing else that a call is has a part in it: not M, N, the place
// of a row, the strides, nor how tiles are cut and who computes them.
#pragma once
#include "rlkernel/dtype.h"
#include "rlkernel/kernel.h"

namespace rlkernel {

constexpr int64_t kChainLanes = 8;

// Of a [..., K] operand: element (i, k) of matrix `z` is at first[z * batch + i * row + k * step].
struct Operand {
  const void* first;
  Dtype dtype;
  int64_t batch, row, step;
};

struct Matmul {
  Operand a, b;       // rows of b are columns of the product
  const float* bias;  // [N], or null
  void* out;          // [batch, M, N]
  Dtype out_dtype;
  int64_t batch, M, N, K;
};

RLKERNEL_KERNEL(matmul, const Matmul&)

}  // namespace rlkernel
