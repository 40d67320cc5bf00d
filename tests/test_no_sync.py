"""Ops never look at a value on the host: what a CUDA graph asks for, seen without a GPU.

Every operator that hands a value to Python, or whose output's shape is data, is refused while the op runs,
also on CPU tensors as it would on a GPU: ``debug.may_read`` says no.
"""

import contextlib
import functools

import pytest
import torch
from backends import of, running
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel.drivers import linear_policy_loss_plan, linear_tiles
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.reference import (
    gae,
    group_advantages,
    kl_shaped_rewards,
    layer_norm,
    linear_divergence,
    linear_logprob,
    linear_policy_loss,
    logprob,
    matmul,
    policy_loss,
    preference_loss,
    rms_norm,
    rotary,
    sample_linear,
    sampling,
    swiglu,
    value_loss,
    whiten,
)
from rlkernel.runtime import debug, gpu

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten.unique_dim,
    aten._unique2, aten.unique_consecutive, aten.repeat_interleave, aten.allclose,
}  # fmt: skip


class _NoReads(TorchDispatchMode):
    """``methods`` pass no operator on a CPU; Triton's interpreter calls ``cpu`` and ``numpy`` itself."""

    def __init__(self, methods=("tolist",)):
        super().__init__()
        self.methods = {name: getattr(torch.Tensor, name) for name in methods}

    def __enter__(self):
        for name in self.methods:
            setattr(torch.Tensor, name, None)
        return super().__enter__()

    def __exit__(self, *exception):
        for name, method in self.methods.items():
            setattr(torch.Tensor, name, method)
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        indexed_by_mask = func.overloadpacket in (aten.index, aten.index_put_) and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if func.overloadpacket in READS or indexed_by_mask:
            if (
                func.overloadpacket is aten.repeat_interleave
                and (kwargs or {}).get("output_size") is not None
            ):
                return func(*args, **kwargs)
            raise AssertionError(f"{func} reads a value on the host")
        return func(*args, **(kwargs or {}))


def _differentiated(function, inputs, leaf, **options):
    inputs[leaf].requires_grad_()
    out = function(**inputs, **options)
    torch.autograd.grad(out.loss, inputs[leaf])


def _grouped(device, estimator="grpo"):
    inputs = group_advantages.make_inputs(6, 4, device=device)
    rlkernel.group_advantages(**{**inputs, "estimator": estimator})


def _policy_losses(device):
    for loss_type in ("ppo", "gmpo", "vespo", "clip_cov", "kl_cov"):
        _differentiated(
            rlkernel.policy_loss,
            policy_loss.make_inputs(5, 70, extras=True, device=device),
            "logprobs",
            loss_type=loss_type,
            importance_sampling_level="sequence" if loss_type == "gmpo" else "token",
            correction="seq_tis",
            beta=0.1,
        )


def _samples(device):
    inputs = sampling.make_inputs(4, 300, device=device)
    rows = {"temperature": [0.0, 0.7, 1.0, 2.0], "top_k": [5, 0, 40, 9]}
    rows = {name: torch.tensor(values, device=device) for name, values in rows.items()}
    options = {"return_entropy": True, "return_rank": True, "return_support": 64, "top_logprobs": 2}
    history = torch.tensor([[1, 2], [3, -1], [4, 4], [-1, -1]], device=device)
    penalties = rlkernel.Penalties(history, presence=0.5)
    bitmask = torch.full((4, 10), -1, dtype=torch.int32, device=device)
    out = rlkernel.sample(**inputs, **rows, **options, top_p=0.9, penalties=penalties, token_bitmask=bitmask)
    rlkernel.sample(inputs["logits"], temperature=0.8, out=out, **options)  # and seeds of torch's own
    bias = torch.zeros(300, device=device)
    rlkernel.score_tokens(inputs["logits"], out.token_ids, min_p=0.1, logit_bias=bias)
    band = {"typical_p": 0.9, "xtc_probability": torch.tensor([0.0, 0.5, 1.0, 1.0], device=device)}
    given = torch.tensor([3, 5], device=device)
    rlkernel.sample(**inputs, **band, ranking="processed", logprob_token_ids=given)


def _linear_samples(device):
    inputs = sample_linear.make_inputs(3, 16, 300, device=device)
    for filters in ({}, {"top_p": 0.9, "return_support": 9, "return_rank": True, "top_logprobs": 2}):
        rlkernel.sample_linear(**inputs, **filters, logits_dtype=torch.bfloat16)


