"""linear_logprob(algorithm="fused"): against fp64, each option alone, by pointers and by descriptors,
and its promises of bits: neither the batch nor the workspace shows in them."""

import linear_policy
import pytest
import torch
from bitwise import assert_equal
from linear_logprob_cases import NAMES, check_against_fp64, run, with_bias
from logprob_cases import upstream_like

import rlkernel
from rlkernel.reference.linear_logprob import make_inputs

pytest.importorskip("triton", reason="Triton is not installed")
from backends import of  # noqa: E402

from rlkernel.triton_ops import _tiles  # noqa: E402
from rlkernel.triton_ops import linear_logprob_fused as fused  # noqa: E402

ON_TRITON = pytest.mark.parametrize(
    ("backend", "device"), [pair for pair in of("linear_logprob") if "triton" in str(pair)]
)
pytestmark = pytest.mark.usefixtures("poison")
FUSED = {"algorithm": "fused", "return_entropy": True}
EVERY = (True, True, True)


@pytest.fixture(params=[0, 9], ids=["pointers", "descriptors"])
def loading(request, monkeypatch, device):
    """How tiles are loaded; a GPU has a way of its own."""
    if device == "cuda" and request.param:
        pytest.skip("the GPU decides how tiles are loaded")
    if request.param:
        monkeypatch.setattr(_tiles, "generation", lambda: request.param)
    return request.param


@pytest.fixture
def cut(monkeypatch):
    """Several slices of the vocabulary and several chunks of rows in backward, with ragged ends."""
    monkeypatch.setattr(fused, "_cut", lambda *_: fused._Cut(128, 256))


OPTIONS = {
    "plain": {},
    "per-row temperature": {"temperature": torch.rand(150, generator=torch.Generator().manual_seed(2)) + 0.3},
    "softcap": {"softcap": 5.0},
    "negative scale": {"logit_scale": -1.5},
    "rounded logits": {"logits_dtype": torch.bfloat16},
    "bias": {},
    "all": {"softcap": 4.0, "logit_scale": 1.7, "temperature": 0.8},
}


@pytest.mark.parametrize("option", OPTIONS)
@ON_TRITON
def test_options(backend, device, option, loading, cut):
    inputs = make_inputs(150, 72, 531, dtype=torch.bfloat16, device=device, ignored=0.2)
    if option in ("bias", "all"):
        inputs = with_bias(inputs)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[option].items()}
    upstream = upstream_like(inputs["target_ids"])
    check_against_fp64(backend, inputs, upstream, **options, **FUSED)


@pytest.mark.parametrize(
    "kept", [(0,), (1,), (2,), (0, 2)], ids=["logprobs", "entropy", "lse", "logprobs, lse"]
)
@ON_TRITON
def test_upstream_gradients_alone(backend, device, kept):
    inputs = with_bias(make_inputs(19, 40, 133, dtype=torch.float16, device=device, ignored=0.2))
    upstream = upstream_like(inputs["target_ids"])
    upstream = [g if i in kept else None for i, g in enumerate(upstream)]
    check_against_fp64(backend, inputs, upstream, temperature=0.7, **FUSED)
    check_against_fp64(backend, inputs, upstream, needs=(True, False, False), softcap=3.0, **FUSED)


@pytest.mark.parametrize("needs", [(True, False, True), (False, True, False), (False, False, True)], ids=str)
@ON_TRITON
def test_only_the_needed_gradients(backend, device, needs, cut):
    inputs = with_bias(make_inputs(19, 40, 300, dtype=torch.bfloat16, device=device))
    check_against_fp64(backend, inputs, upstream_like(inputs["target_ids"]), needs, **FUSED)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 64, 128), (129, 7, 33), (3, 65, 2500)], ids=str)
@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "bf16")], ids=" ".join)
@ON_TRITON
def test_shapes_and_dtypes(backend, device, shape, dtypes):
    """fp32 hidden states or weights are rounded to autocast's dtype."""
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    hidden, compute = (names[name] for name in dtypes)
    inputs = make_inputs(*shape, dtype=hidden, device=device)
    upstream = upstream_like(inputs["target_ids"])
    if hidden == compute:
        check_against_fp64(backend, inputs, upstream, temperature=1.3, **FUSED)
        return
    with torch.autocast(device, dtype=compute):
        out, grads = run(backend, inputs, upstream, (True, True, False), **FUSED)
        same, same_grads = run(backend, inputs, upstream, (True, True, False), return_entropy=True)
    assert [g.dtype for g in grads] == [torch.float32] * 2
    for a, b in zip(out, same, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5)
    for a, b in zip(
        grads, same_grads, strict=True
    ):  # there the gradient of the logits stays fp32, as a CPU's operand
        assert (a - b).abs().max() <= 2**-8 * b.abs().max()


