"""linear_logprob_statistics: what trainers log of a row, beside the bits of linear_logprob."""

import pytest
import torch
from accuracy import check
from backends import of, running, skip_unless_able
from bitwise import assert_equal

import rlkernel
from rlkernel.calls.linear_logprob import STATISTICS as NAMES
from rlkernel.drivers import linear_tiles
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.reference.linear_logprob import make_inputs
from rlkernel.runtime import gpu

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("linear_logprob"))
pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(8, 48))
    monkeypatch.setattr(linear_tiles, "GPU_TILE", Tile(8, 48))


def inputs_of(backend, device, dtype=torch.float32, bias=True):
    inputs = make_inputs(19, 32, 133, dtype=dtype, device=device, ignored=0.2)
    skip_unless_able(backend, "linear_logprob", inputs["hidden"], inputs["weight"], compute_dtype=dtype)
    if bias:
        g = torch.Generator().manual_seed(1)
        inputs["bias"] = torch.randn(133, generator=g).to(inputs["weight"])
    return inputs


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


OPTIONS = {
    "plain": {},
    "head": {"logit_scale": -1.3, "temperature": 0.7},
    "softcap": {"softcap": 5.0, "logit_scale": 0.5, "temperature": 1.7},
    "per row": {"temperature": torch.rand(19, generator=torch.Generator().manual_seed(2)) + 0.3},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, dtype, option):
    inputs = inputs_of(backend, device, dtype)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[option].items()}
    logits = inputs["hidden"].double() @ inputs["weight"].double().T + inputs["bias"].double()
    best = (logits * options.get("logit_scale", 1.0)).argmax(-1)
    some = torch.arange(19, device=device) % 3 == 0  # the target is the largest, in several tiles
    inputs["target_ids"] = torch.where(some & (inputs["target_ids"] >= 0), best, inputs["target_ids"])
    with rlkernel.use_backend("reference"):
        truth = rlkernel.linear_logprob_statistics(
            **{k: wide(v) for k, v in inputs.items()}, **{k: wide(v) for k, v in options.items()},
            statistics=NAMES,
        )  # fmt: skip
        torchs = rlkernel.linear_logprob_statistics(**inputs, **options, statistics=NAMES)
    with running(backend):
        ours = rlkernel.linear_logprob_statistics(**inputs, **options, statistics=NAMES)
        plain = rlkernel.linear_logprob(**inputs, **options, algorithm="tiled")
    for name in NAMES[:1] + NAMES[2:]:
        check(name, getattr(ours, name), getattr(torchs, name), getattr(truth, name), magnitude=4)
    assert ours.is_top1.dtype == torch.bool and torch.equal(ours.is_top1, truth.is_top1)
    assert 3 < int(ours.is_top1.sum()) < 15
    assert ours.entropy is None
    for name in ("logprobs", "lse"):
        assert_equal(name, getattr(ours, name), getattr(plain, name))
    ignored = inputs["target_ids"] == -100
    assert all((x[ignored] == 0).all() for x in ours if x is not None)


@ON_EVERY_BACKEND
def test_gradients_are_those_of_linear_logprob(backend, device):
    inputs = inputs_of(backend, device)
    for frozen in (False, True):
        grads = []
        for op in (rlkernel.linear_logprob, rlkernel.linear_logprob_statistics):
            leaves = {k: v.detach().clone() for k, v in inputs.items()}
            wanted = [leaves[k].requires_grad_() for k in ("hidden", "weight")[: 1 if frozen else 2]]
            with running(backend):
                out = op(**leaves, return_entropy=True)
            loss = out.logprobs.sum() if frozen else out.logprobs.sum() + out.entropy.sum()
            assert not any(x is not None and x.requires_grad for x in out[3:])
            grads.append(torch.autograd.grad(loss, wanted))
        for a, b in zip(*grads, strict=True):
            assert_equal("gradient", a, b)


@pytest.mark.parametrize("asked", [(), *((name,) for name in NAMES)], ids=str)
def test_what_is_not_asked_for_is_none(asked):
    inputs = inputs_of("native", "cpu")
    out = rlkernel.linear_logprob_statistics(**inputs, statistics=asked)
    assert [name for name in NAMES if getattr(out, name) is not None] == list(asked)


def test_as_under_graph_capture_and_empty(monkeypatch):
    inputs = inputs_of("native", "cpu")
    want = rlkernel.linear_logprob_statistics(**inputs, statistics=NAMES)
    monkeypatch.setattr(gpu, "capturing", lambda device: True)
    got = rlkernel.linear_logprob_statistics(**inputs, statistics=NAMES)
    for name in NAMES:
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=1e-6)
    empty = inputs | {"hidden": inputs["hidden"][:0], "target_ids": inputs["target_ids"][:0]}
    out = rlkernel.linear_logprob_statistics(**empty, statistics=NAMES)
    assert [tuple(x.shape) for x in out if x is not None] == [(0,)] * 7


def test_compiles_as_one_graph():
    inputs = inputs_of("native", "cpu")
    hidden = inputs.pop("hidden")

    def call(h):
        out = rlkernel.linear_logprob_statistics(h * 2, **inputs, statistics=("is_top1", "mean_logits"))
        return out.logprobs, out.is_top1, out.mean_logits

    results = []
    for fn in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        leaf = hidden.clone().requires_grad_()
        with rlkernel.use_backend("native"):
            out = fn(leaf)
        results.append([*out, torch.autograd.grad(out[0].sum(), leaf)[0]])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert_equal(f"result {i}", b, a)


def test_bad_input_is_named():
    inputs = inputs_of("native", "cpu")
    with pytest.raises(ValueError, match="statistics must be among 'mean_logits', .*, got 'median'"):
        rlkernel.linear_logprob_statistics(**inputs, statistics=("median",))
    for name in ("min_logits", "max_logits"):
        with pytest.raises(ValueError, match=f"algorithm must be 'tiled' with {name}, got 'fused'"):
            rlkernel.linear_logprob_statistics(**inputs, statistics=(name,), algorithm="fused")


@pytest.mark.parametrize("ends", [(0, 1), (5, 131), (60, 2), (132, 48)], ids=str)
def test_extremes_are_found_in_every_tile(ends):
    inputs = inputs_of("native", "cpu", bias=False)
    low, high = ends
    inputs["hidden"] = inputs["hidden"].abs()
    inputs["weight"][low], inputs["weight"][high] = -9.0, 9.0
    inputs["target_ids"] = inputs["target_ids"].clamp(min=0)
    for options in ({}, {"bias": torch.zeros(133)}, {"logit_scale": -1.0}):
        out = rlkernel.linear_logprob_statistics(**inputs, **options, statistics=("max_logits", "min_logits"))
        want = 9 * inputs["hidden"].sum(-1)
        torch.testing.assert_close(out.max_logits, want)
        torch.testing.assert_close(out.min_logits, -want)


@ON_EVERY_BACKEND
def test_the_strides_of_targets_and_bias_change_no_bit(backend, device):
    inputs = inputs_of(backend, device)
    spread = {k: torch.stack([inputs[k], inputs[k]], -1)[..., 0] for k in ("target_ids", "bias")}
    with running(backend):
        want = rlkernel.linear_logprob_statistics(**inputs, logit_scale=-1.3, statistics=NAMES)
        got = rlkernel.linear_logprob_statistics(**inputs | spread, logit_scale=-1.3, statistics=NAMES)
    for name in NAMES:
        assert_equal(name, getattr(got, name), getattr(want, name))
