"""Each op against its peers: the cases that pytest-benchmark and rlkernel.bench run.

``benchmarks/<op>.py`` is all that an op needs to be benchmarked. It defines

    FUNCTION                 name of the public function, where it is not the op's
    DIMS                     letters of the sizes that make_inputs of ``reference/<op>.py`` takes, rows first
    INPUTS, OPTIONS          keyword arguments of make_inputs; of the function where only sizes are given
    SHARED, GRADIENTS        inputs without rows; inputs that get a gradient
    OUTPUTS(case)            outputs that get an upstream gradient
    SCALARS                  outputs that are one number of all rows; may be absent
    row_elements(case)       elements of the largest temporary that a row needs in plain PyTorch
    WHOLE                    True where a row's results depend on the other rows; may be left out
    exact(inputs, case, got) truth of the outputs ``got``, where a draw is part of them; may be left out
    bytes_moved, flops       what a perfect implementation moves and computes, (case, backward) -> int
    gemm(case)               (m, n, k) of the GEMM whose rate bounds it, or None
    QUICK, PRESETS           cases of the default run; cases by name
    PEERS                    rivals, plain PyTorch first: it is the yardstick of the errors

and, where tensors are not [rows, ...] of the sizes, or there is more to say,

    make_inputs              in place of the reference's
    first_rows(inputs, grads, count)
                             inputs and gradients of the case with ``count`` as its first size
    upstream_shape(case)     shape of an output's gradient
    ratios(case, backward)   columns beside the times: how much less is to do than plain PyTorch does, by name
"""

if __name__ != "rlkernel.benchmarks":
    raise ImportError(
        "import rlkernel.benchmarks, not benchmarks; for pytest the files are rlkernel/benchmarks/<op>.py"
    )
