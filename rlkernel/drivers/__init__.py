"""Loops of the host that run under the kernels of any backend."""
