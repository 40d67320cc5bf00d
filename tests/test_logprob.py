"""logprob: one body of tests for every backend, against fp64; and against the real TRL and verl."""

import pytest
import torch
from backends import DEVICES, is_slow, of, running, skip_unless_able
from bitwise import assert_equal
from logprob_cases import DTYPES, check_against_fp64, run, upstream_like
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel.benchmarks import _peers
from rlkernel.reference.logprob import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("logprob"))
pytestmark = pytest.mark.usefixtures("poison")


# one element; a tail shorter than any block; leading dims; past a power of two; several blocks and a tail
@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (2, 3, 1000), (4, 1025), (2, 5003)], ids=str)
@DTYPES
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, dtype, shape):
    inputs = make_inputs(*shape, dtype=dtype, device=device, ignored=0.2)
    skip_unless_able(backend, "logprob", *inputs.values())
    upstream = upstream_like(inputs["target_ids"])
    check_against_fp64(backend, **inputs, upstream=upstream, temperature=0.7, return_entropy=True)


@ON_EVERY_BACKEND
def test_options_do_not_depend_on_each_other(backend, device):
    inputs = make_inputs(5, 300, device=device)
    skip_unless_able(backend, "logprob", *inputs.values())
    g = upstream_like(inputs["target_ids"])
    per_row = torch.tensor([0.3, 1.0, 2.5, 1e-2, 50.0], device=device)
    for temperature in (1.0, per_row):
        for entropy in (False, True):
            for mask in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)):
                upstream = [x if keep else None for x, keep in zip(g, mask, strict=True)]
                if upstream[1] is not None and not entropy:
                    continue
                check_against_fp64(
                    backend, **inputs, upstream=upstream, temperature=temperature, return_entropy=entropy
                )


