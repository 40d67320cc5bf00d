"""Each op against its peers: the cases that pytest-benchmark and rlkernel.bench run."""

if __name__ != "rlkernel.benchmarks":
    raise ImportError("import rlkernel.benchmarks, not benchmarks")
