"""rlkernel.patch_trl() under the real TRL: the same numbers, less memory."""

import contextlib
import itertools

import partitioned
import pytest
import torch
import trl_places
from torch.utils._python_dispatch import TorchDispatchMode
from trl_places import HEAD, utils

import rlkernel
from rlkernel.integrations.trl.contract import OUTPUTS

nothing_left_behind = trl_places.nothing_left_behind


# The choke point


def head_inputs(dtype=torch.float32, weight_dtype=None, n=37, h=24, v=211, bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=g) / 2).to(weight_dtype or dtype).requires_grad_()
    b = torch.randn(v, generator=g).to(weight_dtype or dtype).requires_grad_() if bias else None
    return hidden, weight, b, torch.randint(0, v, (n,), generator=g)


def score(inputs, temperature=1.0, softcap=None, scale=1.0, outputs=("log_probs", "entropy")):
    """TRL's call with its default tile width, and the gradients of a loss of all differentiable outputs."""
    hidden, weight, bias, targets = inputs
    head = getattr(utils, HEAD)
    results = head.apply(hidden, weight, bias, targets, temperature, 32768, softcap, scale, outputs)
    row = torch.linspace(-1, 1, len(targets))
    loss = (results[0] * row).sum() + (0 if results[1] is None else (results[1] * row.flip(0)).sum())
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    return results, torch.autograd.grad(loss, leaves)


