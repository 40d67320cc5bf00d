"""Every operator that ``rlkernel.batch_invariant`` serves: its cost, and whether a batch reaches its bits."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import rlkernel
from rlkernel.bench.consistency.pairs import MODES, mode_named, pairs
from rlkernel.consistency import bits
from rlkernel.consistency.invariance import SIZES

Rows = Callable[..., Tensor]


class Sizes(NamedTuple):
    """Of a small model's layers; ``counts`` are the rows of a call that is timed, ``rows`` those compared."""

    hidden: int
    inner: int
    vocabulary: int
    heads: int
    head: int
    experts: int
    counts: tuple[int, ...]
    rows: int


FULL = Sizes(1024, 3072, 32768, 16, 64, 8, (1, 16, 512), 258)
SHORT = Sizes(64, 96, 256, 2, 16, 2, (1, 4, 16), 34)


Call = Callable[[], object]
Timed = dict[str, tuple[Call, Call]]


class Operator(NamedTuple):
    """``stock`` and ``ours`` give rows [first, end); ``timed`` has both again, by the number of rows."""

    name: str
    shape: str
    rows: int
    stock: Callable[[int, int], Tensor]
    ours: Callable[[int, int], Tensor]
    timed: Timed


def measured(operator: Operator, dtype: torch.dtype, seconds: float, least: int) -> dict[str, Any]:
    """A row of the report."""
    found: dict[str, Any] = {"name": operator.name, "shape": operator.shape, "dtype": str(dtype)[6:]}
    for mode, run in zip(MODES, (operator.stock, operator.ours), strict=True):
        with mode_named(mode):
            found[mode] = unequal(run, operator.rows)
    found["cost"] = {
        label: pairs(*calls, seconds, least).summary() for label, calls in operator.timed.items()
    }
    return found


def unequal(run: Callable[[int, int], Tensor], rows: int) -> dict[str, Any]:
    """In which batch sizes rows have other bits than in the batch of all, and of how many rows."""
    whole = run(0, rows)
    changed, differ, compared = [], 0, 0
    sizes = [size for size in SIZES if size < rows]
    for size in sizes:
        wrong = 0
        for first in (0, rows - size):
            got = run(first, first + size)
            wrong += int(bits.differ(got, whole[first : first + size]).flatten(1).any(1).sum())
        differ, compared = differ + wrong, compared + 2 * size
        changed += [size] if wrong else []
    return {"sizes": len(sizes), "changed_sizes": changed, "rows": compared, "changed_rows": differ}


def cases(s: Sizes, dtype: torch.dtype) -> Iterator[Callable[[], Operator]]:
    """Each makes its tensors when it is called."""
    for make in (*_PRODUCTS, *_REDUCTIONS, *_LAYERS, *_ATTENTION, *_HEADS, *_BACKWARD):
        yield functools.partial(make, s, dtype)


def name_of(make: Any) -> str:
    return make.func.__name__.strip("_").replace("_", " ")


def _drawn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * scale).to(dtype)


def _wide(*shape: int, dtype: torch.dtype) -> Tensor:
    """Values of very different size, or the rounding of 16 bits hides how they were added."""
    g = torch.Generator().manual_seed(7)
    return (torch.randn(shape, generator=g) * 2.0 ** torch.randint(-7, 5, shape, generator=g)).to(dtype)


def _by_rows(
    name: str, shape: str, s: Sizes, draw: Callable[..., Tensor], stock: Rows, ours: Rows | None = None
) -> Operator:
    """Of a function from rows to rows; ``draw(count, values)`` makes what it takes."""
    ours = ours or stock
    compared = draw(s.rows, _wide)
    timed: Timed = {}
    for count in s.counts:
        x = draw(count, _drawn)
        timed[str(count)] = functools.partial(stock, x), functools.partial(ours, x)
    return Operator(
        name, shape, s.rows, lambda a, b: stock(compared[a:b]), lambda a, b: ours(compared[a:b]), timed
    )  # fmt: skip


