"""linear_logprob: one body of tests for every backend, against fp64; and against the real TRL."""

import linear_logprob_cases
import pytest
import torch
from backends import is_slow, of, running
from bitwise import assert_equal
from linear_logprob_cases import DTYPES, NAMES, able, check_against_fp64, of_dtypes, run, with_bias
from logprob_cases import upstream_like

import rlkernel
from rlkernel.drivers import linear_tiles
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.reference.linear_logprob import make_inputs
from rlkernel.runtime import gpu

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("linear_logprob"))
pytestmark = pytest.mark.usefixtures("poison")
small_tiles = linear_logprob_cases.small_tiles


# one element; V smaller than a tile; N and V past several tiles with ragged ends; H odd
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 33), (19, 32, 133), (3, 65, 500)], ids=str)
@DTYPES
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, dtype, shape, small_tiles):
    inputs = with_bias(make_inputs(*shape, dtype=dtype, device=device, ignored=0.2))
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])
    check_against_fp64(backend, inputs, upstream, temperature=0.7, return_entropy=True)


OPTIONS = {
    "plain": {},
    "per-row temperature": {"temperature": torch.rand(19, generator=torch.Generator().manual_seed(2)) + 0.3},
    "softcap": {"softcap": 5.0},
    "scale": {"logit_scale": 0.25},
    "negative scale": {"logit_scale": -1.5},
    "all": {"softcap": 4.0, "logit_scale": 1.7, "temperature": 0.8, "return_entropy": True},
}


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("option", OPTIONS)
@ON_EVERY_BACKEND
def test_options(backend, device, option, bias, small_tiles):
    inputs = make_inputs(19, 16, 133, device=device)
    inputs = with_bias(inputs) if bias else inputs
    able(backend, inputs)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[option].items()}
    upstream = upstream_like(inputs["target_ids"])
    if not options.get("return_entropy"):
        upstream[1] = None
    check_against_fp64(backend, inputs, upstream, **options)


@pytest.mark.parametrize("softcap", [None, 4.0])
@of_dtypes("linear_logprob", "bf16")
def test_frozen_head(backend, device, dtype, softcap, small_tiles):
    """Forward computes the direction of the hidden gradient; other upstream gradients recompute."""
    inputs = with_bias(make_inputs(19, 32, 133, dtype=dtype, device=device, ignored=0.2))
    able(backend, inputs)
    g = upstream_like(inputs["target_ids"])
    for upstream in ([g[0], None, None], g):
        check_against_fp64(
            backend,
            inputs,
            upstream,
            needs=(True, False, False),
            temperature=0.8,
            softcap=softcap,
            return_entropy=True,
        )


@ON_EVERY_BACKEND
def test_frozen_head_whose_vocabulary_is_one_tile(backend, device):
    """Triton's direction once read a maximum that nothing had written: the state of a single tile."""
    inputs = make_inputs(5, 32, 133, device=device)
    able(backend, inputs)
    upstream = [upstream_like(inputs["target_ids"])[0], None, None]
    check_against_fp64(backend, inputs, upstream, needs=(True, False, False))


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False)], ids=["trained", "frozen"])
@ON_EVERY_BACKEND
def test_as_under_graph_capture(backend, device, needs, small_tiles, monkeypatch):
    """A captured graph cannot leave rows out: it computes them all and gives zeros where zeros belong."""
    monkeypatch.setattr(gpu, "capturing", lambda device: True)
    inputs = with_bias(make_inputs(19, 32, 133, device=device, ignored=0.3))
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])
    upstream[0][::2] = 0
    for g in ([upstream[0], None, None], upstream):
        check_against_fp64(backend, inputs, g, needs, temperature=0.8, softcap=4.0, return_entropy=True)


@pytest.mark.parametrize("needs", [(True, False, True), (False, True, False), (False, False, True)], ids=str)
@ON_EVERY_BACKEND
def test_only_the_needed_gradients(backend, device, needs, small_tiles):
    inputs = with_bias(make_inputs(19, 16, 133, device=device))
    able(backend, inputs)
    check_against_fp64(backend, inputs, upstream_like(inputs["target_ids"]), needs, return_entropy=True)


