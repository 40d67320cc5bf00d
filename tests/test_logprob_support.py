"""logprob over the support of a filtered rollout: one body of tests for every backend, against fp64."""

import types

import pytest
import torch
from backends import is_slow, of, running, skip_unless_able
from bitwise import assert_batch_invariant, assert_equal
from logprob_cases import DTYPES, eager_and_compiled, gradient, in_place, judge, run, upstream_like
from support_cases import masked, supports

import rlkernel
from rlkernel.calls.logprob import LogprobCall
from rlkernel.reference.logprob import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("logprob"))
pytestmark = pytest.mark.usefixtures("poison")


def by_torch(logits, target_ids, upstream=None, **options):
    leaf = logits.detach().clone().requires_grad_()
    out = masked(leaf, target_ids, **options)
    return out, None if upstream is None else gradient(out, leaf, upstream)


def check_against_fp64(backend, logits, target_ids, upstream=None, **options):
    wide = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in options.items()
    }
    truth, true_grad = by_torch(logits.double(), target_ids, upstream, **wide)
    torchs, torch_grad = by_torch(logits, target_ids, upstream, **options)
    ours, grad = run(backend, logits, target_ids, upstream, **options)
    judge((ours, grad), (torchs, torch_grad), (truth, true_grad), logits.dtype)
    return ours, grad


# whole rows beside supports of one token, of less than a vector, of several blocks, and of all tokens
SIZES = {"ragged": (0, 1, 3, 40, 700, 5003), "all whole": (0,), "one token": (1,), "all filtered": (7, 300)}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("shape", [(6, 5003), (2, 3, 127)], ids=str)
@DTYPES
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, dtype, shape, sizes):
    inputs = make_inputs(*shape, dtype=dtype, device=device, ignored=0.15)
    support = supports(inputs["target_ids"], shape[-1], SIZES[sizes])
    skip_unless_able(backend, "logprob", *inputs.values())
    upstream = upstream_like(inputs["target_ids"])
    check_against_fp64(backend, **inputs, **support, upstream=upstream, temperature=0.7, return_entropy=True)


@ON_EVERY_BACKEND
def test_options_do_not_depend_on_each_other(backend, device):
    inputs = make_inputs(5, 300, device=device)
    support = supports(inputs["target_ids"], 300, (9, 0, 2, 150))
    skip_unless_able(backend, "logprob", *inputs.values())
    g = upstream_like(inputs["target_ids"])
    per_row = torch.tensor([0.3, 1.0, 2.5, 1e-2, 50.0], device=device)
    for temperature in (1.0, per_row):
        for keep in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)):
            upstream = [x if k else None for x, k in zip(g, keep, strict=True)]
            options = {"temperature": temperature, "return_entropy": bool(keep[1])}
            check_against_fp64(backend, **inputs, **support, upstream=upstream, **options)


@ON_EVERY_BACKEND
def test_ids_in_64_bits_beyond_the_last_offset_and_in_any_order(backend, device):
    inputs = make_inputs(4, 200, device=device, ignored=0)
    support = supports(inputs["target_ids"], 200, (30, 0, 5))
    skip_unless_able(backend, "logprob", *inputs.values())
    upstream = upstream_like(inputs["target_ids"])
    want, want_grad = run(backend, **inputs, **support, upstream=upstream, return_entropy=True)
    ids, offsets = support.values()
    ascending = torch.cat([ids[a:b].sort().values for a, b in zip(offsets[:-1], offsets[1:], strict=True)])
    forms = {
        "64 bits": {"support_ids": ids.long(), "support_offsets": offsets.int()},
        "longer": {"support_ids": torch.cat([ids, ids.new_full((9,), -1)]), "support_offsets": offsets},
        "ascending": {"support_ids": ascending, "support_offsets": offsets},
        "from the middle": {"support_ids": torch.cat([ids[:3], ids]), "support_offsets": offsets + 3},
        "strided": {"support_ids": torch.stack([ids, ids], 1)[:, 0], "support_offsets": offsets},
    }
    for name, form in forms.items():
        got, grad = run(backend, **inputs, **form, upstream=upstream, return_entropy=True)
        for a, b in zip((*got, grad), (*want, want_grad), strict=True):
            assert_equal(name, a, b)


