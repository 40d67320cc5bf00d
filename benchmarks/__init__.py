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
"""

if __name__ != "rlkernel.benchmarks":
    raise ImportError("import rlkernel.benchmarks, not benchmarks")
