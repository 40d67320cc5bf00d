"""Triton kernels: the portable GPU path, one module per op."""

# A second copy of every kernel would be compiled and cached under another name.
if __name__ != "rlkernel.triton_ops":
    raise ImportError("import rlkernel.triton_ops, not triton_ops")
