"""Forests of prompts and completions, and what attention over them is: every sample run alone and dense.

The oracle knows no table of the layout: it numbers the rows itself and takes each sample's tokens as a list.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from accuracy import check, error
from backends import EMULATED, running, skip_unless_able
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import rlkernel
from rlkernel import dispatch
from rlkernel.calls.prefix_shared_attention import AttentionRule
from rlkernel.prefix.layout import PrefixLayout

OP = "prefix_shared_attention"


class Forest(NamedTuple):
    """Nodes, parents first; those of length 0 stand for nothing."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    completion: tuple[bool, ...]

    def layout(self) -> PrefixLayout:
        return PrefixLayout.of(*self)[0]


def groups(*sizes: tuple[int, list[int]]) -> Forest:
    """(tokens of the prompt, tokens of each of its completions) per group."""
    nodes: list[tuple[int, int, bool]] = []
    for prompt, completions in sizes:
        root = len(nodes)
        nodes += [(prompt, -1, False), *((n, root, True) for n in completions)]
    return forest(nodes)


def forest(nodes: list[tuple[int, int, bool]]) -> Forest:
    """(tokens, parent, whether it is a completion) per node."""
    return Forest(*(tuple(column) for column in zip(*nodes, strict=True)))


FORESTS = {
    "one sample": groups((7, [5])),
    "one row": groups((0, [1])),
    "no prompt": groups((0, [4, 1, 6])),
    "ragged": groups((4, [4, 1, 9]), (1, [2, 2]), (13, [5, 1, 1, 8])),
    "empty completions": groups((5, [0, 3, 0]), (3, [0, 0]), (0, [0, 2])),
    "prompts alone": groups((6, []), (4, [3, 2]), (2, [])),
    "with and without a prompt": groups((0, [3, 2]), (9, [1, 4]), (0, [2])),
    "past tiles": groups((70, [33, 66]), (37, [64, 5])),
    "a depth of three": forest(
        [(9, -1, False), (5, 0, False), (3, 1, True), (4, 1, True), (7, 0, False), (2, 4, True)]
    ),
    "a depth of five": forest(
        [
            (6, -1, False),
            (4, 0, False),
            (3, 1, True),
            (5, 2, True),
            (2, 3, True),
            (4, 3, True),
            (1, 2, True),
            (3, 0, True),
            (8, -1, False),
            (0, 8, False),
            (4, 9, True),
            (2, 9, True),
        ]
    ),
}
LARGE = {
    "a long prompt": groups((700, [3, 5])),
    "many short completions": groups((20, [2] * 64)),
    "long stems": forest(
        [(130, -1, False), (65, 0, False), (70, 1, True), (3, 2, True), (67, 2, True), (90, 0, True)]
    ),
}
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "window 1": {"window": 1},
    "window 3": {"window": 3},
    "window 8": {"window": 8},
    "window 1000": {"window": 1000},
    "sinks": {"sinks": True},
    "all": {"scale": 0.5, "softcap": 3.0, "window": 5, "sinks": True},
}


