# ruff: noqa: B008, E501 - a table: a line for each operation
"""``batch_invariant(strict=True)`` over what models and trainers call of torch: no operation passes silently
whose bits follow the batch.  Each is alone and in a batch the same, or refused."""

import pytest
import torch
import torch.nn.functional as F

import rlkernel

g = torch.Generator().manual_seed(0)
ROWS = torch.randn(40, 300, generator=g) * 3
WEIGHT, VECTOR, BIAS, KERNEL = (torch.randn(n, generator=g) for n in ((77, 300), (300,), (77,), (8, 6, 5)))
torch.manual_seed(0)
MODULES = {
    "multihead": torch.nn.MultiheadAttention(30, 3, batch_first=True).eval(),
    "encoder": torch.nn.TransformerEncoderLayer(30, 3, 64, batch_first=True).eval(),
    "lstm": torch.nn.LSTM(30, 20, batch_first=True),
}


def cube(x):
    return x.view(len(x), 6, 50)


def square(x):
    return x[:, :36].view(-1, 6, 6)


def heads(x):
    return x.view(len(x), 3, 10, 10)


def pairs(x):
    return torch.view_as_complex(x.view(len(x), 150, 2))


def classes(x):
    return torch.zeros(len(x), dtype=torch.int64)


def nine(x):
    return torch.zeros(len(x), 9, dtype=x.dtype), 1, x.detach().abs().long() % 9, x