@pytest.mark.parametrize("algorithm", ["auto", "fused"])
@of_dtypes("linear_logprob", "fp32", "bf16")
def test_no_grad_gives_the_bits_of_grad(backend, device, dtype, algorithm, small_tiles):
    inputs = make_inputs(19, 32, 133, dtype=dtype, device=device)
    able(backend, inputs, algorithm=algorithm)
    options = dict(temperature=0.8, return_entropy=True, algorithm=algorithm)
    with running(backend), torch.no_grad():
        old = rlkernel.linear_logprob(**inputs, **options)
    for needs in ((True, True, False), (True, False, False), (False, True, False)):
        new, _ = run(backend, inputs, upstream_like(inputs["target_ids"]), needs, **options)
        for name, a, b in zip(old._fields, old, new, strict=True):
            assert_equal(name, a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@ON_EVERY_BACKEND
def test_fused_forward(backend, device, dtype):
    for shape in ((1, 1, 1), (19, 40, 133), (3, 65, 700)):
        inputs = with_bias(make_inputs(*shape, dtype=dtype, device=device, ignored=0.2))
        able(backend, inputs, algorithm="fused")
        check_against_fp64(
            backend, inputs, upstream_like(inputs["target_ids"]), algorithm="fused", return_entropy=True,
            temperature=0.7, softcap=6.0, logit_scale=1.2,
        )  # fmt: skip


@ON_EVERY_BACKEND
def test_same_bits_every_time(backend, device, small_tiles):
    inputs = with_bias(make_inputs(19, 33, 133, device=device))
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])
    out, grads = run(backend, inputs, upstream, return_entropy=True)
    for _ in range(3 if is_slow(backend, device) else 20):
        again, grads_again = run(backend, inputs, upstream, return_entropy=True)
        for name, a, b in zip([*out._fields, *NAMES], [*again, *grads_again], [*out, *grads], strict=True):
            assert_equal(name, a, b)


@ON_EVERY_BACKEND
def test_rows_that_do_not_matter_change_nothing(backend, device, small_tiles):
    """NaN in an ignored row does not reach the gradient of the weight."""
    inputs = make_inputs(19, 16, 133, device=device, ignored=0.3)
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])
    ignored = inputs["target_ids"] == -100
    clean, grads = run(backend, inputs, upstream, return_entropy=True)
    dirty = dict(inputs, hidden=torch.where(ignored[:, None], torch.nan, inputs["hidden"]))
    out, dirty_grads = run(backend, dirty, upstream, return_entropy=True)
    for name, a, b in zip([*out._fields, *NAMES], [*out, *dirty_grads], [*clean, *grads], strict=False):
        assert_equal(name, a, b)
    nothing = dict(inputs, target_ids=torch.full_like(inputs["target_ids"], -100))
    out, grads = run(backend, nothing, upstream, return_entropy=True)
    assert all((x == 0).all() for x in (*out, *grads)), "a fully ignored batch"


@ON_EVERY_BACKEND
def test_empty_batch_stays_connected(backend, device):
    inputs = with_bias(make_inputs(3, 16, 133, device=device))
    able(backend, inputs)
    inputs = dict(inputs, hidden=inputs["hidden"][:0], target_ids=inputs["target_ids"][:0])
    out, grads = run(backend, inputs, upstream_like(inputs["target_ids"]), return_entropy=True)
    assert out.logprobs.sum().item() == 0 and out.logprobs.shape == (0,)
    assert [tuple(g.shape) for g in grads] == [(0, 16), (133, 16), (133,)]
    assert all((g == 0).all() for g in grads)