@ON_TRITON
def test_rows_that_do_not_matter(backend, device, cut):
    """NaN in ignored rows and in rows without a gradient reaches nothing; ignored alone give exact zeros."""
    inputs = make_inputs(300, 40, 300, dtype=torch.bfloat16, device=device, ignored=0.5)
    upstream = upstream_like(inputs["target_ids"])
    ignored = inputs["target_ids"] == -100
    clean, grads = run(backend, inputs, upstream, (True, True, False), **FUSED)
    dirty = dict(inputs, hidden=torch.where(ignored[:, None], torch.nan, inputs["hidden"]))
    out, dirty_grads = run(backend, dirty, upstream, (True, True, False), **FUSED)
    for a, b in zip([*out, *dirty_grads], [*clean, *grads], strict=True):
        assert_equal("beside NaN", a, b)
    nothing = dict(inputs, target_ids=torch.full_like(inputs["target_ids"], -100))
    out, grads = run(backend, nothing, upstream, (True, True, False), **FUSED)
    assert all((x == 0).all() for x in (*out, *grads))


@ON_TRITON
def test_edges(backend, device):
    inputs = with_bias(make_inputs(6, 40, 133, dtype=torch.bfloat16, device=device))
    empty = dict(inputs, hidden=inputs["hidden"][:0], target_ids=inputs["target_ids"][:0])
    out, grads = run(backend, empty, upstream_like(empty["target_ids"]), **FUSED)
    assert out.logprobs.shape == (0,) and all((g == 0).all() for g in grads)
    # logits of some thousands, and one row that is not a number
    hidden = inputs["hidden"] * 300
    upstream = upstream_like(inputs["target_ids"])
    check_against_fp64(backend, dict(inputs, hidden=hidden), upstream, temperature=2.0, **FUSED)
    hidden = inputs["hidden"].clone()
    hidden[2, 5] = torch.nan
    out, (dhidden, *_) = run(backend, dict(inputs, hidden=hidden), upstream, (True, False, False), **FUSED)
    for x in (*out, dhidden):
        assert x[2].isnan().all() and not x[[0, 1, 3, 4, 5]].isnan().any()


def wide(inputs):
    """With fp32 hidden states, whose gradient rounds nothing away, of the values that the product takes."""
    return inputs | {"hidden": inputs["hidden"].float()}


def run_wide(backend, inputs, upstream, needs, **options):
    with torch.autocast(inputs["hidden"].device.type, dtype=torch.bfloat16):
        return run(backend, wide(inputs), upstream, needs, **FUSED, **options)


@ON_TRITON
def test_a_row_has_the_same_bits_in_any_batch(backend, device, loading):
    """Outputs and the gradient of hidden: alone, elsewhere, among ignored rows, with few or many others."""
    inputs = make_inputs(140, 72, 300, dtype=torch.bfloat16, device=device)
    upstream = upstream_like(inputs["target_ids"])
    needs = (True, False, False)
    out, (dhidden,) = run_wide(backend, inputs, upstream, needs, temperature=0.7)
    mixed = torch.randperm(140, generator=torch.Generator().manual_seed(1))[:20]
    for rows in (slice(0, 1), slice(130, 137), mixed):
        part = inputs | {name: inputs[name][rows] for name in ("hidden", "target_ids")}
        again, (grad,) = run_wide(backend, part, [g[rows] for g in upstream], needs, temperature=0.7)
        for name, a, b in zip((*out._fields, "hidden"), (*again, grad), (*out, dhidden), strict=True):
            assert_equal(name, a, b[rows])
    spread = torch.empty(140, 73, dtype=torch.bfloat16, device=device)[:, :72].copy_(inputs["hidden"])
    with torch.no_grad():
        again = run(backend, inputs | {"hidden": spread}, temperature=0.7, **FUSED)[0]
    for name, a, b in zip(out._fields, again, out, strict=True):
        assert_equal(f"{name} of rows apart", a, b)
    ids = inputs["target_ids"].clone()
    ids[:100] = -100
    again, (grad,) = run_wide(backend, inputs | {"target_ids": ids}, upstream, needs, temperature=0.7)
    for name, a, b in zip((*out._fields, "hidden"), (*again, grad), (*out, dhidden), strict=True):
        assert_equal(name, a[100:], b[100:])