def _of_width(width: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda count, values: values(count, width, dtype=dtype)


def _linear(s: Sizes, dtype: torch.dtype) -> Operator:
    weight = _drawn(s.inner, s.hidden, dtype=dtype, scale=s.hidden**-0.5)
    shape = f"K={s.hidden}, N={s.inner}"
    return _by_rows("linear", shape, s, _of_width(s.hidden, dtype), lambda x: F.linear(x, weight))


def _linear_deep(s: Sizes, dtype: torch.dtype) -> Operator:
    weight = _drawn(s.hidden, s.inner, dtype=dtype, scale=s.inner**-0.5)
    shape = f"K={s.inner}, N={s.hidden}"
    return _by_rows("linear, deep", shape, s, _of_width(s.inner, dtype), lambda x: F.linear(x, weight))


def _mm(s: Sizes, dtype: torch.dtype) -> Operator:
    weight = _drawn(s.hidden, s.hidden, dtype=dtype, scale=s.hidden**-0.5)
    shape = f"K={s.hidden}, N={s.hidden}"
    return _by_rows("mm", shape, s, _of_width(s.hidden, dtype), lambda x: torch.mm(x, weight))


def _addmm(s: Sizes, dtype: torch.dtype) -> Operator:
    weight = _drawn(s.hidden, s.hidden, dtype=dtype, scale=s.hidden**-0.5)
    bias = _drawn(s.hidden, dtype=dtype)
    shape = f"K={s.hidden}, N={s.hidden}"
    return _by_rows("addmm", shape, s, _of_width(s.hidden, dtype), lambda x: torch.addmm(bias, x, weight))


def _bmm(s: Sizes, dtype: torch.dtype) -> Operator:
    weight = _drawn(s.experts, s.hidden, s.inner // 4, dtype=dtype, scale=s.hidden**-0.5)
    shape = f"{s.experts} of K={s.hidden}, N={s.inner // 4}"

    def run(x: Tensor) -> Tensor:
        return torch.bmm(x.expand(s.experts, -1, -1), weight).transpose(0, 1)

    return _by_rows("bmm", shape, s, _of_width(s.hidden, dtype), run)


def _softmax(s: Sizes, dtype: torch.dtype) -> Operator:
    return _by_rows(
        "softmax", f"V={s.vocabulary}", s, _of_width(s.vocabulary, dtype), lambda x: x.softmax(-1)
    )


def _log_softmax(s: Sizes, dtype: torch.dtype) -> Operator:
    return _by_rows(
        "log_softmax", f"V={s.vocabulary}", s, _of_width(s.vocabulary, dtype), lambda x: x.log_softmax(-1)
    )


def _mean(s: Sizes, dtype: torch.dtype) -> Operator:
    return _by_rows(
        "mean", f"K={s.hidden}", s, _of_width(s.hidden, dtype), lambda x: x.mean(-1, keepdim=True)
    )


def _sum(s: Sizes, dtype: torch.dtype) -> Operator:
    return _by_rows("sum", f"K={s.hidden}", s, _of_width(s.hidden, dtype), lambda x: x.sum(-1, keepdim=True))


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def _rms_norm(s: Sizes, dtype: torch.dtype) -> Operator:
    weight = 1 + _drawn(s.hidden, dtype=dtype, scale=0.1)
    return _by_rows(
        "RMSNorm, as written", f"K={s.hidden}", s, _of_width(s.hidden, dtype), lambda x: _normed(x, weight)
    )


def _layer_norm(s: Sizes, dtype: torch.dtype) -> Operator:
    weight, bias = (_drawn(s.hidden, dtype=dtype, scale=x) for x in (0.1, 0.2))
    return _by_rows(
        "layer_norm",
        f"K={s.hidden}",
        s,
        _of_width(s.hidden, dtype),
        lambda x: F.layer_norm(x, (s.hidden,), weight, bias),
    )


def _rotary(s: Sizes, dtype: torch.dtype) -> Operator:
    """Angles, cosines and rotation as transformers writes them; a row's position is its first number."""
    frequencies = 1e4 ** -(torch.arange(0, s.head, 2) / s.head)

    def run(x: Tensor) -> Tensor:
        heads = x.unflatten(1, (s.heads, s.head))
        positions = (x[:, 0].float().abs() * 64).floor()
        angles = torch.cat(2 * [positions[:, None] * frequencies], 1)[:, None]
        a, b = heads.chunk(2, -1)
        return heads * angles.cos().to(x.dtype) + torch.cat((-b, a), -1) * angles.sin().to(x.dtype)

    return _by_rows(
        "rotary, as written", f"{s.heads} heads of {s.head}", s, _of_width(s.heads * s.head, dtype), run
    )


def _silu_up(s: Sizes, dtype: torch.dtype) -> Operator:
    def run(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return _by_rows("silu(gate) * up", f"K={s.inner}", s, _of_width(2 * s.inner, dtype), run)


def _embedding(s: Sizes, dtype: torch.dtype) -> Operator:
    table = _drawn(s.vocabulary, s.hidden, dtype=dtype)
    return _by_rows(
        "embedding", f"V={s.vocabulary}, K={s.hidden}", s, _ids(s), lambda x: F.embedding(x[:, 0], table)
    )


def _ids(s: Sizes) -> Callable[..., Tensor]:
    return lambda count, values: torch.randint(
        s.vocabulary, (count, 1), generator=torch.Generator().manual_seed(count)
    )


def _alike(call: Call) -> tuple[Call, Call]:
    return call, call


def _attention(s: Sizes, dtype: torch.dtype) -> Operator:
    """Rows are tokens of one sequence, behind a cache: the last one alone is a step of decoding."""
    q, k, v = (_drawn(1, s.heads, max(s.rows, s.counts[-1]), s.head, dtype=dtype) * x for x in (3, 1, 1))

    def run(first: int, end: int) -> Tensor:
        seen = torch.ones(end - first, end, dtype=torch.bool).tril(first)
        out = F.scaled_dot_product_attention(q[:, :, first:end], k[:, :, :end], v[:, :, :end], attn_mask=seen)
        return out[0].transpose(0, 1)

    def whole(count: int) -> Tensor:
        return F.scaled_dot_product_attention(
            q[:, :, :count], k[:, :, :count], v[:, :, :count], is_causal=True
        )

    count = s.counts[-1]
    timed = {str(count): _alike(functools.partial(whole, count))}
    return Operator("attention, prefill", f"{s.heads} heads of {s.head}", s.rows, run, run, timed)


def _attention_decode(s: Sizes, dtype: torch.dtype) -> Operator:
    """Rows are sequences, each with one token behind a cache."""
    keys = s.counts[-1]
    rows = min(s.rows, 66)
    q = _drawn(max(rows, s.counts[-2]), s.heads, 1, s.head, dtype=dtype, scale=3)
    k, v = (_drawn(len(q), s.heads, keys, s.head, dtype=dtype) for _ in range(2))

    def run(first: int, end: int) -> Tensor:
        return F.scaled_dot_product_attention(q[first:end], k[first:end], v[first:end])

    timed = {str(n): _alike(functools.partial(run, 0, n)) for n in s.counts[:2]}
    return Operator("attention, decode", f"{keys} keys", rows, run, run, timed)


def _target(x: Tensor, s: Sizes) -> Tensor:
    """The row's own choice, so that it goes with the row into any batch."""
    return (x[:, 0].float().abs() * 1000).long() % s.vocabulary


def _logprob(s: Sizes, dtype: torch.dtype) -> Operator:
    def stock(x: Tensor) -> Tensor:
        return x.float().log_softmax(-1).gather(1, _target(x, s)[:, None])

    def ours(x: Tensor) -> Tensor:
        return rlkernel.logprob(x, _target(x, s)).logprobs[:, None]

    return _by_rows("logprob", f"V={s.vocabulary}", s, _of_width(s.vocabulary, dtype), stock, ours)


def _linear_logprob(s: Sizes, dtype: torch.dtype) -> Operator:
    weight = _drawn(s.vocabulary, s.hidden, dtype=dtype, scale=s.hidden**-0.5)

    def stock(x: Tensor) -> Tensor:
        return F.linear(x, weight).float().log_softmax(-1).gather(1, _target(x, s)[:, None])

    def ours(x: Tensor) -> Tensor:
        return rlkernel.linear_logprob(x, weight, _target(x, s), logits_dtype=dtype).logprobs[:, None]

    return _by_rows(
        "linear_logprob", f"K={s.hidden}, V={s.vocabulary}", s, _of_width(s.hidden, dtype), stock, ours
    )


def _sample(s: Sizes, dtype: torch.dtype) -> Operator:
    """Tokens at temperature 1; a row's seed goes with it."""

    def stock(x: Tensor) -> Tensor:
        return torch.multinomial(x.float().softmax(-1), 1, generator=torch.Generator().manual_seed(0))

    def ours(x: Tensor) -> Tensor:
        return rlkernel.sample(x, seeds=_target(x, s), positions=3, return_logprobs=()).token_ids[:, None]

    def draw(count: int, values: Callable[..., Tensor]) -> Tensor:
        return values(count, s.vocabulary, dtype=dtype) / 16

    return _by_rows("sample", f"V={s.vocabulary}", s, draw, stock, ours)


def _linear_backward(s: Sizes, dtype: torch.dtype) -> Operator:
    """Rows of the input's gradient; the weight's is computed beside it, and is a sum over the batch."""
    weight = _drawn(s.inner, s.hidden, dtype=dtype, scale=s.hidden**-0.5).requires_grad_()
    upstream = _drawn(max(s.rows, s.counts[-1]), s.inner, dtype=dtype)

    def run(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        loss = (F.linear(x, weight) * upstream[:1]).sum()
        return torch.autograd.grad(loss, (x, weight))[0]

    shape = f"K={s.hidden}, N={s.inner}"
    return _by_rows("linear, forward and backward", shape, s, _of_width(s.hidden, dtype), run)


def _layer_backward(s: Sizes, dtype: torch.dtype) -> Operator:
    """RMSNorm and a gated MLP."""
    norm = (1 + _drawn(s.hidden, dtype=dtype, scale=0.1)).requires_grad_()
    up = _drawn(2 * s.inner, s.hidden, dtype=dtype, scale=s.hidden**-0.5).requires_grad_()
    down = _drawn(s.hidden, s.inner, dtype=dtype, scale=s.inner**-0.5).requires_grad_()

    def run(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        gate, value = F.linear(_normed(x, norm), up).chunk(2, -1)
        out = x + F.linear(F.silu(gate) * value, down)
        return torch.autograd.grad(out.float().pow(2).mean(-1).sum(), (x, norm, up, down))[0]

    shape = f"K={s.hidden}, N={s.inner}"
    return _by_rows("RMSNorm and MLP, forward and backward", shape, s, _of_width(s.hidden, dtype), run)


_PRODUCTS = (_linear, _linear_deep, _mm, _addmm, _bmm)
_REDUCTIONS = (_softmax, _log_softmax, _mean, _sum)
_LAYERS = (_rms_norm, _layer_norm, _rotary, _silu_up, _embedding)
_ATTENTION = (_attention, _attention_decode)
_HEADS = (_logprob, _linear_logprob, _sample)
_BACKWARD = (_linear_backward, _layer_backward)