@ON_EVERY_BACKEND
def test_shapes_and_strides_of_users(backend, device, small_tiles):
    inputs = make_inputs(3 * 7, 16, 133, device=device)
    able(backend, inputs)
    hidden = inputs["hidden"].view(3, 7, 16)[:, :-1]  # what a model returns, less its last position
    ids = inputs["target_ids"].view(3, 7)[:, :-1]
    weight = inputs["weight"].T.contiguous().T  # column-major
    with running(backend):
        got = rlkernel.linear_logprob(hidden, weight, ids, temperature=torch.full((3, 6), 0.7, device=device))
        want = rlkernel.linear_logprob(
            hidden.reshape(-1, 16).contiguous(), weight.contiguous(), ids.reshape(-1), temperature=0.7
        )
        rows = hidden.reshape(-1, 16), weight, ids.reshape(-1), torch.full((18,), 0.7, device=device)
        spread = [torch.stack([x, x], -1)[..., 0] for x in rows]  # as columns of a wider tensor
        columns = rlkernel.linear_logprob(*spread[:3], temperature=spread[3])
        one = rlkernel.linear_logprob(rows[0], weight, ids[0, :1].expand(18))
    assert got.logprobs.shape == (3, 6)
    assert one.logprobs.shape == (18,)
    torch.testing.assert_close(got.logprobs.view(-1), want.logprobs, rtol=0, atol=1e-6)
    torch.testing.assert_close(columns.logprobs, want.logprobs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_dW_accumulates_in_fp32(backend, monkeypatch):
    """A chunk a token: a bf16 accumulator would stop growing at 2^8, which the first of them almost is."""
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(1, 32))
    n, first = 40, 256
    hidden, weight = torch.ones(n, 8).bfloat16(), torch.zeros(64, 8).bfloat16()
    inputs = {"hidden": hidden, "weight": weight, "target_ids": torch.zeros(n, dtype=torch.int64)}
    able(backend, inputs)
    upstream = torch.ones(n)
    upstream[0] = first
    _, (_, grad) = run(backend, inputs, [upstream, None, None])
    want = torch.full((8,), (first + n - 1) * 63 / 64)
    torch.testing.assert_close(grad[0].float(), want, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_dtype_rounds_the_product(dtype, small_tiles):
    inputs = make_inputs(19, 64, 133, dtype=dtype, ignored=0)
    rounded = (inputs["hidden"].double() @ inputs["weight"].double().T).bfloat16()
    want = rlkernel.logprob(rounded, inputs["target_ids"]).logprobs
    for backend in ("native", "reference"):
        able(backend, inputs)
        got = run(backend, inputs, logits_dtype=torch.bfloat16)[0].logprobs
        exact = run(backend, inputs)[0].logprobs
        # a product on the edge between two bf16 values may fall on the other side
        assert (got - want).abs().median() < 1e-6 < (exact - want).abs().median()


def test_gradcheck():
    inputs = with_bias(make_inputs(7, 5, 23, dtype=torch.float64, ignored=0.2))
    ids = inputs.pop("target_ids")
    leaves = [x.requires_grad_() for x in inputs.values()]
    with rlkernel.use_backend("reference"):
        assert torch.autograd.gradcheck(
            lambda h, w, b: tuple(
                rlkernel.linear_logprob(
                    h, w, ids, bias=b, temperature=0.7, softcap=3.0, logit_scale=1.3, return_entropy=True
                )
            ),
            leaves,
        )


def test_mixed_dtypes_compute_in_the_wider(small_tiles):
    inputs = make_inputs(19, 32, 133)
    mixed = dict(inputs, hidden=inputs["hidden"].bfloat16())
    check_against_fp64(
        "native", mixed, upstream_like(inputs["target_ids"]), (True, True, False), return_entropy=True
    )
    mixed = dict(inputs, weight=inputs["weight"].bfloat16())
    check_against_fp64(
        "native", mixed, upstream_like(inputs["target_ids"]), (True, True, False), return_entropy=True
    )


def test_against_the_real_trl():
    chunked = pytest.importorskip("trl.kernels.chunked_logprob", reason="TRL is not installed")
    inputs = make_inputs(19, 32, 133, ignored=0)
    ours, grads = run(
        "native", inputs, upstream_like(inputs["target_ids"])[:2] + [None], (True, True, False),
        temperature=0.8, softcap=6.0, logit_scale=1.2, return_entropy=True,
    )  # fmt: skip
    hidden, weight = (inputs[k].clone().requires_grad_() for k in ("hidden", "weight"))
    theirs = chunked.ChunkedLogProbFunction.apply(
        hidden, weight, None, inputs["target_ids"], 0.8, 48, 6.0, 1.2, ("entropy",)
    )
    g = upstream_like(inputs["target_ids"])
    loss = (theirs[0] * g[0]).sum() + (theirs[1] * g[1]).sum()
    want = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(ours.logprobs, theirs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.entropy, theirs[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(grads, list(want), rtol=0, atol=2e-5)


MUTANTS = {
    "drops the ragged end": lambda k: {
        "tile_forward": lambda tile, *r: k.tile_forward(tile, *r) if tile.vocab_start < 96 else None
    },
    "restarts at every tile": lambda k: {
        "tile_forward": lambda tile, state, first, *r: k.tile_forward(tile, state, True, *r),
    },
    "scale missing in the gradient": lambda k: {
        "tile_backward": lambda tile, *r: k.tile_backward(tile._replace(logit_scale=1.0), *r),
    },
    "target kept in the direction": lambda k: {
        "tile_exp": lambda tile, *r: k.tile_exp(
            tile._replace(target_ids=torch.full_like(tile.target_ids, 10**6)), *r
        ),
    },
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_body_fails_on(mutant, monkeypatch, small_tiles):
    from rlkernel.native import logprob as kernels

    for name, wrong in MUTANTS[mutant](_Copy(kernels)).items():
        monkeypatch.setattr(kernels, name, wrong)
    inputs = make_inputs(19, 32, 133)
    able("native", inputs)
    with pytest.raises(AssertionError):
        check_against_fp64(
            "native", inputs, upstream_like(inputs["target_ids"]), logit_scale=1.5, return_entropy=True
        )
        g = upstream_like(inputs["target_ids"])
        check_against_fp64("native", inputs, [g[0], None, None], (True, False, False))


class _Copy:
    def __init__(self, module):
        self.__dict__.update(vars(module))