def _products(device):
    inputs = matmul.make_inputs(5, 70, 9, device=device)
    inputs["a"].requires_grad_()
    rlkernel.matmul(**inputs, bias=torch.zeros(9, device=device, requires_grad=True)).sum().backward()


def _norm(function, inputs):
    out = function(**{name: x.requires_grad_() for name, x in inputs.items()})
    outputs = (out,) if isinstance(out, torch.Tensor) else out
    torch.autograd.grad(sum(x.sum() for x in outputs), list(inputs.values()))


def _turned(device):
    inputs = rotary.make_inputs(1, 4, 2, 8, packed=True, device=device)
    inputs["q"].requires_grad_()
    rlkernel.rotary(**inputs, positions=torch.tensor([0, 2, 1, 1], device=device)).q.sum().backward()


CALLS = {
    "matmul": _products,
    "sampling": _samples,
    "sample_linear": _linear_samples,
    "preference_loss": lambda on: _differentiated(
        rlkernel.preference_loss, preference_loss.make_inputs(6, 70, device=on), "logprobs"
    ),
    "group_advantages": _grouped,
    "gae": lambda on: rlkernel.gae(**gae.make_inputs(5, 70, device=on)),
    "whiten": lambda on: rlkernel.whiten(**whiten.make_inputs(5, 70, device=on)),
    "kl_shaped_rewards": lambda on: rlkernel.kl_shaped_rewards(
        **kl_shaped_rewards.make_inputs(5, 70, device=on)
    ),
    "value_loss": lambda on: _differentiated(
        rlkernel.value_loss,
        value_loss.make_inputs(5, 70, clipped=True, device=on),
        "values",
        cliprange_value=0.2,
    ),
    "policy_loss": _policy_losses,
    "layer_norm": lambda on: _norm(rlkernel.layer_norm, layer_norm.make_inputs(5, 70, device=on)),
    "rotary": _turned,
    "swiglu": lambda on: _norm(rlkernel.swiglu, swiglu.make_inputs(5, 70, device=on)),
    "rms_norm": lambda on: _norm(rlkernel.rms_norm, rms_norm.make_inputs(5, 70, residual=True, device=on)),
}


@pytest.mark.parametrize("op, backend, device", [
    pytest.param(op, *pair.values, id=f"{op}-{pair.id}", marks=pair.marks) for op in CALLS for pair in of(op)
])  # fmt: skip
def test_no_value_is_read_on_the_host(op, backend, device, monkeypatch):
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)
    with running(backend), _NoReads():
        CALLS[op](device)
    assert rlkernel.last_backend(op) == ("native" if backend.startswith("emulated") else backend)


@pytest.mark.parametrize(("backend", "device"), of("logprob"))
def test_logprob_over_supports_reads_no_value(backend, device, monkeypatch):
    """Which rows have a support, and how many tokens it holds, stays on the GPU."""
    if backend == "reference":
        pytest.skip("the reference picks its entries by a mask")
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)
    inputs = logprob.make_inputs(6, 70, device=device)
    support = {
        "support_ids": torch.arange(30, device=device) % 7,
        "support_offsets": torch.tensor([0, 7, 7, 14, 14, 21, 28], device=device),
    }
    with running(backend), _NoReads():
        inputs["logits"].requires_grad_()
        out = rlkernel.logprob(**inputs, **support, return_entropy=True)
        torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), inputs["logits"])


def _divergence_results(inputs, watched):
    """Outputs and gradients of linear_divergence with and without a softcap."""
    found = []
    rows = torch.arange(11, device=inputs["hidden"].device)
    for softcap in (None, 4.0):
        leaves = {name: x.requires_grad_(not name.startswith("teacher")) for name, x in inputs.items()}
        with watched():
            out = rlkernel.linear_divergence(
                **leaves, mask=rows % 4 > 0, softcap=softcap, logit_scale=1.2, return_entropy=True
            )
        loss = (out.divergence * (rows != QUIET)).sum()
        with watched():
            grads = torch.autograd.grad(loss, [leaves["hidden"], leaves["weight"]])
        found += [out.divergence.detach(), out.entropy, *grads]
    return found


