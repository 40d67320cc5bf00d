"""value_loss: one body of tests for every backend, against fp64; and against the real verl."""

import types
from functools import partial

import pytest
import torch
from accuracy import check
from backends import is_slow, of, running, skip_unless_able
from bitwise import assert_equal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_peers import verl_core

import rlkernel
from rlkernel import VALUE_METRICS, dispatch
from rlkernel.ops.value_loss import LOSSES, UNITS
from rlkernel.reference import value_loss as reference

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("value_loss"))
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
MODES = pytest.mark.parametrize("mode", UNITS)
CLIP = {"cliprange_value": 0.2}
make_inputs = partial(reference.make_inputs, clipped=True)
pytestmark = pytest.mark.usefixtures("poison")


def run(backend, inputs, upstream=1.3, **options):
    """Loss, metrics and the gradient of the values, on one backend."""
    values = inputs["values"].detach().clone(memory_format=torch.preserve_format).requires_grad_()
    options.setdefault("loss_scale_factor", 9.0)
    with running(backend):
        out = rlkernel.value_loss(**inputs | {"values": values}, **options)
        (grad,) = torch.autograd.grad(out.loss * upstream, values)
    return out.loss.detach(), out.metrics, grad


def metric(metrics, name):
    return metrics[VALUE_METRICS.index(name)]


def double(inputs):
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def check_against_fp64(backend, inputs, **options):
    truth, torchs, ours = (
        run(b, x, **options)
        for b, x in (("reference", double(inputs)), ("reference", inputs), (backend, inputs))
    )
    assert ours[0].dtype == ours[1].dtype == torch.float32 and ours[2].dtype == inputs["values"].dtype
    check("loss", ours[0], torchs[0], truth[0])
    check("grad", ours[2], torchs[2], truth[2])
    largest = truth[1][3:].nan_to_num(0, 0, 0).abs().max().item()
    for name, a, b, c in zip(VALUE_METRICS, ours[1], torchs[1], truth[1], strict=True):
        counts = name in ("tokens", "nonfinite")
        assert not counts or a == c, name
        # near the edge of the range, fp32 and fp64 may disagree about a token
        slack = 1 / 2**-23 / max(truth[1][0].item(), 1) if name == "clip_fraction" else max(1, largest)
        check(name, a, b, c, magnitude=slack)


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
            torch.testing.assert_close((loss, metrics, grad[:-tail]), want)
            continue
        assert_equal("loss", loss, want[0])
        assert_equal("metrics", metrics, want[1])
        assert_equal("grad", grad[:-tail], want[2])


