"""What a test of an op runs on: every backend that has the op, and the device kernels in emulation."""

import contextlib
import os

import pytest
import torch
from skips import NO_INTERPRETER as NO_INTERPRETER

import rlkernel
from rlkernel import dispatch, native
from rlkernel.bench import status

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
# Libraries that need a GPU and return token ids alone: test_sampling_flashinfer.py is theirs.
LIBRARIES = ("flashinfer", "aiter")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_DEVICES = [device for device in DEVICES if device != "cpu" or INTERPRETED]
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason=NO_INTERPRETER)
EMULATED = {"emulated-warp32": 32, "emulated-warp64": 64}


def _fused(tensors, options) -> bool:
    return options.get("algorithm") == "fused"


# What a backend may refuse of the calls that tests of all backends make, and of which calls. Whatever else
# `unsupported()` says there is a backend that was lost, so a failure. On a GPU the vendors' libraries decide.
REFUSALS = {
    ("group_advantages", "rewards must be at most fp32"): lambda x, _: x[0].dtype == torch.float64,
    ("whiten", "x must be at most fp32"): lambda x, _: x[0].dtype == torch.float64,
    ("linear_logprob", "algorithm 'fused' is a Triton kernel"): _fused,
    ("linear_logprob", "algorithm 'fused' needs float16 or bfloat16"): _fused,
}


def of(op: str) -> list:
    """Pairs (backend, device) to parametrize a test of ``op`` with.

    An op whose compiled kernel is one for CPUs alone has none for a GPU, where ``native`` refuses every call.
    """
    names = [name for name in dispatch.BACKENDS if name not in LIBRARIES and dispatch.has(name, op)]
    absent = [("native", "cuda")] if op in status.CPU_ONLY else []
    pairs = [(name, device) for name in names for device in DEVICES if (name, device) not in absent]
    if dispatch.has("native", op) and op not in status.CPU_ONLY:
        pairs += [(name, "cpu") for name in EMULATED]
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
    """Skip what the backend is known to refuse; fail where it refuses more."""
    name = "native" if backend in EMULATED else backend
    reasons = dispatch.reasons(op, *tensors, **options)[name]
    if lost := [
        r for r in reasons if tensors[0].device.type == "cpu" and not _known(op, r, tensors, options)
    ]:
        pytest.fail(f"{backend} must run this {op}, or backends.REFUSALS must say why not, got {lost}")
    if reasons:
        pytest.skip(f"{backend} refuses: {'; '.join(reasons)}")


def _known(op: str, reason: str, tensors, options) -> bool:
    return any(
        name == op and reason.startswith(text) and concerns(tensors, options)
        for (name, text), concerns in REFUSALS.items()
    )