POSITIVE = ["log", "log2", "log10", "sqrt", "rsqrt", "lgamma", "digamma", "log1p"]
ELEMENTWISE = [
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "ceil",
    "cos",
    "cosh",
    "deg2rad",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "frac",
    "i0",
    "neg",
    "reciprocal",
    "round",
    "sgn",
    "sigmoid",
    "sign",
    "sin",
    "sinc",
    "sinh",
    "square",
    "tan",
    "tanh",
    "trunc",
]
ACTIVATIONS = [
    "celu",
    "elu",
    "gelu",
    "glu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "logsigmoid",
    "mish",
    "relu",
    "relu6",
    "selu",
    "silu",
    "softplus",
    "softshrink",
    "softsign",
    "tanhshrink",
    "normalize",
]
SPECIAL = ["entr", "erfcx", "i0e", "i1", "i1e", "log_ndtr", "ndtr", "ndtri", "bessel_j0"]
ALONG = [
    "sum",
    "mean",
    "prod",
    "amax",
    "logsumexp",
    "var",
    "std",
    "median",
    "nanmean",
    "nansum",
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "softmax",
    "log_softmax",
    "argmax",
    "cummax",
    "norm",
]
BOTH = ["atan2", "hypot", "logaddexp", "logaddexp2", "copysign", "fmod", "remainder", "xlogy", "maximum"]
TABLE = {
    **{n: (lambda x, f=getattr(torch, n): f(x.abs() + 0.1)) for n in POSITIVE},
    **{n: (lambda x, f=getattr(torch, n): f(x / 9)) for n in ELEMENTWISE},
    **{
        f"{n}_": (lambda x, n=n: getattr(x / 9, f"{n}_")())
        for n in ("exp", "sinh", "tanh", "erf", "sigmoid", "atan")
    },
    **{n: getattr(F, n) for n in ACTIVATIONS},
    **{f"special.{n}": (lambda x, f=getattr(torch.special, n): f(x / 9)) for n in SPECIAL},
    **{
        f"{n} of {d}": (lambda x, f=getattr(torch, n), d=d: f(cube(x / 3), dim=d))
        for n in ALONG
        for d in (-1, 1)
    },
    **{
        f"{n} of columns": (lambda x, f=getattr(torch, n): f(x.t(), dim=0))
        for n in ("sum", "mean", "amax", "norm")
    },
    **{n: (lambda x, f=getattr(torch, n): f(x, x.abs().flip(1) + 0.1)) for n in BOTH},
    "elu in place": lambda x: F.elu(x * 1, inplace=True),
    "softmax of columns": lambda x: x.t().softmax(0).t(),
    "cumsum of columns": lambda x: x.t().cumsum(0).t(),
    "norm of order 3": lambda x: torch.linalg.vector_norm(x, 3, -1),
    "norm of matrices": lambda x: torch.linalg.matrix_norm(cube(x)),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "cdist": lambda x: torch.cdist(x, WEIGHT.to(x.dtype)),
    "cosine_similarity": lambda x: F.cosine_similarity(x, VECTOR.to(x.dtype)[None], -1),
    "bilinear": lambda x: F.bilinear(x[:, :20], x[:, 20:40], torch.ones(5, 20, 20, dtype=x.dtype)),
    "linear": lambda x: F.linear(x, WEIGHT.to(x.dtype), BIAS.to(x.dtype)),
    "einsum of rows": lambda x: torch.einsum("md,nd->mn", x, WEIGHT.to(x.dtype)),
    "einsum of heads": lambda x: torch.einsum("mhd,mkd->mhk", cube(x), cube(x)),
    "einsum of two": lambda x: torch.einsum("mhd,nhd->mn", cube(x), WEIGHT.view(77, 6, 50).to(x.dtype)),
    "einsum of pairs": lambda x: torch.einsum("md,md->m", x, x),
    "tensordot": lambda x: torch.tensordot(cube(x), WEIGHT.t().reshape(6, 50, 77).to(x.dtype), 2),
    "vecdot": lambda x: torch.linalg.vecdot(x, x),
    "mv": lambda x: torch.mv(x, VECTOR.to(x.dtype)),
    "matmul of heads": lambda x: heads(x) @ heads(x),
    "baddbmm": lambda x: torch.baddbmm(square(x), cube(x), cube(x).mT),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1, value=0.3),
    "lerp": lambda x: torch.lerp(x, x.flip(1), x.sigmoid()),
    **{f"power {e}": (lambda x, e=e: (x.abs() + 0.1) ** e) for e in (-1, -0.5, 0.5, 1.7, 2, 3)},
    "power of rows": lambda x: x.abs() ** (x / 9).abs(),
    "power of a number": lambda x: 10000 ** (x / 30),
    "layer_norm": lambda x: F.layer_norm(x, (300,)),
    "layer_norm of two": lambda x: F.layer_norm(cube(x), (6, 50)),
    "rms_norm": lambda x: F.rms_norm(x, (300,)),
    "group_norm": lambda x: F.group_norm(cube(x), 3),
    "instance_norm": lambda x: F.instance_norm(cube(x)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm, known": lambda x: F.batch_norm(x, VECTOR.to(x.dtype), VECTOR.abs().to(x.dtype)),
    "local_response_norm": lambda x: F.local_response_norm(cube(x), 3),
    "conv1d": lambda x: F.conv1d(cube(x), KERNEL.to(x.dtype)),
    "conv1d of groups": lambda x: F.conv1d(cube(x), KERNEL[:6, :1].to(x.dtype), groups=6),
    "conv2d": lambda x: F.conv2d(cube(x)[:, None], KERNEL[:4, None, :3, :3].to(x.dtype)),
    "conv_transpose1d": lambda x: F.conv_transpose1d(cube(x), KERNEL[:6, :3].to(x.dtype)),
    "unfold": lambda x: F.unfold(cube(x)[:, None], (3, 3)),
    "avg_pool1d": lambda x: F.avg_pool1d(cube(x), 3),
    "avg_pool2d": lambda x: F.avg_pool2d(cube(x)[:, None], 3),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(cube(x), 7),
    "lp_pool1d": lambda x: F.lp_pool1d(cube(x).abs(), 2, 3),
    "interpolate": lambda x: F.interpolate(cube(x), scale_factor=1.7, mode="linear"),
    "cross_entropy": lambda x: F.cross_entropy(x, classes(x), reduction="none"),
    "kl_div": lambda x: F.kl_div(x, x.softmax(-1), reduction="none").sum(-1),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid(), reduction="none"),
    "huber_loss": lambda x: F.huber_loss(x, x.flip(1), reduction="none"),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x / 9, x.flip(1), reduction="none"),
    "gather": lambda x: x.gather(1, nine(x)[2]),
    "scatter_add": lambda x: nine(x)[0].scatter_add(*nine(x)[1:]),
    **{
        f"scatter_reduce {how}": (lambda x, how=how: nine(x)[0].scatter_reduce(*nine(x)[1:], how))
        for how in ("sum", "mean", "prod", "amax")
    },
    "index_add": lambda x: nine(x)[0].index_add(1, torch.arange(300) % 9, x),
    "index_add of rows": lambda x: torch.zeros_like(x).index_add(0, torch.arange(len(x)), x),
    "index_put": lambda x: nine(x)[0].index_put(
        (torch.arange(len(x))[:, None], torch.arange(300) % 9), x, accumulate=True
    ),
    "embedding_bag": lambda x: (
        F.embedding_bag(nine(x)[2][:, :9], WEIGHT.to(x.dtype), mode="mean") + x[:, :1] * 0
    ),
    "topk": lambda x: x.topk(9),
    "sort": lambda x: x.sort(-1),
    "quantile": lambda x: x.float().quantile(0.3, dim=-1),
    "rfft": lambda x: torch.fft.rfft(x.float()).real,
    "det": lambda x: torch.linalg.det(square(x).float()),
    "inv": lambda x: torch.linalg.inv(square(x).float()),
    "solve": lambda x: torch.linalg.solve(square(x).float(), x[:, 36:42].float()),
    "qr": lambda x: torch.linalg.qr(square(x).float())[1],
    "svdvals": lambda x: torch.linalg.svdvals(square(x).float()),
    "matrix_exp": lambda x: torch.matrix_exp(square(x) / 30),
    "complex product": lambda x: torch.view_as_real(
        pairs(x.float()) * torch.polar(torch.ones(150), torch.arange(150.0))
    ),
    "complex abs": lambda x: pairs(x.float()).abs(),
    "complex sum": lambda x: torch.view_as_real(pairs(x.float()).sum(-1)),
    "complex exp": lambda x: torch.view_as_real((pairs(x.float()) / 9).exp()),
    "polar": lambda x: torch.view_as_real(torch.polar(x.float().abs(), x.float())),
    "fp64 sum": lambda x: x.double().sum(-1),
    "fp64 exp": lambda x: x.double().exp(),
    "share of a mask": lambda x: (x > 0).float().mean(-1),
    "attention": lambda x: F.scaled_dot_product_attention(*[heads(x)] * 3, is_causal=True),
    "attention, narrower values": lambda x: F.scaled_dot_product_attention(
        heads(x), heads(x), heads(x)[..., :7]
    ),
    "attention, learnt bias": lambda x: F.scaled_dot_product_attention(
        *[heads(x)] * 3,
        attn_mask=square(x)[:1, :1, :1].detach().requires_grad_() * torch.zeros(10, 10, dtype=x.dtype),
    ),
    "multihead": lambda x: MODULES["multihead"](*[x.float().view(len(x), 10, 30)] * 3),
    **{n: (lambda x, n=n: MODULES[n](x.float().view(len(x), 10, 30))) for n in ("encoder", "lstm")},
    "_foreach_exp": lambda x: torch._foreach_exp([x])[0],
}


