"""patch_trl() under TRL's DistillationTrainer: ``linear_divergence`` in the place of its function."""

import contextlib
import itertools
import logging

import partitioned
import pytest
import torch
import trl_places
from accuracy import check
from bitwise import assert_equal

import rlkernel

kernels = pytest.importorskip("trl.kernels.chunked_divergence", reason="needs TRL 1.15 or later")
distillation = pytest.importorskip("trl.trainer.distillation_trainer")
nothing_left_behind = trl_places.nothing_left_behind

NAME = "ChunkedDivergenceFunction"
UPSTREAM = getattr(kernels, NAME)
HALF, FULL = torch.bfloat16, torch.float32
ROWS, VOCAB = 37, 211
PLAIN = {"beta": 0.5, "temperature": 1.0, "scale": (1.0, 1.0), "softcap": (None, None)}


def models(dtypes=(FULL,) * 4, bias=True, seed=0):
    """Hidden states, lm_head and bias of the student, and those of a wider teacher; the weights of both are
    parameters, as in trainers."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for width, (of_hidden, of_weight) in zip((24, 40), (dtypes[:2], dtypes[2:]), strict=True):
        hidden = torch.randn(ROWS, width, generator=g).to(of_hidden)
        weight = (torch.randn(VOCAB, width, generator=g) / 2).to(of_weight).requires_grad_()
        b = torch.randn(VOCAB, generator=g).to(of_weight).requires_grad_() if bias else None
        found += [hidden, weight, b]
    found[0].requires_grad_()
    return found


def call(inputs, beta, temperature, scale, softcap):
    """TRL's call."""
    pairs = [x for pair in zip(scale, softcap, strict=True) for x in pair]
    return getattr(kernels, NAME).apply(*inputs, beta, temperature, *pairs)


def upstream_gradient(rows):
    """Of each row, some of which have none."""
    return torch.linspace(-1, 1, rows) * (torch.arange(rows) % 5 != 0)


def run(inputs, **options):
    """``(divergence, entropy)`` and the gradients of the student."""
    divergence, entropy = call(inputs, **PLAIN | options)
    assert not entropy.requires_grad
    loss = (divergence * upstream_gradient(len(divergence)).to(divergence.dtype)).sum()
    leaves = [x for x in inputs[:3] if x is not None and x.requires_grad]
    return [divergence.detach(), entropy], list(torch.autograd.grad(loss, leaves))


def truth(inputs, dtypes=(FULL, FULL), **options):
    """The same in fp64, of hidden states and weights as they enter the products."""
    options = PLAIN | options
    wide = [None if x is None else x.detach().double() for x in inputs]
    for first, dtype in zip((0, 3), dtypes, strict=True):
        for i in (first, first + 1):
            wide[i] = inputs[i].detach().to(dtype).double()
    for x in wide[:3]:
        if x is not None:
            x.requires_grad_()
    logs = []
    for (h, w, b), s, cap in zip((wide[:3], wide[3:]), options["scale"], options["softcap"], strict=True):
        z = (h @ w.T + (0 if b is None else b)) * s
        z = z if cap is None else cap * torch.tanh(z / cap)
        logs.append((z / options["temperature"]).log_softmax(-1))
    p, q = logs
    beta = options["beta"]
    if beta in (0, 1):
        divergence = (q.exp() * (q - p) if beta == 0 else p.exp() * (p - q)).sum(-1)
    else:
        m = ((1 - beta) * p.exp() + beta * q.exp()).log()
        divergence = (beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)).sum(-1)
    loss = (divergence * upstream_gradient(ROWS).double()).sum()
    leaves = [x for x in wide[:3] if x is not None]
    entropy = -(p.exp() * p).sum(-1)
    return [divergence.detach(), entropy.detach()], list(torch.autograd.grad(loss, leaves))