@pytest.mark.parametrize("shape", [(64, 151936), (2, 128257)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@ON_EVERY_BACKEND
def test_huge_vocabulary(backend, device, dtype, shape):
    """Many rows only where many run at once: on a CPU they differ in nothing, and fp64 takes its time."""
    rows = min(shape[0], 64 if device == "cuda" else 5 if backend == "native" else 2)
    inputs = make_inputs(rows, shape[1], dtype=dtype, device=device)
    skip_unless_able(backend, "logprob", *inputs.values())
    # half of a row's probability may lie on one token, and is exp(x - lse): the last digit of lse is 1e-6
    condition = 8.0 if dtype == torch.float32 else 0.0
    upstream = upstream_like(inputs["target_ids"])
    check_against_fp64(backend, **inputs, upstream=upstream, return_entropy=True, magnitude=condition)


@pytest.mark.parametrize("offset", [-1000.0, 1000.0, -1e30])
@ON_EVERY_BACKEND
def test_a_common_offset_costs_no_digits(backend, device, offset):
    """A peer's running maximum starts at 0: all-negative logits gave it +inf."""
    inputs = make_inputs(3, 700, device=device, scale=6)
    skip_unless_able(backend, "logprob", *inputs.values())
    inputs["logits"] = inputs["logits"] + offset
    check_against_fp64(
        backend, **inputs, upstream=upstream_like(inputs["target_ids"]), return_entropy=True, temperature=1.3
    )


SPECIAL = {
    "starts with -inf": lambda x: x[:, :300].fill_(-torch.inf),
    "ends with -inf": lambda x: x[:, 300:].fill_(-torch.inf),
    "one finite": lambda x: x.copy_(
        torch.where(torch.arange(x.shape[1], device=x.device) == 77, 3.0, -torch.inf)
    ),
    "all -inf": lambda x: x.fill_(-torch.inf),
    "a NaN": lambda x: x[:, 5].fill_(torch.nan),
    "a NaN in the tail": lambda x: x[:, -1].fill_(torch.nan),
    "only NaN": lambda x: x.fill_(torch.nan),
    "a +inf": lambda x: x[:, 400].fill_(torch.inf),
    "NaN and -inf": lambda x: x[:, 1:].fill_(-torch.inf)[:, 8].fill_(torch.nan),
}


@pytest.mark.parametrize("case", SPECIAL)
@ON_EVERY_BACKEND
def test_special_values_give_what_log_softmax_gives(backend, device, case):
    logits = make_inputs(3, 613, device=device)["logits"]
    target_ids = torch.tensor([77, 299, 612], device=device)
    skip_unless_able(backend, "logprob", logits, target_ids)
    SPECIAL[case](logits[1:2])
    if case == "one finite":
        target_ids[1] = 77
    upstream = upstream_like(target_ids)
    check_against_fp64(backend, logits, target_ids, upstream, return_entropy=True)
    truth = logits.double().log_softmax(-1).gather(1, target_ids[:, None])[:, 0]
    out, _ = run(backend, logits, target_ids)
    assert torch.equal(out.logprobs.isnan(), truth.isnan()) and torch.equal(
        out.logprobs.isinf(), truth.isinf()
    )


@DTYPES
@ON_EVERY_BACKEND
def test_gradient_as_the_target_becomes_certain(backend, device, dtype):
    """1 - p in the logits' dtype is off by 20% at p = 0.99 in one peer, and 100% at 0.999."""
    logits = torch.zeros(6, 50, dtype=dtype, device=device)
    logits[:, 7] = torch.tensor([4.0, 8.0, 12.0, 16.0, 24.0, 60.0])
    target_ids = torch.full((6,), 7, device=device)
    skip_unless_able(backend, "logprob", logits, target_ids)
    grad = run(backend, logits, target_ids, [torch.ones(6, device=device), None, None])[1][:, 7].double()
    p = logits.double().softmax(-1)
    want = p[:, torch.arange(50, device=device) != 7].sum(-1)
    budget = 2 * torch.finfo(dtype).eps * want + 4 * torch.finfo(torch.float32).eps
    assert ((grad - want).abs() <= budget).all(), f"{grad} is not {want}"


@ON_EVERY_BACKEND
def test_ignored_rows_are_zero_whatever_they_hold(backend, device):
    logits = torch.randn(4, 130, device=device)
    logits[1], logits[2, 3] = torch.nan, torch.inf
    target_ids = torch.tensor([5, -100, -100, 129], device=device)
    skip_unless_able(backend, "logprob", logits, target_ids)
    upstream = upstream_like(target_ids)
    upstream[0][1] = torch.nan  # what a masked loss may send back
    check_against_fp64(backend, logits, target_ids, upstream, return_entropy=True)
    out, grad = run(backend, logits, target_ids, upstream, return_entropy=True)
    for x in (*out, grad):
        assert (x[1:3] == 0).all()
    out, grad = run(backend, logits, torch.full_like(target_ids, -100), upstream, return_entropy=True)
    assert all((x == 0).all() for x in (*out, grad)), "a fully ignored batch"
    out, _ = run(backend, logits[:1], target_ids[1:2] * 0 + 9, ignore_index=9)
    assert out.logprobs.item() == 0, "another ignore_index, inside the vocabulary"


@pytest.mark.parametrize("step", [1, 2])
@ON_EVERY_BACKEND
def test_empty_batch_stays_connected(backend, device, step):
    leaf = torch.empty(0, 7 * step, device=device, requires_grad=True)
    logits = leaf[:, ::step]
    target_ids = torch.empty(0, dtype=torch.int64, device=device)
    skip_unless_able(backend, "logprob", leaf, target_ids)
    with running(backend):
        out = rlkernel.logprob(logits, target_ids, return_entropy=True)
    loss = out.logprobs.sum() + out.entropy.sum()
    loss.backward()
    assert loss.item() == 0 and leaf.grad.shape == leaf.shape


def _views(device):
    base = torch.randn(3, 6, 40, device=device)
    wide = torch.randn(3, 4, 100, device=device)
    return {
        "shifted [B, L+1, V]": base[:, :-1],
        "sliced vocabulary": wide[:, :, 3:40],
        "transposed": base.transpose(0, 1),
        "expanded": base[:1].expand(4, 6, 40),
        "expanded rows": base[:, :1].expand(3, 5, 40),
        "three strides": torch.randn(3, 3, 5, 40, device=device)[:, :2, :-1],
        "every other row": base[::2, 1::2],
        "vocabulary not last": torch.randn(40, 5, device=device).T,
        "one row": base[1, 2],
    }


@pytest.mark.parametrize("view", _views("cpu"))
@ON_EVERY_BACKEND
def test_any_strides(backend, device, view):
    logits = _views(device)[view]
    target_ids = torch.randint(0, logits.shape[-1], logits.shape[:-1], device=device)
    skip_unless_able(backend, "logprob", logits.contiguous(), target_ids)
    upstream = upstream_like(target_ids)
    with running(backend):
        leaf = logits.detach().requires_grad_()
        out = rlkernel.logprob(leaf, target_ids, return_entropy=True)
        grad = torch.autograd.grad(sum((o * g).sum() for o, g in zip(out, upstream, strict=True)), leaf)[0]
    want, want_grad = run(backend, logits.contiguous(), target_ids, upstream, return_entropy=True)
    for name, a, b in zip(out._fields, out, want, strict=True):
        assert_equal(name, a, b)
    assert_equal("grad", grad.contiguous(), want_grad)


@ON_EVERY_BACKEND
def test_strided_logits_are_not_copied(backend, device):
    if backend == "reference":
        pytest.skip("the reference says what the op means, not how to spend memory")
    if backend == "triton" and device == "cpu":
        pytest.skip("Triton's interpreter copies every argument")
    logits = torch.randn(2, 5, 4096, device=device)[:, :-1]
    target_ids = torch.randint(0, 4096, (2, 4), device=device)
    skip_unless_able(backend, "logprob", logits, target_ids)
    with running(backend), _Allocations() as allocations, torch.no_grad():
        rlkernel.logprob(logits, target_ids, return_entropy=True, temperature=0.9)
    assert allocations.largest < 4096, f"allocated a tensor of {allocations.largest} elements"


class _Allocations(TorchDispatchMode):
    """The largest tensor that any torch call has returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and not x._is_view():
                self.largest = max(self.largest, x.numel())
        return out


@ON_EVERY_BACKEND
def test_offsets_beyond_32_bits(backend, device):
    if backend == "reference":
        pytest.skip("torch's own indexing")
    torch.use_deterministic_algorithms(False)  # or torch.empty would touch all of the 4 GiB
    storage = torch.empty(2**31 + 3000, dtype=torch.bfloat16, device=device)
    logits = storage.as_strided((3, 1000), (2**30 + 7, 1))
    logits.copy_(torch.randn(3, 1000))
    target_ids = torch.tensor([0, 500, 999], device=device)
    skip_unless_able(backend, "logprob", logits, target_ids)
    with running(backend):
        got = rlkernel.logprob(logits, target_ids)
        want = rlkernel.logprob(logits.contiguous(), target_ids)
        leaf = logits.detach().requires_grad_()
        rlkernel.logprob(leaf * 1.0, target_ids, inplace_backward=True).logprobs.sum().backward()
    assert_equal("logprobs", got.logprobs, want.logprobs)
    upstream = [torch.ones(3, device=device), None, None]
    assert_equal("grad", leaf.grad, run(backend, logits.contiguous(), target_ids, upstream)[1])


@ON_EVERY_BACKEND
def test_more_rows_than_a_grid_dimension_holds(backend, device):
    if is_slow(backend, device):
        pytest.skip(f"{backend} on a CPU takes milliseconds a row")
    inputs = make_inputs(70_001, 9, device=device)
    check_against_fp64(backend, **inputs, upstream=upstream_like(inputs["target_ids"]), return_entropy=True)


@pytest.mark.parametrize(
    "temperature", [0.7, torch.tensor([0.5, 1.0, 2.0, 0.9]).double()], ids=["scalar", "rows"]
)
def test_gradcheck(temperature):
    inputs = make_inputs(4, 9, dtype=torch.float64, ignored=0.3)
    with rlkernel.use_backend("reference"):
        assert torch.autograd.gradcheck(
            lambda x: tuple(
                rlkernel.logprob(x, inputs["target_ids"], temperature=temperature, return_entropy=True)
            ),
            inputs["logits"].requires_grad_(),
        )


def test_fp64_stays_fp64():
    inputs = make_inputs(4, 999, dtype=torch.float64)
    out = rlkernel.logprob(**inputs)
    kept = inputs["target_ids"] != -100
    want = inputs["logits"].log_softmax(-1).gather(1, inputs["target_ids"].clamp(min=0)[:, None])[:, 0]
    assert out.logprobs.dtype == torch.float64
    assert (out.logprobs - want)[kept].abs().max() < 2e-14


def asked_with(ref, **change):
    """``forward`` of a call that is not the caller's: ``change`` gives fields from the right call."""
    return lambda call: ref.forward(call._replace(**{name: f(call) for name, f in change.items()}))


def halved(ref):
    def forward(call):
        out = ref.forward(call._replace(logits=call.logits.bfloat16()))
        return type(out)(*(None if x is None else x.float() for x in out))

    return forward


def last_entry_gone(call):
    return call.logits.index_fill(-1, torch.tensor([call.logits.shape[-1] - 1]), -99.0)


MUTANTS = {
    "forgets 1/T in the gradient": lambda ref: {
        "backward": lambda call, *r: ref.backward(call._replace(temperature=1.0), *r)
    },
    "forgets the entropy's gradient": lambda ref: {
        "backward": lambda call, out, grads: ref.backward(call, out, grads._replace(entropy=None))
    },
    "forgets lse's gradient": lambda ref: {
        "backward": lambda call, out, grads: ref.backward(call, out, grads._replace(lse=None))
    },
    "one target off": lambda ref: {
        "forward": asked_with(ref, target_ids=lambda call: (call.target_ids + 1) % call.logits.shape[-1])
    },
    "drops the last vocabulary entry": lambda ref: {"forward": asked_with(ref, logits=last_entry_gone)},
    "ignores nothing": lambda ref: {
        "forward": asked_with(ref, target_ids=lambda call: call.target_ids.clamp(min=0))
    },
    "half precision inside": lambda ref: {"forward": halved(ref)},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_body_fails_on(mutant, monkeypatch):
    import types

    from rlkernel import dispatch
    from rlkernel.reference import logprob as reference

    wrong = types.SimpleNamespace(
        **{"forward": reference.forward, "backward": reference.backward, "unsupported": reference.unsupported}
        | MUTANTS[mutant](reference)
    )
    load = dispatch._load
    monkeypatch.setattr(
        dispatch, "_load", lambda name, *rest: (wrong, []) if name == "native" else load(name, *rest)
    )
    inputs = make_inputs(40, 127, ignored=0.2)
    upstream = upstream_like(inputs["target_ids"])
    with pytest.raises(AssertionError):
        check_against_fp64("native", **inputs, upstream=upstream, temperature=0.7, return_entropy=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_names_that_users_know(device, temperature):
    logits = torch.randn(3, 4, 50, device=device, requires_grad=True)
    index = torch.randint(0, 50, (3, 4), device=device)
    several = torch.randint(0, 50, (3, 4, 5), device=device)
    logp = (logits / temperature).log_softmax(-1)
    want = logp.gather(-1, index[..., None])[..., 0]
    close = dict(rtol=0, atol=2e-6)
    torch.testing.assert_close(rlkernel.selective_log_softmax(logits, index, temperature), want, **close)
    torch.testing.assert_close(
        rlkernel.logprobs_from_logits(logits, index, temperature=temperature), want, **close
    )
    got = rlkernel.selective_log_softmax(logits, several, temperature)
    torch.testing.assert_close(got, logp.gather(-1, several), **close)
    assert torch.equal(rlkernel.selective_log_softmax(logits, several.to(torch.uint8), temperature), got)
    grad = torch.autograd.grad(got.pow(2).sum(), logits, retain_graph=True)[0]
    want_grad = torch.autograd.grad(logp.gather(-1, several).pow(2).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(grad, want_grad, rtol=0, atol=2e-5)
    entropy = -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(
        rlkernel.entropy_from_logits(logits, temperature=temperature), entropy, **close
    )
    with pytest.raises(ValueError, match=r"index must have shape \(3, 4\)"):
        rlkernel.selective_log_softmax(logits, index[:2])
    for outside in (-1, logits.shape[-1]):
        want = rf"index\[1\] must be in \[0, {logits.shape[-1]}\), got {outside}"
        with pytest.raises(ValueError, match=want):
            rlkernel.selective_log_softmax(logits, several.index_fill(-1, torch.tensor([1]), outside))


def test_what_peers_mean_by_the_next_argument_is_no_temperature():
    """TRL's ``entropy_from_logits(logits, chunk_size)``, verl's ``logprobs_from_logits(x, i, inplace)``."""
    logits, index = torch.randn(3, 50), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        rlkernel.entropy_from_logits(logits, 64)
    with pytest.raises(TypeError, match="takes 2 positional arguments"):
        rlkernel.logprobs_from_logits(logits, index, True)


def test_against_the_real_trl():
    utils = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed")
    logits, ids = make_inputs(2, 6, 333, ignored=0).values()
    for name, t in [("scalar", 0.8), ("one", 1.0)]:
        a, b = (logits.clone().requires_grad_() for _ in range(2))
        ours = rlkernel.logprob(a, ids, temperature=t, return_entropy=True)
        theirs = utils.selective_log_softmax(b, ids, temperature=t)
        torch.testing.assert_close(ours.logprobs, theirs, rtol=0, atol=5e-6, msg=name)
        torch.testing.assert_close(ours.entropy, utils.entropy_from_logits(b / t), rtol=0, atol=5e-6)
        ours.logprobs.pow(2).sum().backward()
        theirs.pow(2).sum().backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=2e-5)


def test_against_the_real_verl():
    try:
        functional = _peers.verl("utils.torch_functional")
    except ImportError as error:
        pytest.skip(f"verl: {error}")
    logits, ids = make_inputs(2, 6, 333, ignored=0).values()
    a, b = (logits.clone().requires_grad_() for _ in range(2))
    ours = rlkernel.logprob(a, ids, return_entropy=True)
    theirs = functional.logprobs_from_logits(b * 1, ids, inplace_backward=False)
    torch.testing.assert_close(ours.logprobs, theirs.view_as(ours.logprobs), rtol=0, atol=5e-6)
    # theirs is lse - sum(p * z): a difference of numbers that are larger than the entropy
    torch.testing.assert_close(ours.entropy, functional.entropy_from_logits(b), rtol=0, atol=2e-5)
    ours.logprobs.pow(2).sum().backward()
    theirs.pow(2).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=2e-5)