@DTYPES
@ON_EVERY_BACKEND
def test_one_token_is_certain(backend, device, dtype):
    """What a greedy rollout replays: logprob exactly 0, entropy exactly 0, a gradient of exactly 0."""
    inputs = make_inputs(5, 90, dtype=dtype, device=device, ignored=0, scale=30)
    skip_unless_able(backend, "logprob", *inputs.values())
    support = supports(inputs["target_ids"], 90, (1,))
    for t in (0.01, 1.0, 3.0):
        ones = torch.ones(5, device=device)
        out, grad = run(
            backend, **inputs, **support, upstream=[ones, ones, None], temperature=t, return_entropy=True
        )
        assert (out.logprobs == 0).all() and (out.entropy == 0).all() and (grad == 0).all()


@ON_EVERY_BACKEND
def test_what_the_support_leaves_out_has_no_effect(backend, device):
    inputs = make_inputs(4, 500, device=device, ignored=0)
    support = supports(inputs["target_ids"], 500, (20, 100))
    skip_unless_able(backend, "logprob", *inputs.values())
    upstream = upstream_like(inputs["target_ids"])
    want, want_grad = run(backend, **inputs, **support, upstream=upstream, return_entropy=True)
    ids, offsets = support.values()
    kept = torch.zeros(4, 500, dtype=torch.bool, device=device)
    for r in range(4):
        kept[r, ids[offsets[r] : offsets[r + 1]].long()] = True
    for junk in (torch.nan, torch.inf, -torch.inf, 1e30):
        inputs["logits"] = torch.where(kept, inputs["logits"], junk)
        got, grad = run(backend, **inputs, **support, upstream=upstream, return_entropy=True)
        for a, b in zip((*got, grad), (*want, want_grad), strict=True):
            assert_equal(f"{junk}", a, b)
        assert (grad[~kept] == 0).all()


@ON_EVERY_BACKEND
def test_a_target_that_is_not_kept(backend, device):
    """-inf, without a gradient of its own; lse and entropy keep theirs."""
    inputs = make_inputs(3, 60, device=device, ignored=0)
    skip_unless_able(backend, "logprob", *inputs.values())
    others = (inputs["target_ids"][:, None] + torch.arange(1, 8, device=device)) % 60
    support = {
        "support_ids": others.reshape(-1).int(),
        "support_offsets": torch.arange(0, 22, 7, device=device),
    }
    upstream = upstream_like(inputs["target_ids"])
    out, grad = check_against_fp64(backend, **inputs, **support, upstream=upstream, return_entropy=True)
    assert (out.logprobs == -torch.inf).all() and grad.abs().sum() > 0
    _, grad = run(backend, **inputs, **support, upstream=[upstream[0], None, None])
    assert (grad == 0).all()


SPECIAL = {
    "some -inf": lambda x: x[:, ::2].fill_(-torch.inf),
    "a NaN": lambda x: x[:, 5].fill_(torch.nan),
    "a +inf": lambda x: x[:, 5].fill_(torch.inf),
    "all -inf": lambda x: x.fill_(-torch.inf),
}


@pytest.mark.parametrize("case", SPECIAL)
@ON_EVERY_BACKEND
def test_special_values_inside_the_support(backend, device, case):
    logits = make_inputs(4, 61, device=device)["logits"]
    target_ids = torch.tensor([7, 9, 11, 13], device=device)
    skip_unless_able(backend, "logprob", logits, target_ids)
    SPECIAL[case](logits[1:3])  # a filtered row and a whole one
    ids = torch.cat([torch.arange(20), torch.arange(30), torch.arange(14)])
    support = {"support_ids": ids, "support_offsets": torch.tensor([0, 20, 50, 50, 64])}
    support = {k: v.to(device) for k, v in support.items()}
    upstream = upstream_like(target_ids)
    out, grad = run(backend, logits, target_ids, upstream, return_entropy=True, **support)
    if case == "some -inf":
        check_against_fp64(backend, logits, target_ids, upstream, return_entropy=True, **support)
        return
    for x in (out.logprobs, out.entropy, out.lse, grad.sum(-1)):
        assert x.isnan().tolist() == [False, True, True, False]
    assert grad[1, :30].isnan().all() and (grad[1, 30:] == 0).all()