def sequences(forest: Forest) -> tuple[list[list[int]], int]:
    """The rows of each sample's tokens, and how many: prompts, then completions, depth first."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(forest.parents):
        children.setdefault(parent, []).append(node)

    def down(node: int) -> Iterator[int]:
        for child in children.get(node, []):
            yield child
            yield from down(child)

    rows: dict[int, list[int]] = {}
    total = 0
    for part in (False, True):
        for node in down(-1):
            if forest.completion[node] == part:
                rows[node] = list(range(total, total + forest.lengths[node]))
                total += forest.lengths[node]

    def tokens(node: int) -> list[int]:
        return [] if node < 0 else tokens(forest.parents[node]) + rows[node]

    leaves = [node for node in range(len(forest.lengths)) if node not in children]
    return [tokens(node) for node in leaves if tokens(node)], total


class Result(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


def inputs_of(
    forest: Forest,
    heads=4,
    kv_heads=2,
    head_dim=16,
    *,
    dtype=torch.float32,
    device="cpu",
    sinks=False,
    seed=0,
    v_dim=None,
) -> dict[str, Any]:
    """q, k, v, grad_out, and sinks or None."""
    g = torch.Generator().manual_seed(seed)
    total = sequences(forest)[1]
    shapes = {"q": heads, "k": kv_heads, "v": kv_heads, "grad_out": heads}
    dims = dict.fromkeys(("v", "grad_out"), v_dim or head_dim)
    made = {
        n: torch.randn(total, h, dims.get(n, head_dim), generator=g).to(dtype).to(device)
        for n, h in shapes.items()
    }
    made["sinks"] = torch.randn(heads, generator=g).to(dtype).to(device) if sinks else None
    return made


def like_hugging_face(x):
    """[T, H, D] as a view of [1, H, T, D]."""
    return x.transpose(0, 1).contiguous()[None].transpose(1, 2)[0]


def rule_of(inputs, *, scale=None, softcap=None, window=None, parity="fast"):
    d = inputs["q"].shape[2]
    return AttentionRule(scale or d**-0.5, softcap or 0.0, window or 0, parity == "bitwise")


def reasons(backend, layout, inputs, **options):
    name = "native" if backend in EMULATED else backend
    rule = rule_of(inputs, **options)
    named = {"layout": layout, "rule": rule, "sinks": inputs["sinks"], "needs_grad": True}
    return dispatch.reasons(OP, *(inputs[x] for x in "qkv"), **named)[name]


def skip_unless_it_can(backend, layout, inputs, **options):
    named = {"layout": layout, "sinks": inputs["sinks"], "needs_grad": True}
    rule = rule_of(inputs, **options)
    skip_unless_able(backend, OP, *(inputs[x] for x in "qkv"), rule=rule, **named)


def run(backend: str, layout, inputs: dict[str, Any], **options) -> Result:
    """The op and its gradients on a backend."""
    q, k, v, sinks = (_leaf(inputs[name]) for name in ("q", "k", "v", "sinks"))
    with running(backend):
        out, lse = rlkernel.prefix_shared_attention(q, k, v, layout, sinks=sinks, return_lse=True, **options)
        wanted = [x for x in (q, k, v, sinks) if x is not None]
        grads = torch.autograd.grad(out, wanted, inputs["grad_out"])
    name = "native" if backend.startswith("emulated") else backend
    assert rlkernel.last_backend("prefix_shared_attention") == name
    return Result(out.detach(), lse.detach(), *grads, *[None] * (4 - len(grads)))


def _leaf(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().requires_grad_()


def truth(forest: Forest, inputs: dict[str, Any], **options) -> Result:
    """The same from every sample alone, in fp64."""
    return dense(forest, {k: None if x is None else x.double() for k, x in inputs.items()}, eager, **options)


def torchs(forest: Forest, inputs: dict[str, Any], **options) -> Result:
    """The same from every sample alone as torch does it in this dtype; shared gradients summed in fp32."""
    found = dense(forest, inputs, eager, **options)
    if inputs["sinks"] is not None or options.get("softcap"):
        return found  # the fused kernels have neither
    return dense(forest, inputs, fused, **options)._replace(lse=found.lse)


def dense(forest: Forest, inputs: dict[str, Any], attention, **options) -> Result:
    names = [name for name in ("q", "k", "v", "sinks") if inputs[name] is not None]
    wide = torch.promote_types(inputs["q"].dtype, torch.float32)
    grads = {name: torch.zeros_like(inputs[name], dtype=wide) for name in names}
    out = torch.full_like(inputs["grad_out"], torch.nan)
    lse = out.new_full(out.shape[1::-1], torch.nan, dtype=wide)
    done: set[int] = set()
    for sample in sequences(forest)[0]:
        rows = torch.tensor(sample, device=out.device)
        x = {n: _leaf(inputs[n] if n == "sinks" else inputs[n][rows]) for n in names}
        o, norm = attention(x["q"], x["k"], x["v"], x.get("sinks"), **options)
        # a shared row is one row: it has one gradient, whichever sample brings it
        new = torch.tensor([row not in done for row in sample], device=out.device)
        done.update(sample)
        out[rows], lse[:, rows] = o.detach(), norm.detach().to(lse.dtype)
        given = torch.where(new[:, None, None], inputs["grad_out"][rows], 0)
        for name, grad in zip(names, torch.autograd.grad(o, list(x.values()), given), strict=True):
            if name == "sinks":
                grads[name] += grad
            else:
                grads[name].index_add_(0, rows, grad.to(wide))
    return Result(out, lse, *grads.values(), *[None] * (4 - len(names)))


def eager(q, k, v, sinks, *, scale=None, softcap=None, window=None, **_):
    n, heads, d = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (d**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    back = torch.arange(n, device=q.device)[:, None] - torch.arange(n, device=q.device)
    seen = (back >= 0) & (back < (window or n))
    scores = scores.masked_fill(~seen, -torch.inf).to(torch.promote_types(q.dtype, torch.float32))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, n, 1)], 2)
    p = scores.softmax(2)[..., :n].to(q.dtype)
    return torch.einsum("hij,jhd->ihd", p, v), scores.logsumexp(2)


def fused(q, k, v, sinks, *, scale=None, window=None, **_):
    n = len(q)
    seen = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    mask = {"attn_mask": seen.triu(1 - window)} if window else {"is_causal": True}
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, **mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1), q.new_zeros(q.shape[1:3], dtype=torch.float32)


def check_against_dense(
    backend: str, forest: Forest, inputs: dict[str, Any], layout=None, **options
) -> Result:
    got = run(backend, forest.layout() if layout is None else layout, inputs, **options)
    want = truth(forest, inputs, **options)
    exact = inputs["q"].dtype == torch.float64
    theirs = None if exact else torchs(forest, inputs, **options)
    magnitudes = beside(inputs, want, options.get("scale")) if not exact else {}
    for i, name in enumerate(Result._fields):
        if want[i] is None:
            assert got[i] is None
        elif exact:
            assert got[i].dtype == torch.float64
            size = max(1.0, want[i].abs().max().item()) if want[i].numel() else 1.0
            assert (wrong := error(got[i], want[i])) <= 1e-11 * size, f"{name}: {wrong:.3e} from dense"
        else:
            check(name, got[i], theirs[i], want[i], magnitude=magnitudes.get(name, 0.0))
    return got


def beside(inputs: dict[str, Any], want: Result, scale: float | None) -> dict[str, float]:
    """Gradients that are differences, in fp32, of numbers larger than themselves: how large those are.

    ``check`` counts in units of the inputs' dtype; a backend has these differences in fp32 for halves too.
    """
    delta = (want.out * inputs["grad_out"]).abs().sum(2)  # dq and dk sum p (dp - delta)
    largest = delta.max().item() * (scale or inputs["q"].shape[2] ** -0.5)
    found = {"dq": largest * inputs["k"].abs().max().item(), "dk": largest * inputs["q"].abs().max().item()}
    # a weight exp(score - lse) is off by what these two are off by; scores are of the size of 2 at least
    sizes = [x.abs().max().item() if x.numel() else 0.0 for x in (want.lse, want.dv)]
    found["dv"] = max(2.0, sizes[0]) * sizes[1]
    if inputs["sinks"] is not None:
        gap = inputs["sinks"].double()[:, None] - want.lse  # dsinks sums exp(gap) delta
        found["dsinks"] = (gap.exp() * (1 - gap) * delta.T).sum(1).max().item()
    units = torch.finfo(torch.float32).eps / torch.finfo(inputs["q"].dtype).eps
    return {name: size * units for name, size in found.items()}
