"""value_loss: one body of tests for every backend, against fp64; and against the real verl."""

import types

import pytest
import torch
from backends import is_slow, of, skip_unless_able
from bitwise import assert_equal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_peers import verl_core
from value_loss_cases import CLIP, check_against_fp64, double, make_inputs, metric, run

import rlkernel
from rlkernel import dispatch
from rlkernel.ops.value_loss import LOSSES, UNITS
from rlkernel.reference import value_loss as reference

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("value_loss"))
pytestmark = pytest.mark.usefixtures("poison")


DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
MODES = pytest.mark.parametrize("mode", UNITS)


# one token; less than a vector; a tail; more than a chunk and a tail
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 130), (2, 2049), (2, 4101)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@DTYPES
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, dtype, packed, shape):
    inputs = make_inputs(*shape, dtype=dtype, device=device, packed=packed)
    skip_unless_able(backend, "value_loss", inputs["values"])
    check_against_fp64(backend, inputs, **CLIP)


@MODES
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@ON_EVERY_BACKEND
def test_options(backend, device, packed, mode):
    inputs = make_inputs(5, 100, device=device, packed=packed)
    skip_unless_able(backend, "value_loss", inputs["values"])
    for loss in LOSSES:
        for items in (None, 77, torch.tensor(77, device=device)):
            options = dict(loss=loss, huber_delta=0.5, loss_agg_mode=mode, num_items_in_batch=items)
            check_against_fp64(backend, inputs, **options, **CLIP)
            unclipped = {k: v for k, v in inputs.items() if k != "old_values"}
            check_against_fp64(backend, unclipped, **options, dp_size=1 if items is None else 4)


@pytest.mark.parametrize("length", [1, 70_000])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@ON_EVERY_BACKEND
def test_shortest_and_longest(backend, device, packed, length):
    rows = 1 if is_slow(backend, device) else 3
    inputs = make_inputs(rows, length, device=device, packed=packed, masked=0.1)
    skip_unless_able(backend, "value_loss", inputs["values"])
    check_against_fp64(backend, inputs, **CLIP, loss_agg_mode="seq-mean-token-mean")


@MODES
@ON_EVERY_BACKEND
def test_what_is_masked_may_hold_anything(backend, device, mode):
    inputs = make_inputs(4, 70, device=device)
    inputs["mask"][2] = False  # a sequence without a token
    skip_unless_able(backend, "value_loss", inputs["values"])
    want = run(backend, inputs, **CLIP, loss_agg_mode=mode)
    dirty = {k: v.clone() for k, v in inputs.items()}
    for name, junk in (("values", torch.nan), ("returns", torch.inf), ("old_values", -torch.inf)):
        dirty[name][~inputs["mask"]] = junk
    got = run(backend, dirty, **CLIP, loss_agg_mode=mode)
    for name, a, b in zip(("loss", "metrics", "grad"), got, want, strict=True):
        assert_equal(name, a, b)
    assert (got[2][~inputs["mask"]] == 0).all()
    check_against_fp64(backend, dirty, **CLIP, loss_agg_mode=mode)