def check_against_trl(inputs, dtypes=(FULL, FULL), autocast=None, **options):
    """Values and gradients, at most twice as far from the truth as TRL's, and of the dtypes of TRL's."""
    want = truth(inputs, dtypes, **options)
    with torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext():
        stock = run(inputs, **options)
        with rlkernel.patch_trl(vllm=False) as patch:
            found, again = run(inputs, **options), run(inputs, **options)
    assert patch.calls == {NAME: 2} and not patch.fallbacks
    for kind, ours, theirs, exact, repeated in zip(
        ("value", "gradient"), found, stock, want, again, strict=True
    ):
        assert [(x.dtype, x.shape) for x in ours] == [(x.dtype, x.shape) for x in theirs]
        for i, (x, y, z, same) in enumerate(zip(ours, theirs, exact, repeated, strict=True)):
            check(f"{kind} {i} of {options}", x, y, z)
            assert_equal(f"{kind} {i} again", same, x)
    return found


CASES = [
    {},
    {"temperature": 0.7, "bias": False},
    {"softcap": (5.0, None), "scale": (0.25, 1.0)},
    {"softcap": (None, 4.0), "scale": (1.0, 2), "temperature": 2.0},
    {"softcap": (3.0, 30.0), "scale": (0.5, 0.0625), "bias": False},
]


