"""Rows, and what models do with each of them alone, for the tests of ``batch_invariant``."""

import pytest
import torch
import torch.nn.functional as F

import rlkernel
from rlkernel.consistency.invariance import SIZES

FEW = SIZES[:9]  # for what is slow
g = torch.Generator().manual_seed(0)
WEIGHT, BIAS = torch.randn(77, 300, generator=g), torch.randn(77, generator=g)
ROWS = torch.randn(260, 300, generator=g) * torch.randint(1, 40, (260, 300), generator=g)
GAIN, ROUTER, EXPERTS = (torch.randn(n, generator=g) for n in ((300,), (6, 300), (6, 20, 300)))
GAIN = 1 + GAIN / 10


@pytest.fixture(autouse=True)
def own_numbers():
    """A test's numbers are the same whichever tests ran before it."""
    g.manual_seed(1)


def rms_norm(x):
    """As models write it."""
    wide = x.float()
    return GAIN.to(x.dtype) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotary(x):
    """Three tokens a row, turned by their positions."""
    frequencies = 1 / 10000 ** (torch.arange(0, 100, 2).float() / 100)
    angles = (frequencies[None, :, None] @ torch.arange(5.0, 8.0)[None, None]).mT.repeat(1, 1, 2)
    x = x.view(len(x), 3, 100)
    turned = torch.cat([-x[..., 50:], x[..., :50]], -1)
    return (x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)).flatten(1)


def routed(x):
    """The experts of each row, two of six; ties among them."""
    weights, chosen = F.linear(x, ROUTER.to(x.dtype)).div(40).round().softmax(-1).topk(2)
    return weights / weights.sum(-1, keepdim=True), chosen


def grouped(a, b, offs):
    """torch's for what it takes; the same one by one for truth and for comparison."""
    if rlkernel.batch_invariant.is_enabled():
        return F.grouped_mm(a, b, offs=offs)
    ends = offs.tolist()
    spans = list(enumerate(zip([0, *ends], ends, strict=False)))
    if a.dim() == 2:
        return torch.cat([a[first:end] @ b[g] for g, (first, end) in spans])
    return torch.cat([a[g] @ b[:, first:end] for g, (first, end) in spans], 1)


def experts(combine):
    """Rows sorted by expert, a product for each group, and their sum by one of the ways that there are."""

    def run(x):
        weights, chosen = routed(x)
        order = chosen.flatten().argsort(stable=True)
        row = order // 2
        offs = torch.bincount(chosen.flatten(), minlength=6).cumsum(0).int()
        out = grouped(x[row], EXPERTS.to(x.dtype).mT, offs) * weights.flatten()[order, None]
        if combine == "sum":
            return out[order.argsort()].view(len(x), 2, 20).sum(1)
        if combine == "index_add":
            return torch.zeros(len(x), 20, dtype=x.dtype).index_add(0, row, out)
        return torch.zeros(len(x), 20, dtype=x.dtype).scatter_add(0, row[:, None].expand(-1, 20), out)

    return run


def grouped_apart(x):
    """[G, M, K] with columns in groups; each row of M alone."""
    a = x.view(len(x), 3, 100).transpose(0, 1).contiguous()
    offs = torch.tensor([20, 20, 77], dtype=torch.int32)
    return grouped(a, WEIGHT[:, :100].t().to(x.dtype), offs)


# each of rows [M, 300] alone: what a model does with them
FUNCTIONS = {
    "linear": lambda x: F.linear(x, WEIGHT.to(x.dtype)),
    "linear with bias": lambda x: F.linear(x, WEIGHT.to(x.dtype), BIAS.to(x.dtype)),
    # of another stride in every batch of them
    "linear of a transposed view": lambda x: (
        F.linear(x.view(len(x), 3, 100).transpose(0, 1), WEIGHT[:, :100].to(x.dtype), BIAS.to(x.dtype))
        .transpose(0, 1)
        .flatten(1)
    ),
    "addmm with factors": lambda x: torch.addmm(
        BIAS.to(x.dtype), x, WEIGHT.t().to(x.dtype), beta=2, alpha=0.5
    ),
    "bmm": lambda x: torch.bmm(x.view(len(x), 3, 100), x.view(len(x), 3, 100).mT).flatten(1),
    "baddbmm": lambda x: torch.baddbmm(x[:, :9].view(-1, 3, 3), *(x.view(-1, 3, 100), x.view(-1, 100, 3))),
    "mean": lambda x: x.mean(-1),
    "sum": lambda x: x.view(len(x), 30, 10).sum((1, 2)),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "var": lambda x: x.var(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "layer_norm": lambda x: F.layer_norm(x, (300,)),
    "rms_norm": lambda x: F.rms_norm(x, (300,)),
    **{f.__name__: f for f in (F.silu, F.gelu, torch.sigmoid, F.softplus, torch.tanh, torch.erf)},
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "rms_norm formula": rms_norm,
    "rotary": rotary,
    "swiglu": lambda x: F.silu(x[:, :150]) * x[:, 150:],
    "embedding": lambda x: F.embedding(x[:, :5].detach().abs().long() % 77, WEIGHT.to(x.dtype)).flatten(1),
    "router": lambda x: routed(x)[0],
    **{f"experts, {how}": experts(how) for how in ("sum", "index_add", "scatter_add")},
    "grouped_mm of columns": grouped_apart,
    "einsum": lambda x: torch.einsum(
        "mhd,nhd->mhn", x.view(len(x), 3, 100), WEIGHT.view(77, 3, 100).to(x.dtype)
    ),
    "exp": lambda x: (x / 100).exp(),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "angles": lambda x: torch.cat([x.cos(), x.sin()], -1),
    "attention": lambda x: F.scaled_dot_product_attention(
        *(x.view(len(x), 3, 10, 10) * s for s in (1, 0.1, 2)), is_causal=True
    ).flatten(1),
    "attention, values of another head dim": lambda x: F.scaled_dot_product_attention(
        *(x.view(len(x), 3, 10, 10)[..., :n] for n in (8, 8, 5)), is_causal=True
    ).flatten(1),
}


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