@ON_TRITON
def test_the_workspace_changes_no_bit(backend, device, loading, monkeypatch):
    inputs = make_inputs(200, 72, 550, dtype=torch.bfloat16, device=device, ignored=0.2)
    upstream = upstream_like(inputs["target_ids"])
    found = []
    for cut, summed in (((200, 550), 200), ((200, 512), 200), ((128, 256), 200), ((128, 256), 128)):
        monkeypatch.setattr(fused, "_cut", lambda *_, cut=cut: fused._Cut(*cut))
        monkeypatch.setattr(fused._Backward, "_rows_of_sums", lambda *_, summed=summed: summed)
        found.append(run_wide(backend, inputs, upstream, (True, True, False)))
    for out, grads in found[1:]:
        for name, a, b in zip(
            (*out._fields, *NAMES), (*out, *grads), (*found[0][0], *found[0][1]), strict=False
        ):
            assert_equal(name, a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_cut_fits_the_workspace(dtype):
    """At the limit of a GPU, and at the smallest: rows in one piece as long as a slice is wide enough."""
    compute = torch.bfloat16
    for n, vocab, size, limit, rows, width in (
        (8192, 151936, 4096, 2**30, 8192, 50688),
        (100_000, 151936, 4096, 2**30, 25088, 6656),
        (8192, 32000, 1024, 2**30, 8192, 32000),
        (300, 5000, 64, 2**20, 128, 1792),
        (10**6, 151936, 4096, 2**20, 128, 256),
        (0, 500, 64, 2**20, 1, 500),
    ):
        found = fused._cut(n, vocab, size, compute, dtype != compute, dtype, limit)
        if dtype == compute:
            assert abs(found.rows - rows) <= 128 and found.width <= vocab
            assert found.width == width, (n, found)
        if limit > 2**20:
            sums = 4 if found.width < vocab else 0
            assert found.rows * (2 * (found.width + size) + sums * size) <= limit


@ON_TRITON
def test_statistics(backend, device):
    inputs = make_inputs(19, 40, 2300, dtype=torch.bfloat16, device=device, ignored=0.2)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    for options in ({}, {"softcap": 4.0, "temperature": 0.6}):
        with rlkernel.use_backend(backend):
            out = rlkernel.linear_logprob_statistics(**inputs, algorithm="fused", **options)
        with rlkernel.use_backend("reference"):
            truth = rlkernel.linear_logprob_statistics(**wide, **options)
        assert torch.equal(out.is_top1, truth.is_top1)
        for a, b in ((out.mean_logits, truth.mean_logits), (out.log_sum_sq_probs, truth.log_sum_sq_probs)):
            torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "loss_type", ["grpo", "clip_cov"]
)  # the latter needs the logprobs of the whole batch
@ON_TRITON
def test_linear_policy_loss(backend, device, loss_type):
    inputs = linear_policy.make_inputs(3, 7, 40, 300, dtype=torch.bfloat16, device=device)
    options = {"loss_type": loss_type, "entropy_coef": 0.01, "temperature": 0.8, "algorithm": "fused"}
    linear_policy.check_against_fp64(backend, linear_policy.with_bias(inputs), **options)
    ids = torch.where(inputs["mask"] != 0, inputs["target_ids"], -100)
    with rlkernel.use_backend(backend):
        out = rlkernel.linear_policy_loss(**inputs, **options)
        own = rlkernel.linear_logprob(inputs["hidden"], inputs["weight"], ids, temperature=0.8, **FUSED)
    assert_equal("logprobs", out.logprobs, own.logprobs)
    assert_equal("entropy", out.entropy, own.entropy)


def test_linear_policy_loss_elsewhere_says_why_not():
    inputs = linear_policy.make_inputs(2, 3, 8, 20)
    refused = pytest.raises(NotImplementedError, match="reference: algorithm 'fused' is a Triton kernel")
    with refused, rlkernel.use_backend("reference"):
        rlkernel.linear_policy_loss(**inputs, algorithm="fused")


def test_tiles_that_follow_the_batch_are_seen(monkeypatch):
    """At the likeliest tokens, whose small log-probabilities show the last bits of the sums."""
    inputs = make_inputs(40, 80, 2300, dtype=torch.bfloat16)
    inputs["target_ids"] = (inputs["hidden"].float() @ inputs["weight"].float().T).argmax(-1)
    out = run("triton", inputs, temperature=0.4, **FUSED)[0]
    monkeypatch.setattr(fused, "SMALL", fused.SMALL._replace(columns=1024))
    again = run("triton", inputs, temperature=0.4, **FUSED)[0]
    assert not torch.equal(out.logprobs, again.logprobs)
    torch.testing.assert_close(out.logprobs, again.logprobs, rtol=1e-5, atol=1e-6)


def test_slices_that_are_added_up_are_seen(monkeypatch):
    """Each rounded by itself, as a library's ``beta = 1`` has it; 16 bits would hide it."""
    inputs = make_inputs(40, 72, 1300, dtype=torch.bfloat16)
    upstream, needs = upstream_like(inputs["target_ids"]), (True, False, False)
    monkeypatch.setattr(fused, "_cut", lambda *_: fused._Cut(40, 256))
    out = run_wide("triton", inputs, upstream, needs)[1][0]
    product = fused._Backward._product

    def apart(self, a, b, sums, into, where, count, *, of_weight):
        part = torch.empty(len(a), self.size)
        product(self, a, b, None, part, None, count, of_weight=of_weight)
        total = part if sums is None else sums + part
        if where is None:
            into.copy_(total)
        else:
            live = int(count)
            into[where[:live]] = total[:live]

    monkeypatch.setattr(fused._Backward, "_product", apart)
    other = run_wide("triton", inputs, upstream, needs)[1][0]
    assert not torch.equal(out, other)
    torch.testing.assert_close(out, other, rtol=1e-5, atol=1e-6)
