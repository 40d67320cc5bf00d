"""Forests of segments, attention over their whole matrix of scores, and what plans visit of it."""

import math

import torch
from accuracy import check
from hypothesis import strategies as st
from prefix_cases import Result, beside

from rlkernel.calls.prefix_shared_attention import AttentionCall, AttentionRule, OutGrads
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.triton_ops import prefix_shared_attention as triton_op

PLAIN = AttentionRule(0.3, 0.0, 0, False)


def forest(*segments):
    lengths, parents, completion = zip(*segments, strict=True) if segments else ((), (), ())
    return PrefixLayout.of(lengths, parents, [bool(c) for c in completion])[0]


def visible(layout, window=0):
    """[T, T]: whether row i sees row j."""
    first, last, pos = layout.row_tables()
    seen = (first[None] <= first[:, None]) & (first[:, None] < last[None])
    back = pos[:, None] - pos[None]
    return seen & (back >= 0) & (back < (window or layout.total + 1))


def dense(q, k, v, layout, rule, sinks=None):
    """Attention over the whole matrix of scores, in the dtype of the inputs."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.mT * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~visible(layout, rule.window), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype)[:, None, None].expand(-1, len(q), 1)], 2)
    weights = scores.softmax(2)[..., : len(q)]
    return (weights @ v).transpose(0, 1), scores.logsumexp(2)


def make(layout, heads, kv_heads, head_dim, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(layout.total)
    shapes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(layout.total, h, head_dim, generator=g).to(dtype).to(device) for h in shapes]


def run(inputs, layout, rule, sinks=None):
    *qkv, grad_out = inputs
    call = AttentionCall(*qkv, layout, rule, sinks)
    results = triton_op.one_pass(call)
    return *results, *triton_op.one_pass_backward(call, results, OutGrads(grad_out))


def run_dense(inputs, layout, rule, dtype, sinks=None):
    """On the CPU: cuBLAS refuses to run in deterministic mode, which ``poison`` needs."""
    *qkv, grad_out = (x.to("cpu", dtype) for x in inputs)
    qkv = [x.requires_grad_() for x in qkv]
    out, lse = dense(*qkv, layout, rule, None if sinks is None else sinks.cpu())
    return out.detach(), lse.detach(), *torch.autograd.grad(out, qkv, grad_out)


NAMES = ("out", "lse", "dq", "dk", "dv")


def check_accuracy(inputs, layout, rule, sinks=None):
    got = run(inputs, layout, rule, sinks)
    theirs = run_dense(inputs, layout, rule, inputs[0].dtype, sinks)
    truth = run_dense(inputs, layout, rule, torch.float64, sinks)
    magnitudes = {}
    if inputs[0].is_cuda:  # whose sums and exp2 round otherwise than those of the CPU, where torch runs
        on_cpu = {name: x.cpu() for name, x in zip(("q", "k", "v", "grad_out"), inputs, strict=True)}
        magnitudes = beside(on_cpu | {"sinks": None}, Result(*truth, dsinks=None), rule.scale)
    for name, a, b, c in zip(NAMES, got, theirs, truth, strict=True):
        check(name, a, b, c, magnitude=magnitudes.get(name, 0.0))


def check_not_finite(layout, bad, rows, device):
    """A value or a gradient that is ``bad`` reaches those who see its row, and nobody else."""
    seen = visible(layout)

    def reached(x):
        return (~x.isfinite()).any(2).any(1).cpu()

    for row in rows:
        q, k, v, grad_out = make(layout, 2, 1, 24, device=device)
        v[row] = bad
        out, lse, dq, _, _ = run((q, k, v, grad_out), layout, PLAIN)
        assert torch.equal(reached(out), seen[:, row]) and bool(lse.isfinite().all())
        assert torch.equal(reached(dq), seen[:, row])
        q, k, v, grad_out = make(layout, 2, 1, 24, device=device)
        grad_out[row] = bad
        _, _, dq, dk, dv = run((q, k, v, grad_out), layout, PLAIN)
        assert torch.equal(reached(dk), seen[row]) and torch.equal(reached(dv), seen[row])
        assert reached(dq).nonzero().flatten().tolist() == [row]


@st.composite
def forests(draw, most=23):
    n = draw(st.integers(1, 9))
    lengths, parents, completion = [], [], []
    for s in range(n):
        parents.append(draw(st.integers(-1, s - 1)))
        below_completion = parents[-1] >= 0 and completion[parents[-1]]
        completion.append(below_completion or draw(st.booleans()))
        lengths.append(draw(st.integers(0, most)))
    return PrefixLayout.of(lengths, parents, completion)[0]


def times_visited(layout, tiles, runs, window, block, transposed, keys=None):
    """[T, T] how often a pair is multiplied and not masked; plain runs must be seen in whole."""
    seen = visible(layout, window)
    seen = seen.T if transposed else seen
    times = torch.zeros_like(seen, dtype=torch.int64)
    for first, end, begin, masked, stop in tiles.tolist():
        for number in range(begin, stop):
            a, b = runs[number, :2].tolist()
            assert a < b
            if number < masked:
                assert (b - a) % block == 0 and bool(seen[first:end, a:b].all())
            elif keys is None:
                assert bool(seen[first:end, a:b].any(0).all()), "rows that nobody sees are visited"
            columns = torch.arange(a, b) if keys is None else keys[a:b]
            times[first:end, columns] += seen[first:end, columns]
    return times.T if transposed else times
