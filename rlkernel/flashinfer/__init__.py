"""Ops over FlashInfer (``flashinfer-python``): found here, imported by the first call that it can run."""

import importlib.util

if importlib.util.find_spec("flashinfer") is None:
    raise ImportError("flashinfer is not installed")
