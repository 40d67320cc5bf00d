"""What stands in the place of SkyRL's logprobs, entropies and lm_head, beside SkyRL's own."""

import math

import pytest
import torch
from doors import random, with_flash_attn
from skyrl_cases import (
    DOOR,
    check_against_skyrl,
    check_left_to_skyrl,
    nothing_left_behind,
    torch_utils,
    upstream,
)

import rlkernel

assert nothing_left_behind and upstream  # fixtures of every test here

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


@pytest.fixture
def flash_attn(monkeypatch):
    with_flash_attn(monkeypatch, torch_utils, "FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE")


@pytest.mark.parametrize("shape", [(1, 1, 7), (5, 3, 50), (2, 11, 33)], ids=str)
@DTYPES
def test_logprobs_are_skyrls(dtype, shape):
    logits = random(0, *shape, scale=3.0)
    labels = torch.randint(shape[-1], shape[:-1], generator=torch.Generator().manual_seed(1))

    def call(x):
        return torch_utils.logprobs_from_logits(logits=x, labels=labels)

    found, _ = check_against_skyrl(call, [logits], dtype, [random(2, *shape[:-1])], "logprobs_from_logits")
    (got,), _ = found
    assert got.dtype == torch.float32 and got.shape == shape[:-1]


@pytest.mark.parametrize("masked", [False, True])
@DTYPES
def test_entropies_are_skyrls(dtype, masked):
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]]) if masked else None

    def call(x):
        return torch_utils.chunked_entropy_from_logits(x, True, attention_mask=mask, chunk_size=2)

    logits, upstream = random(0, 2, 5, 50, scale=3.0), [random(2, 2, 5)]
    (got,), (grad,) = check_against_skyrl(call, [logits], dtype, upstream, "chunked_entropy_from_logits")[0]
    assert got.dtype == torch.float32
    if masked:
        assert not got[mask == 0].any() and not grad[mask == 0].any() and got[0, 0] > 0


def test_an_entropy_without_a_gradient():
    x = random(0, 2, 5, 50).requires_grad_()
    with rlkernel.patch_skyrl():
        assert not torch_utils.chunked_entropy_from_logits(x).requires_grad


def test_what_the_mask_leaves_out_is_not_read():
    x = random(0, 1, 3, 50)
    x[0, 1] = math.nan
    mask = torch.tensor([[1, 0, 1]])
    assert torch_utils.chunked_entropy_from_logits(x, attention_mask=mask).isnan().any()
    with rlkernel.patch_skyrl():
        got = torch_utils.chunked_entropy_from_logits(x, attention_mask=mask)
    assert got.isfinite().all() and got[0, 1] == 0


def test_what_is_not_a_number_stays_so():
    x = random(0, 1, 3, 50)
    x[0, 1, 7] = math.nan
    with rlkernel.patch_skyrl():
        got = torch_utils.logprobs_from_logits(x, torch.tensor([[1, 2, 3]]))
    assert got.isnan().tolist() == [[False, True, False]]


@pytest.mark.parametrize("available", [True, False])
def test_logits_are_overwritten_where_skyrl_overwrites_them(flash_attn, monkeypatch, available):
    monkeypatch.setattr(torch_utils, "FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", available)

    def changed(asked):
        logits = random(0, 1, 4, 9).requires_grad_() * 1
        before = logits.detach().clone()
        torch_utils.logprobs_from_logits(logits, torch.tensor([[1, 2, 3, 8]]), asked).sum().backward()
        return not torch.equal(before, logits.detach())

    with rlkernel.patch_skyrl():
        assert changed(True) == available and not changed(False)
    assert changed(True) == available and not changed(False)


def test_entropy_and_logprobs_of_the_same_logits(flash_attn):
    """SkyRL takes the logprobs first, whose backward writes over the logits last."""
    labels = torch.tensor([[1, 2, 3, 8]])

    def grad():
        leaf = random(0, 1, 4, 9).requires_grad_()
        logits = leaf * 1
        logprobs = torch_utils.logprobs_from_logits(logits, labels)
        entropy = torch_utils.chunked_entropy_from_logits(logits, requires_grad=True)
        (logprobs.cos().sum() - 0.3 * entropy.sum()).backward()
        return leaf.grad

    want = grad()
    with rlkernel.patch_skyrl():
        torch.testing.assert_close(grad(), want)


LEFT = {
    "logits is torch.float64": lambda: (random(0, 1, 3, 5).double(), torch.zeros(1, 3, dtype=torch.int64)),
    "logits is on a device of type meta": lambda: (
        torch.zeros(1, 3, 5, device="meta"), torch.zeros(1, 3, dtype=torch.int64, device="meta"),
    ),
    "labels have not the shape of the rows of logits": lambda: (
        random(0, 2, 3, 5), torch.zeros(2, 1, dtype=torch.int64),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
@pytest.mark.parametrize("reason", LEFT)
def test_logprobs_that_are_left_to_skyrl(reason):
    check_left_to_skyrl(lambda: torch_utils.logprobs_from_logits(*LEFT[reason]()), reason)


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
@pytest.mark.parametrize(
    ("reason", "shape", "mask"),
    [
        ("logits are not [B, L, V]", (3, 5), None),
        ("attention_mask has not the shape", (2, 3, 5), torch.ones(2, 2)),
        ("attention_mask is no tensor", (2, 3, 5), [[1, 1, 1]] * 2),
        ("logits are not [..., V] with rows", (2, 0, 5), None),
    ],
)
def test_entropies_that_are_left_to_skyrl(reason, shape, mask):
    logits = random(0, *shape)
    check_left_to_skyrl(lambda: torch_utils.chunked_entropy_from_logits(logits, attention_mask=mask), reason)


def test_what_is_left_is_told_once():
    logits, labels = LEFT["logits is torch.float64"]()
    DOOR.check_told_once(
        lambda: torch_utils.logprobs_from_logits(logits, labels),
        "logprobs_from_logits",
        "logits is torch.float64",
    )