@ON_EVERY_BACKEND
def test_ignored_rows_are_zero_whatever_they_hold(backend, device):
    logits = torch.randn(4, 130, device=device)
    logits[1], logits[2, 3] = torch.nan, torch.inf
    target_ids = torch.tensor([5, -100, -100, 129], device=device)
    skip_unless_able(backend, "logprob", logits, target_ids)
    support = supports(target_ids, 130, (10, 10, 0, 0))
    upstream = upstream_like(target_ids)
    upstream[0][1:3] = torch.nan  # what a masked loss may send back
    out, grad = run(backend, logits, target_ids, upstream, return_entropy=True, **support)
    for x in (*out, grad):
        assert (x[1:3] == 0).all() and x[0].isfinite().all() and (x[[0, 3]] != 0).any()
    none = torch.full_like(target_ids, -100)
    out, grad = run(backend, logits, none, upstream, return_entropy=True, **support)
    assert all((x == 0).all() for x in (*out, grad)), "a fully ignored batch"


@ON_EVERY_BACKEND
def test_empty_batch_stays_connected(backend, device):
    logits = torch.empty(0, 7, device=device, requires_grad=True)
    target_ids = torch.empty(0, dtype=torch.int64, device=device)
    skip_unless_able(backend, "logprob", logits, target_ids)
    support = {"support_ids": target_ids.int(), "support_offsets": target_ids.new_zeros(1)}
    with running(backend):
        out = rlkernel.logprob(logits, target_ids, return_entropy=True, **support)
    (out.logprobs.sum() + out.entropy.sum()).backward()
    assert logits.grad.shape == (0, 7)


def _views(device):
    base = torch.randn(3, 6, 40, device=device)
    return {
        "shifted [B, L+1, V]": base[:, :-1],
        "sliced vocabulary": torch.randn(3, 4, 100, device=device)[:, :, 3:40],
        "transposed": base.transpose(0, 1),
        "expanded": base[:1].expand(4, 6, 40),
        "three strides": torch.randn(3, 3, 5, 40, device=device)[:, :2, :-1],
        "vocabulary not last": torch.randn(40, 5, device=device).T,
        "one row": base[1, 2],
    }


@pytest.mark.parametrize("view", _views("cpu"))
@ON_EVERY_BACKEND
def test_any_strides(backend, device, view):
    logits = _views(device)[view]
    target_ids = torch.randint(0, logits.shape[-1], logits.shape[:-1], device=device)
    skip_unless_able(backend, "logprob", logits.contiguous(), target_ids)
    support = supports(target_ids, logits.shape[-1], (5, 0, 12, 1))
    upstream = upstream_like(target_ids)
    with running(backend):
        leaf = logits.detach().requires_grad_()
        out = rlkernel.logprob(leaf, target_ids, return_entropy=True, **support)
        grad = gradient(out, leaf, upstream)
    want, want_grad = run(backend, logits.contiguous(), target_ids, upstream, return_entropy=True, **support)
    for name, a, b in zip(out._fields, out, want, strict=True):
        assert_equal(name, a, b)
    assert_equal("grad", grad.contiguous(), want_grad)


@ON_EVERY_BACKEND
def test_backward_in_place(backend, device):
    inputs = make_inputs(5, 600, dtype=torch.bfloat16, device=device)
    skip_unless_able(backend, "logprob", *inputs.values())
    support = supports(inputs["target_ids"], 600, (10, 0, 300))
    upstream = upstream_like(inputs["target_ids"])
    _, want = run(backend, **inputs, **support, upstream=upstream, return_entropy=True)
    grad, there, loss = in_place(backend, **inputs, upstream=upstream, **support)
    assert there, "the gradient must lie where the logits were"
    assert_equal("grad", grad, want)
    with pytest.raises(RuntimeError, match="inplace_backward must be False for a second backward"):
        loss.backward()