@pytest.mark.parametrize("dtype", [FULL, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_values_and_gradients_are_as_exact_as_trls(options, dtype):
    options = dict(options)
    inputs = models((dtype,) * 4, bias=options.pop("bias", True))
    for beta in (0, 0.0, 0.1, 0.5, 1.0):
        found = check_against_trl(inputs, (dtype, dtype), beta=beta, **options)
        assert found[0][0].dtype == FULL


@pytest.mark.parametrize(
    "dtypes, computed, autocast",
    [
        ((FULL, FULL, HALF, HALF), (FULL, HALF), None),
        ((HALF, HALF, FULL, FULL), (HALF, FULL), None),
        ((HALF, FULL, HALF, FULL), (HALF, HALF), None),  # TRL casts the wider weight to hidden's dtype
        ((HALF, HALF, HALF, FULL), (HALF, HALF), None),  # a teacher's master weights
        ((FULL, HALF, FULL, HALF), (FULL, FULL), None),
        ((FULL, FULL, FULL, FULL), (HALF, HALF), HALF),  # bf16=True over fp32 weights
        ((HALF, FULL, FULL, HALF), (HALF, HALF), HALF),
    ],
    ids=str,
)
def test_each_model_is_computed_in_trls_dtype(dtypes, computed, autocast):
    """The last digits of a product of a wider dtype would show here, and so would logits in bf16."""
    for beta in (0.0, 0.5, 1.0):
        found = check_against_trl(models(dtypes), computed, autocast, beta=beta)
        assert [x.dtype for x in found[1]] == [dtypes[0], dtypes[1], dtypes[1]]


def test_a_frozen_head_and_a_frozen_backbone():
    """As a student with LoRA has them: only hidden states get a gradient; or the head alone is trained."""
    for trained in ((0,), (1,), (2,), (1, 2)):
        inputs = models()
        for i in range(3):
            inputs[i].requires_grad_(i in trained)
        stock = run(inputs)
        with rlkernel.patch_trl(vllm=False) as patch:
            found = run(inputs)
        assert len(found[1]) == len(trained) and patch.calls == {NAME: 1} and not patch.fallbacks
        for ours, theirs in zip(itertools.chain(*found), itertools.chain(*stock), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def loss_of(inputs, mask, beta=0.5, items=None):
    """TRL's loss, which hands its function all rows on a CPU, with the gradients."""
    student, weight, bias, teacher, teacher_weight, teacher_bias = inputs
    loss, entropy, valid = distillation._chunked_divergence_loss(
        student[None], teacher[None], weight, teacher_weight, mask, beta, items, bias, teacher_bias,
        temperature=0.8,
    )  # fmt: skip
    return [loss.detach(), entropy, valid], list(torch.autograd.grad(loss, inputs[:3]))


def test_the_loss_with_a_mask():
    inputs = models()
    mask = (torch.arange(ROWS) % 3 > 0).long()[None]
    for marked, items in ((mask, None), (mask, torch.tensor(60.0)), (mask * 0, None)):
        stock = loss_of(inputs, marked, items=items)
        with rlkernel.patch_trl(vllm=False) as patch:
            found = loss_of(inputs, marked, items=items)
        assert patch.calls == {NAME: 1} and not patch.fallbacks
        torch.testing.assert_close(found, stock, rtol=2e-5, atol=1e-6)
        assert marked.any() or not any(g.any() for g in found[1])


def test_no_row_at_all():
    """On a GPU TRL hands over the rows of completions alone, which may be none."""
    inputs = [x[:0].detach().requires_grad_() if i % 3 == 0 else x for i, x in enumerate(models())]
    inputs[3] = inputs[3].detach()
    with rlkernel.patch_trl(vllm=False) as patch:
        (divergence, entropy), grads = run(inputs)
    assert patch.calls == {NAME: 1} and divergence.shape == entropy.shape == (0,)
    assert [g.shape for g in grads] == [x.shape for x in inputs[:3]] and not any(g.any() for g in grads)


LEFT = {
    "teacher_hidden requires a gradient": lambda x: x[3].requires_grad_(),
    "student_hidden is torch.float64": lambda x: x.__setitem__(0, x[0].detach().double().requires_grad_()),
    "teacher_weight is torch.float64": lambda x: x.__setitem__(4, x[4].detach().double()),
    # of a larger vocabulary TRL leaves out what the student has not
    "student_weight and teacher_weight are of two vocabularies": lambda x: x.__setitem__(
        slice(4, 6), [torch.cat([y, y[:5]]).detach() for y in x[4:]]
    ),
    "the hidden states are of two dtypes, and a weight is wider than its own": lambda x: x.__setitem__(
        3, x[3].to(HALF)
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_to_trl(reason):
    inputs = models()
    LEFT[reason](inputs)
    stock = run(inputs)
    with rlkernel.patch_trl(vllm=False) as patch, pytest.warns(UserWarning, match=f"{NAME} to TRL: {reason}"):
        found = run(inputs)
    assert patch.fallbacks == {f"{NAME}: {reason}": 1} and not patch.calls
    for ours, theirs in zip(itertools.chain(*found), itertools.chain(*stock), strict=True):
        assert_equal(reason, ours, theirs)


@pytest.mark.parametrize(
    "reason, options",
    {
        "beta is no number in": {"beta": 1.5},
        "the temperature is no number above 0": {"temperature": -1.0},
        "student_logit_scale is no finite number": {"scale": (float("inf"), 1.0)},
        "teacher_final_logit_softcapping is no number above 0": {"softcap": (None, 0.0)},
    }.items(),
)
def test_numbers_that_are_left_to_trl(reason, options):
    inputs = models()
    outcomes = []
    for patched in (False, True):
        with contextlib.ExitStack() as stack:
            if patched:
                patch = stack.enter_context(rlkernel.patch_trl(vllm=False))
                stack.enter_context(pytest.warns(UserWarning, match=reason))
            try:
                outcomes.append(run(inputs, **options))
            except ValueError as error:  # of the logarithm of 1 - beta
                outcomes.append(str(error))
    assert patch.fallbacks.total() == 1 and not patch.calls
    assert str(outcomes[0]) == str(outcomes[1])


def test_under_inference_a_teacher_that_requires_a_gradient_is_served():
    inputs = models()
    inputs[3].requires_grad_()
    with torch.no_grad(), rlkernel.patch_trl(vllm=False) as patch:
        divergence, _ = call(inputs, **PLAIN)
    assert patch.calls == {NAME: 1} and not divergence.requires_grad
    torch.testing.assert_close(divergence, call(inputs, **PLAIN)[0].detach(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("shared", [False, True], ids=["two heads", "one head"])
def test_partitioned_heads_are_gathered_again_for_backward(monkeypatch, shared):
    """ZeRO-3 in small: parameters whose memory is there only inside the gathering context."""
    gathers = []
    gather = partitioned.gathering(gathers)
    inputs = models()
    if shared:
        inputs[3], inputs[4:] = torch.randn(ROWS, 24), inputs[1:3]
    want = run(inputs)
    monkeypatch.setattr(trl_places.utils, "maybe_gather_lm_head_ctx", gather)
    parameters = {id(p): p for i, p in enumerate(inputs) if i % 3}.values()
    for p in parameters:
        p.ds_status, p.ds_shape, p.full, p.data = "NOT_AVAILABLE", p.shape, p.detach().clone(), torch.empty(0)
    with rlkernel.patch_trl(vllm=False) as patch:
        divergence, entropy = call(inputs, **PLAIN)
        assert patch.calls == {NAME: 1} and not any(p.numel() for p in parameters)
        assert len(gathers) == len(parameters)
        loss = (divergence * upstream_gradient(ROWS)).sum()
        grads = list(torch.autograd.grad(loss, inputs[:3]))
    assert len(gathers) > len(parameters) and not any(p.numel() for p in parameters)
    torch.testing.assert_close(([divergence.detach(), entropy], grads), want, rtol=2e-5, atol=2e-6)


def test_under_batch_invariance_rows_do_not_depend_on_others():
    inputs = models(bias=False)
    with rlkernel.patch_trl(batch_invariant=True) as patch:
        whole = call(inputs, **PLAIN)
        few = call([x[:3] if i % 3 == 0 else x for i, x in enumerate(inputs)], **PLAIN)
    assert patch.calls == {NAME: 2} and not patch.fallbacks
    for name, ours, of_all in zip(("divergence", "entropy"), few, whole, strict=True):
        assert_equal(name, ours, of_all[:3])


# What is put where

MODULES = (
    (kernels, distillation) if hasattr(distillation, NAME) else (kernels,)
)  # 1.15 imports it as it calls it


def test_it_is_replaced_and_comes_back():
    with rlkernel.patch_trl(vllm=False) as patch:
        for module in MODULES:
            assert patch.replaced[f"{module.__name__}.{NAME}"] == "rlkernel.linear_divergence"
            assert getattr(module, NAME) is not UPSTREAM
    assert all(getattr(module, NAME) is UPSTREAM for module in MODULES)


def test_another_contract_is_left_with_a_warning(monkeypatch, caplog):
    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx, student_hidden, student_weight, beta):
            return student_hidden

    for module in MODULES:
        monkeypatch.setattr(module, NAME, Other)
    monkeypatch.setattr(logging.getLogger("rlkernel.patch_trl"), "disabled", False)
    with caplog.at_level(logging.WARNING, "rlkernel.patch_trl"), rlkernel.patch_trl(vllm=False) as patch:
        assert all(getattr(module, NAME) is Other for module in MODULES)
        assert not [path for path in patch.replaced if path.endswith(NAME)]
    want = (
        f"leaves it to TRL: {kernels.__name__}.{NAME} must take (student_hidden, student_weight, student_bias"
    )
    assert want in caplog.text


def test_traces_without_graph_breaks():
    inputs = models()
    with rlkernel.patch_trl(vllm=False) as patch:
        eager = run(inputs)
        traced = torch.compile(lambda *x: call(x, **PLAIN), backend="aot_eager", fullgraph=True)(*inputs)
        (traced[0] * upstream_gradient(ROWS)).sum().backward()
    assert patch.calls == {NAME: 1} and not patch.fallbacks  # of the eager call: tracing counts nothing
    found = [traced[0].detach(), traced[1]], [x.grad for x in inputs[:3]]
    torch.testing.assert_close(found, tuple(eager))
