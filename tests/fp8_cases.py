"""FP8 heads for the tests of linear_logprob: weights as engines quantise them, and the error budget."""

import torch
from accuracy import check
from backends import running
from linear_logprob_cases import with_bias
from logprob_cases import upstream_like

import rlkernel
from rlkernel.reference.linear_logprob import make_inputs

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}
LAYOUTS = ("tensor", "rows", "blocks")
INPUTS = {
    "wide": None, "token": "token", "group": "group", "group_ue8m0": "group_ue8m0",
    "static": torch.tensor(0.0071),
}  # fmt: skip


def make(N, H, V, layout="blocks", *, dtype=torch.bfloat16, fp8=torch.float8_e4m3fn, block=(16, 32), **more):
    """Keyword arguments of ``linear_logprob``, with a bias; rows of the weight differ in size."""
    inputs = with_bias(make_inputs(N, H, V, dtype=torch.float32, **more))
    weight = inputs["weight"] * torch.logspace(-1, 0.5, V)[torch.randperm(V, generator=_seed())][:, None]
    weight = weight * torch.logspace(-0.5, 0.5, H)
    inputs["weight"], inputs["weight_scale"] = quantise(weight, layout, fp8, block)
    for name in ("hidden", "bias"):
        inputs[name] = inputs[name].to(dtype)
    return inputs | {"weight_block_size": block}


def quantise(weight, layout, fp8=torch.float8_e4m3fn, block=(128, 128)):
    """(FP8 weight, its scales) of one of LAYOUTS."""
    V, H = weight.shape
    R, K = {"tensor": (V, H), "rows": (1, H), "blocks": block}[layout]
    padded = torch.nn.functional.pad(weight, (0, -H % K, 0, -V % R)).view(-(-V // R), R, -(-H // K), K)
    scale = padded.abs().amax((1, 3)) / LARGEST[fp8]
    every = scale.repeat_interleave(R, 0)[:V].repeat_interleave(K, 1)[:, :H]
    codes = (weight / every).clamp(-LARGEST[fp8], LARGEST[fp8]).to(fp8)
    return codes, {"tensor": scale[0, 0], "rows": scale[:, 0], "blocks": scale}[layout]


def run(backend, inputs, upstream=None, needs=("hidden", "bias"), **options):
    """Outputs, and the gradients of ``needs``, on one backend."""
    leaves = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    wanted = [leaves[name].requires_grad_() for name in needs if name in leaves]
    with running(backend):
        out = rlkernel.linear_logprob(**leaves, **options)
        if upstream is None:
            return out, []
        pairs = [(o, g) for o, g in zip(out, upstream, strict=True) if o is not None and g is not None]
        return out, list(torch.autograd.grad(sum((o * g.to(o.dtype)).sum() for o, g in pairs), wanted))


def check_against_fp64(backend, inputs, upstream=None, needs=("hidden", "bias"), *, ours=None, **options):
    """Within twice of what the reference loses in this dtype; ``ours``: what is judged, in the place of the
    backend's own."""
    upstream = upstream_like(inputs["target_ids"]) if upstream is None else upstream
    options = {"temperature": 0.7, "return_entropy": True} | options
    truth, true_grads = run("reference", widened(inputs), upstream, needs, **options)
    torchs, torch_grads = run("reference", inputs, upstream, needs, **options)
    got, grads = ours or run(backend, inputs, upstream, needs, **options)
    size = max(1.0, truth.lse.abs().max().item()) if truth.lse.numel() else 1.0  # of logits
    for name, a, b, c in zip(got._fields, got, torchs, truth, strict=True):
        if a is not None:
            check(name, a, b, c, magnitude=size)
    named = [name for name in needs if name in inputs]
    for name, a, b, c in zip(named, grads, torch_grads, true_grads, strict=True):
        assert a.dtype == inputs[name].dtype
        check(f"grad of {name}", a, b, c)


def widened(inputs):
    """With hidden and bias in fp64: FP8 and its scales are what they are."""
    return inputs | {name: inputs[name].double() for name in ("hidden", "bias") if name in inputs}


def _seed():
    return torch.Generator().manual_seed(5)
