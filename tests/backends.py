"""What a test of an op runs on: every backend that has the op, and the device kernels in emulation."""

import contextlib
import os

import pytest
import torch

import rlkernel
from rlkernel import dispatch, native

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
# Libraries that need a GPU and return token ids alone: test_sampling_flashinfer.py is theirs.
LIBRARIES = ("flashinfer", "aiter")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NO_INTERPRETER = "Triton runs on the GPU here, or is too old to be interpreted"
TRITON_DEVICES = [device for device in DEVICES if device != "cpu" or INTERPRETED]
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason=NO_INTERPRETER)
EMULATED = {"emulated-warp32": 32, "emulated-warp64": 64}


def of(op: str) -> list:
    """Pairs (backend, device) to parametrize a test of ``op`` with."""
    names = [name for name in dispatch.BACKENDS if name not in LIBRARIES and dispatch.has(name, op)]
    pairs = [(name, device) for name in names for device in DEVICES]
    pairs += [(name, "cpu") for name in EMULATED if dispatch.has("native", op)]
    return [pytest.param(*pair, id="-".join(pair), marks=_marks(*pair)) for pair in pairs]


def _marks(backend: str, device: str) -> list:
    return [needs_interpreter] if (backend, device) == ("triton", "cpu") else []


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