@ON_EVERY_BACKEND
def test_packed_sequences_give_the_bits_of_padded_ones(backend, device):
    """Empty sequences too, in front, between and behind; offsets of either width."""
    lengths = [0, 3, 2048, 0, 0, 4097, 1, 0]
    padded = make_inputs(len(lengths), max(lengths), device=device)
    inside = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
    padded["mask"] &= inside
    starts = torch.tensor([0, *lengths], device=device).cumsum(0)
    packed = {k: v[inside] for k, v in padded.items()}
    skip_unless_able(backend, "value_loss", padded["values"])
    for mode in ("token-mean", "seq-mean-token-mean"):
        want = run(backend, padded, **CLIP, loss_agg_mode=mode)
        for offsets in (starts, starts.int()):
            loss, metrics, grad = run(backend, packed | {"cu_seqlens": offsets}, **CLIP, loss_agg_mode=mode)
            if backend == "reference":  # promises no bits
                torch.testing.assert_close((loss, metrics, grad), (*want[:2], want[2][inside]))
                continue
            assert_equal("loss", loss, want[0])
            assert_equal("metrics", metrics, want[1])
            assert_equal("grad", grad, want[2][inside])


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
def test_a_sequence_does_not_feel_the_others(backend, device):
    """Alone, permuted, at another place of the packed tensor: the same sum and the same gradient."""
    if backend == "reference":
        pytest.skip("the reference promises no bits")
    inputs = make_inputs(5, 2300, device=device)
    skip_unless_able(backend, "value_loss", inputs["values"])
    options = dict(CLIP, loss_agg_mode="token-sum")
    whole = run(backend, inputs, **options)[2]
    order = torch.tensor([3, 0, 4, 2, 1], device=device)
    permuted = run(backend, {k: v[order] for k, v in inputs.items()}, **options)[2]
    assert_equal("permuted", permuted, whole[order])
    for i in range(5):
        alone = run(backend, {k: v[i : i + 1] for k, v in inputs.items()}, **options)
        assert_equal(f"gradient of {i}", alone[2], whole[i : i + 1])
        others_masked = torch.zeros_like(inputs["mask"])
        others_masked[i] = inputs["mask"][i]
        amid = run(backend, inputs | {"mask": others_masked}, **options)
        assert_equal(f"sum of {i}", amid[0], alone[0])
        assert_equal(f"metrics of {i}", amid[1], alone[1])
        packed = {k: torch.cat([v[0, :7], v[i], v[1, :9]]) for k, v in inputs.items()}
        packed["mask"] = packed["mask"].clone()
        packed["mask"][:7] = packed["mask"][-9:] = False
        starts = torch.tensor([0, 7, 2307, 2316], device=device)
        assert_equal(
            f"packed sum of {i}", run(backend, packed | {"cu_seqlens": starts}, **options)[0], alone[0]
        )


def test_the_invariance_test_finds_a_plain_sum():
    """What a sum over the flat tensor does: its order follows from the place, so its bits do too."""
    x = make_inputs(1, 4000)["values"][0]
    sums = {x.sum().item(), *(torch.cat([torch.zeros(k), x]).sum().item() for k in range(1, 60))}
    assert len(sums) > 1


@ON_EVERY_BACKEND
def test_same_bits_every_time(backend, device):
    inputs = make_inputs(4, 3000, device=device)
    skip_unless_able(backend, "value_loss", inputs["values"])
    first = run(backend, inputs, **CLIP, loss_agg_mode="seq-mean-token-mean")
    for _ in range(2 if is_slow(backend, device) else 100):
        again = run(backend, inputs, **CLIP, loss_agg_mode="seq-mean-token-mean")
        for name, a, b in zip(("loss", "metrics", "grad"), again, first, strict=True):
            assert_equal(name, a, b)
    with torch.no_grad(), running(backend):
        plain = rlkernel.value_loss(**inputs, **CLIP, loss_agg_mode="seq-mean-token-mean")
    assert_equal("loss without a gradient", plain.loss, first[0])


def test_same_bits_on_any_number_of_threads():
    inputs, results, before = make_inputs(40, 3000), [], torch.get_num_threads()
    skip_unless_able("native", "value_loss", inputs["values"])
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run("native", inputs, **CLIP))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for name, a, b in zip(("loss", "metrics", "grad"), result, results[0], strict=True):
            assert_equal(name, a, b)


def test_both_warp_sizes_give_the_same_bits():
    inputs = make_inputs(20, 2100, packed=True)
    results = [run(b, inputs, **CLIP) for b in ("emulated-warp32", "emulated-warp64")]
    for name, a, b in zip(("loss", "metrics", "grad"), *results, strict=True):
        assert_equal(name, a, b)


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
    assert abs(metric(metrics, "return_variance").double() / truth - 1) < 1e-5
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


@ON_EVERY_BACKEND
def test_upstream_gradient_and_retained_graph(backend, device):
    inputs = make_inputs(3, 50, device=device)
    skip_unless_able(backend, "value_loss", inputs["values"])
    values = inputs["values"].clone().requires_grad_()
    with running(backend):
        out = rlkernel.value_loss(**inputs | {"values": values}, **CLIP)
    assert not out.metrics.requires_grad
    out.loss.backward(retain_graph=True)
    once = values.grad.clone()
    out.loss.backward()
    assert_equal("twice", values.grad, 2 * once)
    assert_equal("scaled", run(backend, inputs, upstream=-4.0, **CLIP)[2], -4 * once)


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
    torch.testing.assert_close(grad.double(), want_grad, rtol=1e-5, atol=1e-6)
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


