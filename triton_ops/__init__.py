"""Triton kernels: the portable GPU path, one module per op."""

if __name__ != "rlkernel.triton_ops":  # a second copy of every kernel would be compiled and cached under another name
    raise ImportError("import rlkernel.triton_ops, not triton_ops")
