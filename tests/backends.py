"""What a test of an op runs on: every backend that has the op, and the device kernels in emulation."""

import contextlib
import importlib.util

import pytest
import torch

import rlkernel
from rlkernel import dispatch, native

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
EMULATED = {"emulated-warp32": 32, "emulated-warp64": 64}


def of(op: str) -> list:
    """Pairs (backend, device) to parametrize a test of ``op`` with."""
    pairs = [(name, device) for name in dispatch.BACKENDS for device in DEVICES if _has(name, op)]
    pairs += [(name, "cpu") for name in EMULATED if _has("native", op)]
    return [pytest.param(*pair, id="-".join(pair)) for pair in pairs]


def _has(name: str, op: str) -> bool:
    package = dispatch.BACKENDS[name]
    return all(importlib.util.find_spec(path) is not None for path in (package, f"{package}.{op}"))


@contextlib.contextmanager
def running(backend: str):
    """Run ops on ``backend``, which may be an emulated one."""
    with contextlib.ExitStack() as stack:
        if backend in EMULATED:
            import emulation

            stack.enter_context(native.emulated(emulation.module(EMULATED[backend])))
            backend = "native"
        stack.enter_context(rlkernel.use_backend(backend))
        yield


def is_slow(backend: str, device: str) -> bool:
    """Whether a row costs milliseconds: Python or fibers play the GPU."""
    return device == "cpu" and backend not in ("native", "reference")


def skip_unless_able(backend: str, op: str, *tensors, **options) -> None:
    name = "native" if backend in EMULATED else backend
    if reasons := rlkernel.explain(op, *tensors, **options)[name]:
        pytest.skip(f"{backend}: {'; '.join(reasons)}")