def tensors(found):
    if isinstance(found, torch.Tensor):
        return [torch.view_as_real(found) if found.is_complex() else found]
    return [x for one in found for x in tensors(one)] if isinstance(found, (tuple, list)) else []


def gradient(run):
    def found(x):
        x = x.detach().requires_grad_()
        outs = [y for y in tensors(run(x)) if y.requires_grad]
        return torch.autograd.grad(outs, x, [torch.full_like(y, 0.37) for y in outs]) if outs else ()

    return found


def same(a, b):
    return bool(((a == b) | (a != a) & (b != b)).all())


def judged(run, x):
    """ "equal", "refused" or "differs"."""
    try:
        whole = tensors(run(x))
        for first, count in ((0, 1), (5, 2), (3, 17)):
            for part, all_rows in zip(tensors(run(x[first : first + count].clone())), whole, strict=True):
                if len(part) == count and not same(part, all_rows[first : first + count]):
                    return "differs"
    except NotImplementedError:
        return "torch has none"  # of this dtype
    except RuntimeError as error:
        if "must be invariant inside" not in str(error):
            raise
        return "refused"
    return "equal"


@pytest.mark.parametrize("of", ["outputs", "gradients"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_is_equal_or_refused(dtype, of):
    verdicts = {}
    with rlkernel.batch_invariant():
        for name, run in TABLE.items():
            verdicts[name] = judged(run if of == "outputs" else gradient(run), ROWS.to(dtype))
    assert len(verdicts) > 150
    assert not [name for name, verdict in verdicts.items() if verdict == "differs"]
    served = {"linear", "attention", "softmax of -1", "layer_norm", "exp", "silu", "sum of 1", "scatter_add"}
    assert {verdicts[name] for name in served} == {"equal"}


def test_what_passes_silently_is_found(monkeypatch):
    def by_size(x):
        return x.sum(-1) if len(x) > 2 else (x * (1 + 2**-20)).sum(-1)

    assert judged(by_size, ROWS) == "differs" and judged(lambda x: x * 2, ROWS) == "equal"
