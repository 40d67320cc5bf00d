"""KL of rollout and trainer is 0 over Triton's kernels too: interpreted, and on a GPU, that has no other."""

import contextlib

import pytest
import torch
from backends import needs_interpreter
from hf_training import FAMILIES, differences

import rlkernel
from rlkernel.consistency import aten, aten_call, aten_products

HERE = contextlib.nullcontext()


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Operations of torch on a CPU go to Triton's kernels, and none to the extension's."""

    def absent(*_):
        raise ImportError

    monkeypatch.setattr(aten_call, "BACKENDS", ("triton",))
    monkeypatch.setattr(aten_products, "_short", lambda: None)
    monkeypatch.setattr(aten.native, "replaced", absent)
    aten_products._backend.cache_clear()
    with rlkernel.use_backend("triton"):
        yield
    aten_products._backend.cache_clear()


@needs_interpreter
def test_interpreted(as_on_a_gpu):
    with rlkernel.batch_invariant() as mode:
        found = differences("qwen3", torch.bfloat16, HERE, 1, new=2, lengths=(2, 5), ours=True)
    assert found == [0.0]
    ops = {name: {row.op for row in mode.report() if row.backend == name} for name in ("native", "triton")}
    assert ops["triton"] >= {"linear", "mm", "mean.dim"}, ops
    assert ops["native"] == {"_log_softmax"}, "on a GPU it is torch's, which is checked"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_on_cuda(family, dtype):
    with torch.device("cuda"), rlkernel.batch_invariant() as mode:
        found = differences(family, dtype, HERE, 3, ours=True)
    assert found == [0.0] * 3
    assert {row.backend for row in mode.report() if row.op == "mm"} == {"triton"}