MUTANTS = {
    "the clipped side has a gradient": lambda ref: {
        "forward": lambda v, r, m, o, c, *rest: (
            *ref.forward(v, r, m, o, c, *rest)[:2],
            *ref.forward(v, r, m, None, c, *rest)[2:],
        )
    },
    "forgets the half": lambda ref: {"forward": lambda *a: (2 * ref.forward(*a)[0], *ref.forward(*a)[1:])},
    "does not clip": lambda ref: {"forward": lambda v, r, m, o, *rest: ref.forward(v, r, m, None, *rest)},
    "multiplies by the mask": lambda ref: {
        "forward": lambda v, r, m, *rest: ref.forward(v * m, r * m, m | True, *rest)
    },
    "counts masked tokens": lambda ref: {
        "forward": lambda *a: (ref.forward(*a)[0] * 0.8, *ref.forward(*a)[1:3], ref.forward(*a)[3] * 0.8)
    },
    "takes the sum for the mean": lambda ref: {
        "forward": lambda *a: ref.forward(*a[:6], a[6]._replace(unit="sum"), *a[7:])
    },
    "loses the upstream gradient": lambda ref: {
        "backward": lambda g, *rest: ref.backward(torch.ones_like(g), *rest)
    },
    "half precision inside": lambda ref: {
        "forward": lambda v, *rest: tuple(x.float() for x in ref.forward(v.bfloat16().float(), *rest))
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


ROW = torch.zeros(2, 3)
STARTS = torch.tensor([0, 2, 3])
BAD = [
    (dict(values=torch.zeros(2, 3, dtype=torch.int64)), "values must be float16, .* got int64"),
    (dict(values=torch.zeros(3)), r"values must be \[B, L\], or \[N\] with cu_seqlens, got \(3,\)"),
    (dict(cu_seqlens=STARTS), r"values must be \[N\] with cu_seqlens, got \(2, 3\)"),
    (dict(returns=torch.zeros(2, 2)), r"returns must have values' shape \(2, 3\), got \(2, 2\)"),
    (dict(returns=torch.zeros(2, 3).long()), "returns must be float16"),
    (dict(returns=torch.zeros(2, 3, requires_grad=True)), "returns must not require a gradient"),
    (dict(mask=torch.ones(3)), r"mask must have values' shape \(2, 3\), got \(3,\)"),
    (dict(mask=[1]), "mask must be a tensor, got list"),
    (dict(old_values=ROW), "cliprange_value must be given with old_values, got None"),
    (dict(cliprange_value=0.2), "old_values must be given with cliprange_value, got None"),
    (dict(old_values=ROW, cliprange_value=-1.0), "cliprange_value must be >= 0 and finite, got -1.0"),
    (dict(loss="mae"), "loss must be one of 'mse', 'huber', got 'mae'"),
    (dict(loss="huber", huber_delta=0), "huber_delta must be > 0 and finite, got 0"),
    (dict(loss_agg_mode="mean"), "loss_agg_mode must be one of 'token-mean', .*, got 'mean'"),
    (dict(dp_size=0), "dp_size must be an integer >= 1, got 0"),
    (dict(dp_size=2), "num_items_in_batch must be given with dp_size > 1 and 'token-mean', got None"),
    (dict(num_items_in_batch=0), "num_items_in_batch must be > 0 and finite, got 0"),
    (dict(num_items_in_batch=torch.tensor(-1.0)), "num_items_in_batch must be > 0 and finite, got -1.0"),
    (dict(num_items_in_batch=torch.ones(2)), r"num_items_in_batch must be one number, got shape \(2,\)"),
    (dict(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=0), "loss_scale_factor must be > 0"),
]
BAD_PACKED = [
    (dict(cu_seqlens=STARTS.float()), "cu_seqlens must be an int32 or int64 tensor, got float32"),
    (dict(cu_seqlens=STARTS[None]), r"cu_seqlens must be \[S \+ 1\], got \(1, 3\)"),
    (dict(cu_seqlens=STARTS + 1), r"cu_seqlens\[0\] must be 0, got 1"),
    (dict(cu_seqlens=torch.tensor([0, 2, 1])), r"cu_seqlens\[2\] must be >= cu_seqlens\[1\] = 2, got 1"),
    (dict(cu_seqlens=STARTS * 2), r"cu_seqlens\[-1\] must be at most N = 3, got 6"),
    (dict(loss_agg_mode="seq-mean-token-sum-norm"), "loss_scale_factor must be given with cu_seqlens"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_input_is_named(change, message):
    good = dict(values=ROW, returns=ROW, mask=ROW.bool())
    with pytest.raises(ValueError, match=message):
        rlkernel.value_loss(**good | change)


@pytest.mark.parametrize(("change", "message"), BAD_PACKED, ids=[m[:40] for _, m in BAD_PACKED])
def test_bad_packed_input_is_named(change, message):
    good = dict(values=ROW[0], returns=ROW[0], mask=ROW[0].bool(), cu_seqlens=STARTS)
    with pytest.raises(ValueError, match=message):
        rlkernel.value_loss(**good | change)


@pytest.mark.parametrize("backend", ["native", "emulated-warp32", "emulated-warp64", "triton"])
@pytest.mark.parametrize("starts", [[5, 9000, 2, -7, 4000], [0, 2**40, 3], [-(2**40), 1]], ids=str)
def test_offsets_that_are_none_are_no_illegal_access(backend, starts, monkeypatch):
    """What a GPU does outside debug mode: nothing outside of the tensors is read or written."""
    from rlkernel.ops import value_loss

    monkeypatch.setattr(value_loss, "_check_values", lambda *args: None)
    inputs = make_inputs(1, 4200)
    packed = {k: v[0] for k, v in inputs.items()} | {"cu_seqlens": torch.tensor(starts)}
    skip_unless_able(backend, "value_loss", packed["values"])
    assert run(backend, packed, **CLIP)[2].shape == (4200,)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_compiles_as_one_graph(backend, packed):
    inputs = make_inputs(4, 40, packed=packed)
    skip_unless_able(backend, "value_loss", inputs["values"])

    def step(values, items):
        out = rlkernel.value_loss(**inputs | {"values": values * 2}, **CLIP, num_items_in_batch=items)
        return out.loss * 3, out.metrics

    for items in (None, 55.0, torch.tensor(55)):
        results = []
        for fn in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            values = inputs["values"].clone().requires_grad_()
            with rlkernel.use_backend(backend):
                loss, metrics = fn(values, items)
                loss.backward()
            results.append((loss.detach(), metrics, values.grad))
        for name, a, b in zip(("loss", "metrics", "grad"), *results, strict=True):
            assert_equal(name, a, b)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("items", [None, 7.0, torch.tensor(7.0)], ids=["own", "number", "tensor"])
def test_opcheck(items, packed):
    inputs = make_inputs(4, 40, packed=packed)
    tensor, number = (items, None) if isinstance(items, torch.Tensor) else (None, items)
    args = (
        inputs["values"].requires_grad_(), inputs["returns"], inputs["mask"], inputs["old_values"],
        inputs.get("cu_seqlens"), tensor, number, 0.2, 0.5, "mean", 2.0,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.rlkernel.value_loss.default, args)


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


def test_forced_backend_never_falls_back():
    inputs = double(make_inputs(2, 5))
    with rlkernel.use_backend("native"), pytest.raises(NotImplementedError, match="native: .*float64"):
        rlkernel.value_loss(**inputs, **CLIP)