def truth(inputs, compute_dtype, **options):
    """The same in fp64, from the inputs as they enter the product."""
    leaves = [None if x is None else x.detach().double() for x in inputs[:3]]
    rounded = [
        None if x is None else x.detach().to(compute_dtype).double().requires_grad_() for x in inputs[:2]
    ]
    hidden, weight = rounded
    bias = None if leaves[2] is None else leaves[2].requires_grad_()
    temperature, softcap, scale = (
        options.get(k, d) for k, d in (("temperature", 1.0), ("softcap", None), ("scale", 1.0))
    )
    z = hidden @ weight.T + (0 if bias is None else bias)
    z = z * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    logp = (z / temperature).log_softmax(-1)
    logprobs = logp.gather(-1, inputs[3][:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1) if "entropy" in options.get("outputs", ("entropy",)) else None
    row = torch.linspace(-1, 1, len(inputs[3])).double()
    loss = (logprobs * row).sum() + (0 if entropy is None else (entropy * row.flip(0)).sum())
    return (logprobs, entropy), torch.autograd.grad(
        loss, [x for x in (hidden, weight, bias) if x is not None]
    )


def errors(values, exact):
    return [(a.double() - b).abs().max().item() for a, b in zip(values, exact, strict=True) if a is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy")], ids=["logprobs", "entropy"])
def test_head_is_as_exact_as_upstream(dtype, outputs):
    for bias, softcap, scale, temperature in itertools.product(
        (False, True), (None, 5.0), (1.0, 0.25), (1.0, 0.7)
    ):
        inputs = head_inputs(dtype, bias=bias)
        options = {"temperature": temperature, "softcap": softcap, "scale": scale, "outputs": outputs}
        (up, up_grads), (exact, exact_grads) = score(inputs, **options), truth(inputs, dtype, **options)
        with rlkernel.patch_trl() as patch:
            ours, grads = score(inputs, **options)
        assert patch.calls == {HEAD: 1} and not patch.fallbacks
        assert [None if x is None else (x.dtype, x.shape) for x in ours] == [
            None if x is None else (x.dtype, x.shape) for x in up
        ]
        assert [(g.dtype, g.shape) for g in grads] == [(g.dtype, g.shape) for g in up_grads]
        case = f"{options} bias={bias}"
        for what, mine, theirs, right in (
            ("values", ours[:2], up[:2], exact),
            ("grads", grads, up_grads, exact_grads),
        ):
            for error, other in zip(errors(mine, right), errors(theirs, right), strict=True):
                assert error <= 2 * other + 2e-6, f"{what} of {case}: error {error:.1e}, TRL's {other:.1e}"


@pytest.mark.parametrize(
    "hidden_dtype, weight_dtype, autocast",
    [
        (torch.float32, torch.bfloat16, None),  # cast_lm_head_to_fp32
        (torch.bfloat16, torch.float32, None),
        (torch.float32, torch.float32, torch.bfloat16),  # bf16=True over fp32 weights
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
    ids=["fp32-head", "bf16-hidden", "autocast", "autocast-bf16"],
)
def test_head_computes_in_upstreams_dtype(hidden_dtype, weight_dtype, autocast):
    inputs = head_inputs(hidden_dtype, weight_dtype)
    exact, exact_grads = truth(inputs, autocast or hidden_dtype, outputs=("entropy",))
    mode = torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext()
    with mode:
        up, up_grads = score(inputs)
        with rlkernel.patch_trl() as patch:
            ours, grads = score(inputs)
    assert patch.calls == {HEAD: 1}
    assert [x.dtype for x in ours[:2]] == [torch.float32] * 2
    assert (
        [g.dtype for g in grads] == [g.dtype for g in up_grads] == [hidden_dtype, weight_dtype, weight_dtype]
    )
    # the last digits of a product of the wider dtype would show here, and so would bf16 logits
    assert max(errors(ours[:2], exact)) < 1e-5
    for error, other in zip(errors(grads, exact_grads), errors(up_grads, exact_grads), strict=True):
        assert error <= 2 * other + 2e-6


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("asked", [*OUTPUTS[1:], "all"])
def test_what_trainers_log_is_upstreams(asked, softcap):
    """The mean logit, whether the label is the most likely token, and log(sum of p**2)."""
    hidden, weight, bias, targets = head_inputs()
    with torch.no_grad():
        best = (hidden @ weight.T + bias).argmax(-1)
    inputs = (hidden, weight, bias, torch.where(torch.arange(37) % 2 == 0, best, targets))
    outputs = ("log_probs", *(OUTPUTS if asked == "all" else (asked,)))
    options = {"outputs": outputs, "temperature": 0.7, "softcap": softcap, "scale": 1.3}
    up, up_grads = score(inputs, **options)
    with rlkernel.patch_trl() as patch:
        ours, grads = score(inputs, **options)
    assert patch.calls == {HEAD: 1} and not patch.fallbacks
    for a, b in zip((*ours, *grads), (*up, *up_grads), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    if asked in ("is_top1", "all"):
        assert 18 < int(ours[4].sum()) < 25


def test_fp64_comes_from_upstream():
    with rlkernel.patch_trl() as patch:
        score(head_inputs(torch.float64))
    assert patch.fallbacks == {f"{HEAD}: hidden is torch.float64": 1}


def test_no_valid_row_keeps_the_head_connected():
    inputs = head_inputs(n=0)
    with rlkernel.patch_trl():
        results, grads = score(inputs)
    assert [x.shape for x in results[:2]] == [(0,), (0,)]
    assert all(g is not None and not g.any() for g in grads)


def test_unused_entropy_gets_no_gradient():
    hidden, weight, bias, targets = head_inputs()
    with rlkernel.patch_trl():
        logprobs, entropy, *_ = getattr(utils, HEAD).apply(
            hidden, weight, bias, targets, 1.0, 32768, None, 1.0, ("entropy",)
        )
        alone = getattr(utils, HEAD).apply(hidden, weight, bias, targets, 1.0, 32768, None, 1.0, ())[0]
    assert entropy.requires_grad
    for a, b in zip(
        torch.autograd.grad(logprobs.sum(), [hidden, weight, bias]),
        torch.autograd.grad(alone.sum(), [hidden, weight, bias]),
        strict=True,
    ):
        assert torch.equal(a, b)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // 4)
        return out


def test_logits_never_exist():
    n, h, v, limit = 700, 16, 5000, 2**20
    inputs = head_inputs(n=n, h=h, v=v)
    watched = Largest()
    with watched:
        score(inputs)
    assert watched.elements >= n * v  # upstream's tile is 4096 x 32768: here it is the logits

    watched = Largest()
    with rlkernel.workspace.limited(limit), rlkernel.patch_trl(), watched:
        score(inputs)
    assert watched.elements <= max(limit // 4, v * h) < n * v / 10


def test_partitioned_head_is_gathered_again_for_backward(monkeypatch):
    """ZeRO-3 in small: a parameter whose memory is there only inside the gathering context."""
    gathers = []
    gather = partitioned.gathering(gathers)
    monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", gather)
    inputs = head_inputs()
    exact, exact_grads = score(inputs)
    hidden, weight, bias, targets = inputs
    for p in (weight, bias):
        p.ds_status, p.full, p.data = "NOT_AVAILABLE", p.detach().clone(), torch.empty(0)
    with rlkernel.patch_trl() as patch:
        with gather(weight, bias):
            logprobs, entropy, *_ = getattr(utils, HEAD).apply(
                hidden, weight, bias, targets, 1.0, 32768, None, 1.0, ("entropy",)
            )
        assert patch.calls == {HEAD: 1} and not weight.numel() and len(gathers) == 2
        row = torch.linspace(-1, 1, len(targets))
        loss = (logprobs * row).sum() + (entropy * row.flip(0)).sum()
        grads = torch.autograd.grad(loss, [hidden, weight, bias])
    assert len(gathers) > 2 and not weight.numel() and not bias.numel()
    torch.testing.assert_close((logprobs, entropy), exact[:2])
    torch.testing.assert_close(grads, exact_grads)


def test_traces_without_graph_breaks():
    inputs = head_inputs()
    with rlkernel.patch_trl() as patch:
        eager, eager_grads = score(inputs)
        compiled = torch.compile(
            lambda *x: getattr(utils, HEAD).apply(*x), backend="aot_eager", fullgraph=True
        )
        traced = compiled(*inputs, 1.0, 32768, None, 1.0, ("log_probs", "entropy"))
    assert patch.calls == {
        HEAD: 1
    }  # of the eager call: counting while tracing would compile anew at every call
    torch.testing.assert_close(traced[:2], eager[:2])


# Helpers that take logits


def logits_and_index(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(3, 8, 101, generator=g)).to(dtype).requires_grad_()
    return logits, torch.randint(0, 101, (3, 7), generator=g), torch.rand(3, 7, generator=g) > 0.3


def both(call, leaf):
    """Value and gradient of ``call``, by upstream and by rlkernel, and the patch that was on."""
    results = []
    for patched in (False, True):
        with rlkernel.patch_trl() if patched else contextlib.nullcontext() as patch:
            values = call()
            values = values if isinstance(values, tuple) else (values,)
            differentiable = [x for x in values if x.requires_grad]
            grad = torch.autograd.grad(sum((x * x).sum() for x in differentiable), leaf)[0]
        results.append((values, grad, [x.requires_grad for x in values]))
    return *results, patch


HELPERS = {
    "selective": lambda x, i, m: utils.selective_log_softmax(x[:, :-1], i),
    "temperature": lambda x, i, m: utils.selective_log_softmax(x[:, :-1], i, temperature=0.7),
    "row_mask": lambda x, i, m: utils.selective_log_softmax(x[:, :-1], i, row_mask=m),
    "several": lambda x, i, m: utils.selective_log_softmax(x[:, :-1], torch.stack([i, i.flip(0)], -1), 0.7),
    "entropy": lambda x, i, m: utils.entropy_from_logits(x[:, :-1]),
    "pair": lambda x, i, m: utils.selective_log_softmax_and_entropy(
        x[:, :-1], i, temperature=0.7, row_mask=m
    ),
    "pair, entropy without gradient": lambda x, i, m: utils.selective_log_softmax_and_entropy(
        x[:, :-1], i, False
    ),
}


@pytest.mark.parametrize("name", HELPERS)
def test_helpers_give_upstreams_values(name):
    logits, index, mask = logits_and_index()
    (up, up_grad, up_needs), (ours, grad, needs), patch = both(
        lambda: HELPERS[name](logits, index, mask), logits
    )
    assert patch.calls.total() == 1 and not patch.fallbacks
    assert needs == up_needs
    torch.testing.assert_close(ours, up, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, up_grad, rtol=1e-5, atol=1e-5)


def test_helpers_leave_to_upstream_what_they_do_not_cover():
    logits, index, mask = logits_and_index(torch.float64)
    (up, up_grad, _), (ours, grad, _), patch = both(lambda: HELPERS["row_mask"](logits, index, mask), logits)
    assert patch.fallbacks == {"selective_log_softmax: logits are torch.float64": 1}
    torch.testing.assert_close((*ours, grad), (*up, up_grad), rtol=0, atol=0)


def test_a_negative_index_stays_an_error():
    logits, index, _ = logits_and_index()
    index[1, 2] = -100
    for patched in (False, True):
        with (
            rlkernel.patch_trl() if patched else contextlib.nullcontext(),
            pytest.raises((RuntimeError, ValueError)),
        ):
            utils.selective_log_softmax(logits[:, :-1], index)