@DTYPES
@ON_EVERY_BACKEND
def test_batch_invariant(backend, device, dtype):
    """A row's bits are those of the row alone, at any address and among any others."""
    if backend == "reference":
        pytest.skip("the reference promises no bits")
    inputs = make_inputs(7, 1999, dtype=dtype, device=device, ignored=0)
    logits, target_ids = inputs.values()
    skip_unless_able(backend, "logprob", logits, target_ids)
    whole = supports(target_ids, 1999, (33, 0, 600, 1))
    sizes = whole["support_offsets"].diff()
    padded = torch.full((7, 600), -1, dtype=torch.int32, device=device)
    for r, (a, b) in enumerate(zip(whole["support_offsets"][:-1], whole["support_offsets"][1:], strict=True)):
        padded[r, : b - a] = whole["support_ids"][a:b]
    upstream = torch.stack(upstream_like(target_ids), -1)

    def outputs(x, ids, up, kept, size):
        support = {
            "support_ids": kept[kept >= 0],
            "support_offsets": torch.nn.functional.pad(size.cumsum(0), (1, 0)),
        }
        out, grad = run(backend, x, ids, up.unbind(-1), temperature=0.8, return_entropy=True, **support)
        return *out, grad

    assert_batch_invariant(outputs, logits, target_ids, upstream, padded, sizes)


def test_same_bits_on_any_number_of_threads():
    inputs = make_inputs(40, 3001)
    skip_unless_able("native", "logprob", *inputs.values())
    support = supports(inputs["target_ids"], 3001, (0, 3, 900))
    upstream, results = upstream_like(inputs["target_ids"]), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out, grad = run("native", **inputs, **support, upstream=upstream, return_entropy=True)
            results.append((*out, grad))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert_equal("output", a, b)


def rollout(backend, logits, **filters):
    rows = logits.shape[0]
    keys = {
        "seeds": torch.arange(rows, device=logits.device),
        "positions": torch.arange(rows, device=logits.device),
    }
    with running(backend):
        return rlkernel.sample(logits, **keys, return_support=logits.shape[1], **filters)


FILTERS = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 20},
    "top_p and whole rows": {"top_p": torch.tensor([0.8, 1.0] * 12)},
    "both, hot": {"top_p": 0.9, "top_k": 100, "temperature": 1.3},
    "min_p, temperature per row": {"min_p": 0.05, "temperature": torch.linspace(0.4, 1.6, 24)},
    "no filter": {},
}


@pytest.mark.parametrize("filters", FILTERS)
@DTYPES
@ON_EVERY_BACKEND
def test_a_rollout_and_its_twin_have_the_same_bits(backend, device, dtype, filters):
    """On-policy the ratio of trainer and rollout is exactly 1, in filtered rows and in whole ones."""
    rows, vocab = 24, 4500  # more than one split
    if is_slow(backend, device):
        rows = 4
    logits = make_inputs(rows, vocab, dtype=dtype, device=device, scale=2.0)["logits"]
    skip_unless_able(backend, "logprob", logits)
    skip_unless_able(backend, "sampling", logits)
    options = {
        k: v[:rows].to(device) if isinstance(v, torch.Tensor) else v for k, v in FILTERS[filters].items()
    }
    out = rollout(backend, logits, **options)
    temperature = options.get("temperature", 1.0)
    twin = {"support_ids": out.support_ids, "support_offsets": out.support_offsets}
    with running(backend):
        got = rlkernel.logprob(logits, out.token_ids, temperature=temperature, **twin)
    assert_equal("logprobs", got.logprobs, out.processed_logprobs)
    assert ((got.logprobs - out.processed_logprobs).exp() == 1).all()


def test_greedy_rows_replay_to_0():
    logits = make_inputs(6, 300)["logits"]
    temperature = torch.tensor([0.0, 1.0] * 3)
    out = rollout("auto", logits, temperature=temperature, top_p=0.9)
    twin = {"support_ids": out.support_ids, "support_offsets": out.support_offsets}
    got = rlkernel.logprob(logits, out.token_ids, temperature=temperature.where(temperature > 0, 1), **twin)
    assert_equal("logprobs", got.logprobs, out.processed_logprobs)
    assert (got.logprobs[::2] == 0).all()