@MODES
@pytest.mark.parametrize("shape", [(3, 40), (3, 0), (0, 40)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@ON_EVERY_BACKEND
def test_nothing_to_learn_from_is_a_connected_zero(backend, device, packed, shape, mode):
    inputs = make_inputs(*shape, device=device, packed=packed)
    inputs["mask"] = torch.zeros_like(inputs["mask"])
    inputs["values"] = torch.full_like(inputs["values"], torch.nan)
    skip_unless_able(backend, "value_loss", inputs["values"])
    loss, metrics, grad = run(backend, inputs, **CLIP, loss_agg_mode=mode)
    assert loss == 0 and (grad == 0).all() and grad.shape == inputs["values"].shape
    assert (metrics[:-1] == 0).all() and metrics[-1].isnan()


@ON_EVERY_BACKEND
def test_padding_behind_the_packed_sequences(backend, device):
    inputs = make_inputs(3, 1500, device=device, packed=True)
    skip_unless_able(backend, "value_loss", inputs["values"])
    want = run(backend, inputs, **CLIP)
    for tail in (1, 5000):
        longer = {
            k: v if k == "cu_seqlens" else torch.cat([v, torch.ones(tail, dtype=v.dtype, device=device)])
            for k, v in inputs.items()
        }
        longer["values"][-tail:] = torch.nan
        loss, metrics, grad = run(backend, longer, **CLIP)
        assert (grad[-tail:] == 0).all()
        if backend == "reference":  # promises no bits
            torch.testing.assert_close((loss, metrics, grad[:-tail]), want, rtol=2e-7, atol=1e-6)
            continue
        assert_equal("loss", loss, want[0])
        assert_equal("metrics", metrics, want[1])
        assert_equal("grad", grad[:-tail], want[2])


@ON_EVERY_BACKEND
def test_rows_of_any_stride(backend, device):
    inputs = make_inputs(3, 700, device=device)
    skip_unless_able(backend, "value_loss", inputs["values"])
    want = run(backend, inputs, **CLIP)
    views = {
        "shifted": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
        "offset": lambda x: torch.cat([x[:, :3], x], 1)[:, 3:],
        "transposed": lambda x: x.T.contiguous().T,
    }
    for name, view in views.items():
        got = run(backend, {k: view(v) for k, v in inputs.items()}, **CLIP)
        for output, a, b in zip(("loss", "metrics", "grad"), got, want, strict=True):
            assert_equal(f"{output}, {name}", a.contiguous(), b)
    expanded = inputs | {
        "mask": inputs["mask"][:1].expand(3, -1),
        "values": inputs["values"][:1].expand(3, -1),
    }
    got = run(backend, expanded, **CLIP)
    want = run(backend, {k: v.contiguous() for k, v in expanded.items()}, **CLIP)
    assert_equal("expanded", got[0], want[0])


@ON_EVERY_BACKEND
def test_moments_keep_their_digits(backend, device):
    """E[x^2] - E[x]^2 in fp32 gives returns of 1000.0 to 1000.3 a negative variance."""
    g = torch.Generator().manual_seed(0)
    returns = (1000 + 0.3 * torch.rand(3, 900, generator=g)).to(device)
    inputs = {
        "values": returns + 0.05,
        "returns": returns,
        "mask": torch.ones_like(returns, dtype=torch.bool),
    }
    skip_unless_able(backend, "value_loss", returns)
    metrics = run(backend, inputs)[1]
    truth = returns.double().var(correction=0)
    assert abs(metric(metrics, "return_variance").double() / truth - 1) < 2e-6
    constant = inputs | {"returns": torch.full_like(returns, 0.1)}
    metrics = run(backend, constant)[1]
    assert metric(metrics, "return_variance") == 0 and metric(metrics, "explained_variance").isnan()


@pytest.mark.parametrize("name", ["values", "returns", "old_values"])
@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
@ON_EVERY_BACKEND
def test_what_counts_and_is_not_finite_shows(backend, device, junk, name):
    inputs = make_inputs(2, 33, device=device)
    inputs["mask"][1, 4] = True
    inputs[name][1, 4] = junk
    skip_unless_able(backend, "value_loss", inputs["values"])
    loss, metrics, grad = run(backend, inputs, **CLIP)
    assert not loss.isfinite() and metric(metrics, "nonfinite") == 1
    if junk != junk:
        assert loss.isnan() and grad[1, 4].isnan() and int(grad.isnan().sum()) == 1
    with (
        rlkernel.debug.checks(),
        pytest.raises(ValueError, match=rf"{name}\[1, 4\] must be finite where mask"),
    ):
        run(backend, inputs, **CLIP)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("loss", LOSSES)
@MODES
def test_gradcheck(mode, loss, packed):
    inputs = make_inputs(3, 7, dtype=torch.float64, packed=packed)
    values = inputs.pop("values").requires_grad_()
    options = dict(CLIP, loss=loss, loss_agg_mode=mode, loss_scale_factor=3)
    assert torch.autograd.gradcheck(lambda v: rlkernel.value_loss(v, **inputs, **options).loss, values)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(0, 40), max_size=6),
    seed=st.integers(0, 2**16),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    mode=st.sampled_from(list(UNITS)),
    loss=st.sampled_from(LOSSES),
    clip=st.booleans(),
)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_any_lengths_and_masks(backend, lengths, seed, share, mode, loss, clip):
    """Against autograd through verl's expressions, sequence by sequence, in fp64."""
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    values, returns, old = (torch.randn(n, generator=g) for _ in range(3))
    mask = torch.rand(n, generator=g) < share
    starts = torch.tensor([0, *lengths]).cumsum(0)
    inputs = {"values": values, "returns": returns, "mask": mask, "cu_seqlens": starts}
    if clip:
        inputs["old_values"] = old
    skip_unless_able(backend, "value_loss", values)
    options = dict(loss=loss, loss_agg_mode=mode, **(CLIP if clip else {}))
    total, metrics, grad = run(backend, inputs, upstream=1.0, **options)
    v = values.double().requires_grad_()
    want = by_hand(v, returns.double(), old.double() if clip else None, mask, lengths, mode, loss)
    torch.testing.assert_close(total.double(), want.detach(), rtol=1e-5, atol=1e-6)
    want_grad = torch.autograd.grad(want, v)[0] if want.requires_grad else torch.zeros_like(v)
    torch.testing.assert_close(grad.double(), want_grad, rtol=1e-6, atol=1e-7)
    assert metric(metrics, "tokens") == mask.sum()