@pytest.mark.parametrize(
    ("backend", "device"), [pair for pair in of("linear_divergence") if "reference" not in str(pair)]
)
def test_rows_of_few_operations_are_not_counted_for_a_divergence(backend, device, monkeypatch):
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(8, 48))
    monkeypatch.setattr(linear_tiles, "GPU_TILE", Tile(8, 48))
    inputs = linear_divergence.make_inputs(11, 16, 70, teacher_size=9, device=device)
    with running("reference"):
        want = _divergence_results(inputs, contextlib.nullcontext)
    with running(backend):
        for name in ("hidden", "teacher_hidden"):
            inputs[name].detach()[::4] = torch.nan  # under the mask
            inputs[name].detach()[QUIET] = torch.nan
        monkeypatch.setattr(gpu, "runs_ahead", lambda device: True)
        methods = ("tolist", "cpu", "numpy") if backend == "native" else ("tolist",)
        got = _divergence_results(inputs, functools.partial(_NoReads, methods))
    for a, b in zip(got, want, strict=True):
        a, b = (x.clone() for x in (a, b))
        if a.dim() == 1:
            assert a[QUIET].isnan()
            a[QUIET] = b[QUIET] = 0
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * max(1.0, b.abs().max().item()))


QUIET = 3  # a row whose gradient is 0


def _linear_results(inputs, of_policy, watched):
    """Outputs and gradients of the ops that multiply in tiles."""
    found = []
    frozen = inputs | {"weight": inputs["weight"].clone()}
    for op, given, options in (
        ("linear_logprob", inputs, {"return_entropy": True, "softcap": 4.0}),
        ("linear_logprob", frozen, {}),
        ("linear_logprob_statistics", inputs, {}),
        ("linear_policy_loss", of_policy, {}),
        ("linear_policy_loss", of_policy, {"importance_sampling_level": "sequence"}),
    ):
        leaves = [given["hidden"].requires_grad_()]
        if given is not frozen:
            leaves.append(given["weight"].requires_grad_())
        with watched():
            out = getattr(rlkernel, op)(**given, **options)
        upstream = (torch.arange(11, device=leaves[0].device) != QUIET).float() if len(given) == 3 else 1.0
        loss = sum((x * upstream).sum() for x in out if x is not None and x.requires_grad)
        # that of a policy loss is there already, and on a CPU it looks whether it is multiplied by 1
        with watched() if op != "linear_policy_loss" else contextlib.nullcontext():
            found += [(out.logprobs * upstream).detach(), *torch.autograd.grad(loss, leaves)]
    return found


@pytest.mark.parametrize(
    ("backend", "device"), [pair for pair in of("linear_logprob") if "reference" not in str(pair)]
)
def test_rows_of_few_operations_are_not_counted(backend, device, monkeypatch):
    """Those that are ignored or without a gradient are computed then, and whatever they hold, nothing shows
    it."""
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(8, 48))
    monkeypatch.setattr(linear_tiles, "GPU_TILE", Tile(8, 48))
    inputs = linear_logprob.make_inputs(11, 16, 70, device=device, ignored=0.4)
    of_policy = linear_policy_loss.make_inputs(2, 6, 16, 70, device=device)
    with running("reference"):
        want = _linear_results(inputs, of_policy, contextlib.nullcontext)
    with running(backend):
        ignored = inputs["target_ids"] == -100
        assert not ignored[QUIET]
        ignored[QUIET] = True
        inputs["hidden"].detach()[ignored] = torch.nan
        of_policy["hidden"].detach()[of_policy["mask"] == 0] = torch.inf
        assert inputs["hidden"].isnan().any() and of_policy["hidden"].isinf().any()
        monkeypatch.setattr(gpu, "runs_ahead", lambda device: True)
        monkeypatch.setattr(linear_policy_loss_plan.Resident, "leaves_out", False)
        methods = ("tolist", "cpu", "numpy") if backend == "native" else ("tolist",)
        got = _linear_results(inputs, of_policy, functools.partial(_NoReads, methods))
    for a, b in zip(got, want, strict=True):
        a = a.nan_to_num(0) if a.shape == (11,) else a  # the logprob of the quiet row is none
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * max(1.0, b.abs().max().item()))
        if a.shape == inputs["hidden"].shape:
            assert (a[ignored] == 0).all()


@pytest.mark.parametrize("method", ["tolist", "cpu", "numpy"])
def test_a_method_that_reads_would_be_seen(method):
    with pytest.raises(TypeError), _NoReads((method,)):
        getattr(torch.ones(3), method)()
    assert getattr(torch.ones(2), method)()[0] == 1


READERS = [lambda x: x.sum().item(), lambda x: bool(x.any()), torch.nonzero, lambda x: x[x > 0], torch.unique]


@pytest.mark.parametrize("read", READERS)
def test_a_read_would_be_seen(read):
    with pytest.raises(AssertionError, match="reads a value"), _NoReads():
        read(torch.ones(3))
