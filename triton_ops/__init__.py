"""Triton kernels: the portable GPU path, one module per op."""

import contextlib
import importlib
import os

# A second copy of every kernel would be compiled and cached under another name.
if __name__ != "rlkernel.triton_ops":
    raise ImportError("import rlkernel.triton_ops, not triton_ops")

if os.environ.get("TRITON_INTERPRET") == "1":
    # Triton imports it at the first launch, with its language already replaced, which fails on Python 3.10
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.experimental.gluon")