def by_hand(v, returns, old, mask, lengths, mode, loss):
    def of(x):
        if loss == "mse":
            return (x - returns) ** 2 / 2
        return torch.nn.functional.huber_loss(x, returns, reduction="none", delta=1.0)

    losses = of(v)
    if old is not None:
        losses = torch.max(losses, of(old + (v - old).clamp(-0.2, 0.2)))
    kept = [
        (x[m].sum(), int(m.sum())) for x, m in zip(losses.split(lengths), mask.split(lengths), strict=True)
    ]
    kept = [(total, count) for total, count in kept if count]
    if not kept:
        return v.sum() * 0
    tokens = sum(count for _, count in kept)
    if mode.startswith("token"):
        return sum(total for total, _ in kept) / (tokens if mode == "token-mean" else 1)
    each = [total / count if mode == "seq-mean-token-mean" else total for total, count in kept]
    return sum(each) / len(each) / (9 if mode.endswith("norm") else 1)


@MODES
@pytest.mark.parametrize("globally", [False, True], ids=["local", "global"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_against_the_real_verl(backend, globally, mode):
    core = verl_core()
    inputs = make_inputs(6, 90)
    skip_unless_able(backend, "value_loss", inputs["values"])
    options = {"dp_size": 4, "num_items_in_batch": 1234} if globally else {}
    loss, metrics, grad = run(
        backend, inputs, upstream=1.0, **CLIP, **options, loss_agg_mode=mode, loss_scale_factor=None
    )
    values = inputs["values"].clone().requires_grad_()
    theirs = {"dp_size": 4, "batch_num_tokens": 1234, "global_batch_size": 1234} if globally else {}
    want, fraction = core.compute_value_loss(
        values, inputs["returns"], inputs["old_values"], inputs["mask"].long(), 0.2, mode, **theirs
    )
    torch.testing.assert_close(loss, want.detach(), rtol=2e-6, atol=0)
    torch.testing.assert_close(grad, torch.autograd.grad(want, values)[0], rtol=2e-6, atol=1e-9)
    torch.testing.assert_close(metric(metrics, "clip_fraction"), fraction, rtol=1e-6, atol=0)


def test_where_we_differ_from_verl():
    """verl: NaN where no token counts; half the gradient where both losses are equal and v outside."""
    core = verl_core()
    ones = torch.ones(1, 1)
    empty = core.compute_value_loss(ones, ones, ones, 0 * ones, 0.2)[0]
    assert empty.isnan() and rlkernel.value_loss(ones, ones, 0 * ones, old_values=ones, **CLIP).loss == 0
    tie = {"values": 1 * ones, "returns": 0 * ones, "mask": ones.bool(), "old_values": -2 * ones}
    values = tie["values"].clone().requires_grad_()
    theirs = core.compute_value_loss(values, tie["returns"], tie["old_values"], ones, 1.0)[0]
    assert torch.autograd.grad(theirs, values)[0] == 0.5
    assert run("reference", tie, upstream=1.0, cliprange_value=1.0)[2] == 1


def changed(ref, **options):
    """The reference of another call."""
    return lambda call: ref.forward(call._replace(**options))


def multiplied(call):
    kept = call.mask
    return call._replace(values=call.values * kept, returns=call.returns * kept, mask=kept | True)


def scaled(results, **factors):
    return results._replace(**{name: getattr(results, name) * factor for name, factor in factors.items()})


MUTANTS = {
    "the clipped side has a gradient": lambda ref: {
        "forward": lambda call: ref.forward(call)._replace(slope=changed(ref, old_values=None)(call).slope)
    },
    "forgets the half": lambda ref: {"forward": lambda call: scaled(ref.forward(call), loss=2)},
    "does not clip": lambda ref: {"forward": changed(ref, old_values=None)},
    "multiplies by the mask": lambda ref: {"forward": lambda call: ref.forward(multiplied(call))},
    "counts masked tokens": lambda ref: {
        "forward": lambda call: scaled(ref.forward(call), loss=0.8, scale=0.8)
    },
    "takes the sum for the mean": lambda ref: {"forward": changed(ref, unit="sum")},
    "loses the upstream gradient": lambda ref: {
        "backward": lambda call, results, grad_loss: ref.backward(call, results, torch.ones_like(grad_loss))
    },
    "half precision inside": lambda ref: {
        "forward": lambda call: ref.forward(call._replace(values=call.values.bfloat16().float()))
    },
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_body_fails_on(mutant, monkeypatch):
    functions = {name: getattr(reference, name) for name in ("forward", "backward", "unsupported")}
    wrong = types.SimpleNamespace(**functions | MUTANTS[mutant](reference))
    load = dispatch._load
    monkeypatch.setattr(
        dispatch, "_load", lambda name, *rest: (wrong, []) if name == "native" else load(name, *rest)
    )
    with pytest.raises(AssertionError):
        check_against_fp64("native", make_inputs(6, 127), **CLIP, loss_agg_mode="seq-mean-token-mean")


def test_fp64_stays_fp64():
    inputs = double(make_inputs(4, 99))
    out = rlkernel.value_loss(**inputs, **CLIP)
    wide = run("reference", inputs, **CLIP)
    assert out.loss.dtype == out.metrics.dtype == wide[2].dtype == torch.float64
    assert_equal("loss", out.loss, wide[0])


@ON_EVERY_BACKEND
def test_dtypes_may_differ(backend, device):
    """A value head in bf16 beside returns in fp32."""
    inputs = make_inputs(3, 70, device=device)
    skip_unless_able(backend, "value_loss", inputs["values"])
    rounded = inputs["values"].bfloat16()
    loss, _, grad = run(backend, inputs | {"values": rounded, "returns": inputs["returns"]}, **CLIP)
    want, _, want_grad = run(backend, inputs | {"values": rounded.float()}, **CLIP)
    assert_equal("loss", loss, want)
    assert_equal("grad", grad, want_grad.bfloat16())
    mixed = inputs | {"old_values": inputs["old_values"].double(), "mask": inputs["mask"].long() * 3}
    assert_equal("mixed", run(backend, mixed, **CLIP)[0], run(backend, inputs, **CLIP)[0])


def test_memory_beside_the_inputs_is_two_buffers():
    from rlkernel.bench import memory

    inputs = make_inputs(64, 4096)
    skip_unless_able("native", "value_loss", inputs["values"])
    torch.use_deterministic_algorithms(False)
    peak = memory.peak_extra(lambda: run("native", inputs, **CLIP), "cpu")
    clone = inputs["values"].nbytes  # the leaf that run() makes
    assert peak - clone < 2.1 * inputs["values"].nbytes