def test_without_the_support_the_ratio_is_the_kept_mass():
    """TRL measured it at top_p = 0.8: half of the tokens leave [0.9, 1.1], and none with the support."""
    logits = make_inputs(400, 500, scale=2.5)["logits"]
    out = rollout("auto", logits, top_p=0.8)
    twin = {"support_ids": out.support_ids, "support_offsets": out.support_offsets}
    for support, most, least in ((twin, 0.0, 0.0), ({}, 1.0, 0.5)):
        ratio = (rlkernel.logprob(logits, out.token_ids, **support).logprobs - out.processed_logprobs).exp()
        far = ((ratio < 0.9) | (ratio > 1.1)).float().mean().item()
        assert least <= far <= most, f"{far:.1%} of the tokens outside [0.9, 1.1]"


def test_a_support_off_by_one_is_seen():
    """The check of bits above, on a replay whose ids are one too large."""
    logits = make_inputs(24, 900, scale=2.0)["logits"]
    out = rollout("auto", logits, top_p=0.9)
    assert out.support_ids.numel() > 24
    wrong = {"support_ids": (out.support_ids + 1) % 900, "support_offsets": out.support_offsets}
    got = rlkernel.logprob(logits, out.token_ids, **wrong)
    with pytest.raises(AssertionError, match="differ"):
        assert_equal("logprobs", got.logprobs, out.processed_logprobs)


def off_by_one(call):
    return call._replace(support_ids=(call.support_ids + 1) % call.logits.shape[-1])


def of_supports_alone(ref, call):
    out = ref.forward(call)
    filtered = (call.support_offsets.diff() > 0).view(call.target_ids.shape)
    return out._replace(logprobs=torch.where(filtered, out.logprobs, 0))


