"""Ops over AITER (``amd-aiter``): found here, imported by the first call that it can run."""

import importlib.util

if importlib.util.find_spec("aiter") is None:
    raise ImportError("aiter is not installed")
