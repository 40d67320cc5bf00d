"""How much workspace one pass takes: a GPU's chunk is the one that fits, and the message says what would."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlkernel.bench.cases import MODELS
from rlkernel.drivers import linear_tiles
from rlkernel.drivers.linear_policy_loss_plan import Resident
from rlkernel.runtime import workspace

ROWS = 2**20


def tensor(shape, dtype, device):
    """As much of a tensor as sizes are computed from."""
    return SimpleNamespace(shape=shape, dtype=dtype, device=torch.device(device), stride=lambda i: 1)


def head(dtype, logits_dtype):
    return SimpleNamespace(compute_dtype=dtype, logits_dtype=logits_dtype)


def resident(model, dtype, logits_dtype, device):
    """The plan and the bytes of a chunk of whole logits with every gradient."""
    v, h = MODELS[model]["V"], MODELS[model]["H"]
    weight, hidden = tensor((v, h), dtype, device), tensor((ROWS, h), dtype, device)
    asked = weight, head(dtype, logits_dtype)
    options = {"gradients": True, "hidden_gradient": True, "weight_gradient": True}
    return asked, Resident(hidden, *asked, ROWS, True, blocks=1, **options)


@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_on_a_gpu_one_pass_begins_at_the_limit_that_is_told_and_stays(model, logits_dtype, monkeypatch):
    monkeypatch.setattr(workspace, "_limit", 64 * 2**20)
    asked, small = resident(model, torch.bfloat16, logits_dtype, "cuda")
    assert small.size > workspace.limit()
    least = linear_tiles.one_pass_limit(*asked)
    for mib in (least, least + 1, least + 9, 3 * least // 2, 2 * least, 3 * least, 5 * least, 9 * least):
        monkeypatch.setattr(workspace, "_limit", mib * 2**20)
        assert resident(model, torch.bfloat16, logits_dtype, "cuda")[1].size <= mib * 2**20, mib
    monkeypatch.setattr(workspace, "_limit", (least - 1) * 2**20)
    asked, before = resident(model, torch.bfloat16, logits_dtype, "cuda")
    assert before.size > workspace.limit() and linear_tiles.one_pass_limit(*asked) == least


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_on_a_cpu_the_default_limit_holds_a_chunk_of_every_model(model, dtype):
    with workspace.limited(workspace.DEFAULT_LIMIT):
        _, one = resident(model, dtype, torch.float32, "cpu")
    assert one.plan.tokens >= 128 and one.size <= workspace.DEFAULT_LIMIT


@pytest.mark.parametrize("mib", [40, 100, 200])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_told_on_a_cpu_is_enough(model, mib, monkeypatch):
    monkeypatch.setattr(workspace, "_limit", mib * 2**20)
    asked, one = resident(model, torch.bfloat16, torch.float32, "cpu")
    monkeypatch.setattr(workspace, "_limit", linear_tiles.one_pass_limit(*asked) * 2**20)
    assert resident(model, torch.bfloat16, torch.float32, "cpu")[1].size <= workspace.limit()


@pytest.mark.parametrize("model", MODELS)
def test_on_a_gpu_one_pass_needs_room_for_1024_rows_of_logits_and_little_more(model, monkeypatch):
    """Not for the largest chunk that a GEMM profits from: at most a tenth beside the logits of 1024 rows."""
    logits = 1024 * MODELS[model]["V"] * 4
    monkeypatch.setattr(workspace, "_limit", int(1.1 * logits) + 32 * 2**20)
    _, one = resident(model, torch.bfloat16, torch.float32, "cuda")
    assert one.plan.tokens >= 1024 and one.size <= workspace.limit()


def test_a_chunk_that_does_not_pay_is_not_taken(monkeypatch):
    """A GPU reads and writes the gradient of the whole weight for each chunk."""
    monkeypatch.setattr(workspace, "_limit", 600 * 2**20)
    _, one = resident("qwen3-8b", torch.bfloat16, torch.float32, "cuda")
    assert one.size > workspace.limit() and one.plan.tokens > 1024


def test_room_for_more_rows_is_used(monkeypatch):
    monkeypatch.setattr(workspace, "_limit", 2048 * 2**20)
    _, one = resident("qwen3-8b", torch.bfloat16, torch.float32, "cuda")
    assert one.plan.tokens == 3072 and one.size <= workspace.limit(), "the largest chunk that fits"
    monkeypatch.setattr(workspace, "_limit", workspace.GPU_LIMIT)
    _, one = resident("qwen3-8b", torch.bfloat16, torch.float32, "cuda")
    assert one.plan.tokens == 1536 and one.size <= workspace.GPU_LIMIT, "one pass by default"
    monkeypatch.setattr(workspace, "_limit", 3 * 2**30)
    _, one = resident("qwen3-8b", torch.bfloat16, torch.float32, "cuda")
    assert one.plan.tokens == 4096 and one.size <= workspace.limit()


def test_the_page_tells_what_is_told():
    with workspace.limited(workspace.DEFAULT_LIMIT):
        asked, _ = resident("qwen3-8b", torch.bfloat16, torch.float32, "cuda")
        mib = linear_tiles.one_pass_limit(*asked)
    page = (Path(__file__).parents[1] / "docs/ops/linear_policy_loss.md").read_text()
    assert f"the limit is 256.0; {mib} MiB are enough (Qwen3-8B)" in page
    assert f"set_limit({mib} * 2**20)" in page and f"RLKERNEL_WORKSPACE_MIB={mib}" in page