MUTANTS = {
    "one row's support off by one": lambda ref: {"forward": lambda call: ref.forward(off_by_one(call))},
    "forgets the temperature": lambda ref: {
        "forward": lambda call: ref.forward(call._replace(temperature=1.0))
    },
    "forgets 1/T in the gradient": lambda ref: {
        "backward": lambda call, *r: ref.backward(call._replace(temperature=1.0), *r)
    },
    "forgets the entropy's gradient": lambda ref: {
        "backward": lambda call, out, grads: ref.backward(call, out, grads._replace(entropy=None))
    },
    "leaves whole rows out": lambda ref: {"forward": lambda call: of_supports_alone(ref, call)},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_body_fails_on(mutant, monkeypatch):
    from rlkernel import dispatch
    from rlkernel.reference import logprob as reference

    wrong = types.SimpleNamespace(**vars(reference) | MUTANTS[mutant](reference))
    load = dispatch._load
    monkeypatch.setattr(
        dispatch, "_load", lambda name, *rest: (wrong, []) if name == "native" else load(name, *rest)
    )
    inputs = make_inputs(40, 127, ignored=0.2)
    support = supports(inputs["target_ids"], 127, (9, 0, 60))
    upstream = upstream_like(inputs["target_ids"])
    with pytest.raises(AssertionError):
        check_against_fp64(
            "native", **inputs, **support, upstream=upstream, temperature=0.7, return_entropy=True
        )


def test_gradcheck():
    inputs = make_inputs(4, 9, dtype=torch.float64, ignored=0.3)
    support = supports(inputs["target_ids"], 9, (4, 0, 1))
    with rlkernel.use_backend("reference"):
        assert torch.autograd.gradcheck(
            lambda x: tuple(
                rlkernel.logprob(x, inputs["target_ids"], temperature=0.7, return_entropy=True, **support)
            ),
            inputs["logits"].requires_grad_(),
        )


BAD = [
    (dict(support_offsets=None), "support_offsets must be given together with support_ids, got None"),
    (dict(support_ids=None), "support_ids must be given together with support_offsets, got None"),
    (dict(support_ids=[1]), "support_ids must be a tensor or None, got list"),
    (dict(support_ids=torch.zeros(3)), "support_ids must be int32 or int64, got float32"),
    (
        dict(support_ids=torch.zeros(1, 3, dtype=torch.int32)),
        r"support_ids must be one-dimensional, got shape \(1, 3\)",
    ),
    (dict(support_offsets=torch.tensor([0, 3])), r"support_offsets must have shape \(3,\), .* got \(2,\)"),
    (dict(support_offsets=torch.tensor([0, 2, 4])), r"must lie in \[0, 3\], .* got 0 to 4"),
    (dict(support_offsets=torch.tensor([-1, 2, 3])), r"must lie in \[0, 3\], .* got -1 to 3"),
    (
        dict(support_offsets=torch.tensor([1, 3, 2])),
        r"support_offsets\[2\] must be >= support_offsets\[1\] = 3, got 2",
    ),
    (dict(support_ids=torch.tensor([0, 5, 1])), r"support_ids\[1\] = 5 is outside \[0, 5\)"),
    (dict(support_ids=torch.tensor([0, 2**32 + 1, 1])), r"support_ids\[1\] = 4294967297 is outside"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_input_is_named(change, message):
    good = dict(support_ids=torch.tensor([0, 2, 1]), support_offsets=torch.tensor([0, 2, 3]))
    with pytest.raises(ValueError, match=message):
        rlkernel.logprob(torch.zeros(2, 5), torch.tensor([0, 1]), **good | change)


def test_debug_mode_finds_a_token_that_is_named_twice():
    logits, target_ids = torch.zeros(2, 5), torch.tensor([0, 1])
    support = dict(support_ids=torch.tensor([0, 2, 1, 2, 1]), support_offsets=torch.tensor([0, 2, 5]))
    rlkernel.logprob(logits, target_ids, **support)
    with rlkernel.debug.checks(), pytest.raises(ValueError, match=r"support_ids\[4\] = 1 must be .* once"):
        rlkernel.logprob(logits, target_ids, **support)
    support["support_ids"] = torch.tensor([0, 2, 1, 2, 0])  # 0 and 2 are in both rows, once in each
    with rlkernel.debug.checks():
        rlkernel.logprob(logits, target_ids, **support)


@pytest.mark.parametrize("backend", ["native", "emulated-warp32", "emulated-warp64", "triton"])
def test_ids_and_offsets_that_nobody_has_looked_at_read_no_other_memory(backend, monkeypatch):
    """What a GPU does outside debug mode: no fault, and NaN where an id is outside the vocabulary."""
    from rlkernel.ops import _support, _validate

    monkeypatch.setattr(_support, "_values", lambda *args: None)
    monkeypatch.setattr(_validate, "values", lambda *args: None)
    logits, target_ids = torch.randn(4, 65), torch.tensor([3, 4, 5, 70])
    skip_unless_able(backend, "logprob", logits, target_ids)
    support = {
        "support_ids": torch.tensor([3, 2**40, 4, 9, 5, -7, 1, 2]),
        "support_offsets": torch.tensor([0, 2, 4, 6, 2**40]),
    }
    out, grad = run(backend, logits, target_ids, [torch.ones(4), None, None], **support)
    assert out.logprobs.isnan().tolist() == [True, False, True, False]
    assert out.logprobs[3] == -torch.inf and (grad[3] == 0).all()
    assert grad.isnan().any(1).tolist() == [True, False, True, False]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_compiles_as_one_graph(backend):
    inputs = make_inputs(4, 40)
    skip_unless_able(backend, "logprob", *inputs.values())
    support = supports(inputs["target_ids"], 40, (6, 0))
    for t in (0.7, torch.full(inputs["target_ids"].shape, 0.7)):
        eager, compiled = eager_and_compiled(backend, **inputs, temperature=t, **support)
        assert torch.equal(compiled, eager)


@pytest.mark.parametrize("return_entropy", [False, True])
def test_opcheck(return_entropy):
    from rlkernel.ops.logprob import op

    inputs = make_inputs(4, 40)
    support = supports(inputs["target_ids"], 40, (6, 0))
    logits, ids = inputs["logits"].requires_grad_(), inputs["target_ids"]
    temperature = 0.7 if return_entropy else torch.rand(4) + 0.5
    call = LogprobCall(logits, ids, temperature, -100, return_entropy, False, *support.values())
    torch.library.opcheck(op.node, op.flat(call))
