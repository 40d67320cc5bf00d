"""Gradients of ``attention`` in the compiled kernels: bits that a sequence's own rows decide, and mutants."""

import sys

import instruction_sets
import pytest
import torch
from bitwise import assert_equal
from invariant_rows import threads
from torch import Tensor

import rlkernel
from rlkernel import PrefixLayout, native
from rlkernel.calls.attention import AttentionGrads, AttentionResults
from rlkernel.calls.paged_prefix_attention import PagedRule
from rlkernel.drivers.attention import asked
from rlkernel.native import attention as native_op

assert threads  # a fixture of the tests here
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# a tile, its ends, and several; the row's head dims are none, one and more vectors
LENGTHS = (1, 7, 64, 65, 150)
OPTIONS = {"plain": {}, "softcap": {"softcap": 3.0}, "window": {"window": 40}, "sinks": {"sinks": True}}


def make(rows, heads=4, kv_heads=2, head_dim=24, v_dim=None, dtype=torch.float32) -> list[Tensor]:
    """q, k, v and the upstream gradient; sizes differ, so that the order of a sum shows."""
    g = torch.Generator().manual_seed(rows)
    v_dim = v_dim or head_dim
    shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, v_dim), (heads, v_dim)
    found = [torch.randn(rows, *shape, generator=g) for shape in shapes]
    for x in found[2:]:
        x *= torch.tensor([2.0**-9, 1.0, 256.0])[torch.randint(3, (rows, 1, 1), generator=g)]
    return [x.to(dtype) for x in found]


def gradients(inputs, lengths=None, batch=None, **options):
    """Of packed sequences; those of q, k and v."""
    *qkv, grad = inputs
    leaves = [x.detach().requires_grad_() for x in qkv]
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-1, 2, qkv[0].shape[1])
    starts = torch.tensor([0, *lengths]).cumsum(0) if batch is None else None
    with rlkernel.use_backend("native"):
        out = rlkernel.attention(*leaves, cu_seqlens_q=starts, batch=batch, **options)
        return torch.autograd.grad(out, leaves, grad)


def surroundings(dtype):
    """(name, sequences, which of them are LENGTHS' in their order)"""
    own = [make(n, dtype=dtype) for n in LENGTHS]
    other, poison = make(33, dtype=dtype), [torch.full_like(x, torch.nan) for x in make(5, dtype=dtype)]
    yield "all together", own, range(5)
    yield "the other way round", own[::-1], range(4, -1, -1)
    yield "among others", [other, *own, other], range(1, 6)
    beside = [x for one in own for x in (poison, one)]
    yield "beside NaN", beside, range(1, 11, 2)


def check_every_batch(dtype, options):
    alone = [gradients(make(n, dtype=dtype), [n], **options) for n in LENGTHS]
    for name, sequences, which in surroundings(dtype):
        packed = [torch.cat(parts) for parts in zip(*sequences, strict=True)]
        lengths = [len(one[0]) for one in sequences]
        found = gradients(packed, lengths, **options)
        each = list(zip(*(x.split(lengths) for x in found), strict=True))
        for want, place in zip(alone, which, strict=True):
            for which_of, got, x in zip(("dq", "dk", "dv"), each[place], want, strict=True):
                assert_equal(f"{which_of} of {len(x)} rows, {name}", got, x)


@pytest.mark.parametrize("option", OPTIONS)
@DTYPES
def test_a_sequence_has_its_gradients_in_any_batch(dtype, option, threads):
    check_every_batch(dtype, OPTIONS[option])


def test_another_order_has_other_bits():
    """The same gradients over other tiles: here keys are read 32 at a time."""
    q, k, v, grad = make(150, 2, 2)
    (dq, *_), scale = gradients([q, k, v, grad], [150]), 24**-0.5
    seen = torch.ones(150, 150, dtype=torch.bool).tril()
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    p = scores.masked_fill(~seen, -torch.inf).softmax(2)
    dp = torch.einsum("ihd,jhd->hij", grad, v)
    ds = p * (dp - (p * dp).sum(2, keepdim=True)) * scale
    parts = [torch.einsum("hij,jhd->ihd", ds[..., j : j + 32], k[j : j + 32]) for j in range(0, 150, 32)]
    torch.testing.assert_close(sum(parts), dq, rtol=1e-3, atol=1e-3)
    assert not torch.equal(sum(parts), dq)


def test_a_key_adds_up_its_rows_from_the_last_one_on():
    """The largest share comes last: the first keys lose half of what they do in the other order."""
    g = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(64, 64, 8, generator=g) for _ in range(4))
    grad = grad.abs()  # so that the sum grows with every row
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double()) * 8**-0.5
    p = scores.masked_fill(~torch.ones(64, 64, dtype=torch.bool).tril(), -torch.inf).softmax(2)
    exact = torch.einsum("hij,ihd->jhd", p, grad.double())
    first_row_first = torch.zeros(64, 64, 8)
    for i in range(64):
        first_row_first += p[:, i].t()[..., None].float() * grad[i]
    dv = gradients([q, k, v, grad], [64])[2]
    lost, other = ((x - exact)[:4].square().mean().sqrt() for x in (dv, first_row_first))
    assert lost < 0.7 * other, (lost, other)


def test_a_sum_that_is_cut_by_the_batch_is_found(monkeypatch):
    """A mutant: the rows of the batch's first half and those of its second are added up apart."""
    right = native_op.gradients

    def halves(q, k, v, results, grad, asked, rule):
        first = (torch.arange(len(q)) < len(q) // 2)[:, None, None]
        parts = [right(q, k, v, results, grad * seen, asked, rule) for seen in (first, ~first)]
        return AttentionGrads(*(x + y for x, y in zip(*parts, strict=True)))

    inputs = make(150)
    want = gradients(inputs, [150])
    monkeypatch.setattr(native_op, "gradients", halves)
    # gradients and values reach 1000, and a term is a product of both: its last place is some 2^-7
    torch.testing.assert_close(gradients(inputs, [150]), want, rtol=1e-4, atol=2.0**-6)
    with pytest.raises(AssertionError):
        check_every_batch(torch.float32, {})


def test_rows_without_a_gradient_give_nothing():
    """Padding behind a sequence, whatever stands in it."""
    inputs = make(70)
    want = gradients(inputs, [70])
    longer = [torch.cat([x, torch.full_like(x[:20], torch.nan)]) for x in inputs]
    longer[3][70:] = 0
    for name, got, x in zip(("dq", "dk", "dv"), gradients(longer, [90]), want, strict=True):
        assert_equal(name, got[:70], x)
        assert not got[70:].any()


def test_a_tree_has_its_gradients_in_any_batch(threads):
    """A prompt's are sums over its completions: in the order of the tree, whatever stands beside it."""
    tree = PrefixLayout((70, 9, 65, 3), (-1, 0, 0, 0), (False, True, True, True))
    two = PrefixLayout((20, 70, 5, 9, 65, 3), (-1, -1, 0, 1, 1, 1), (False, False, True, True, True, True))
    own, other = make(tree.total), make(25)
    order = [*range(20)], [*range(70)], [*range(20, 25)], [*range(70, 147)]
    parts = [(other, order[0]), (own, order[1]), (other, order[2]), (own, order[3])]
    beside = [torch.cat([source[i][rows] for source, rows in parts]) for i in range(4)]
    mine = torch.cat([torch.arange(20, 90), torch.arange(95, 172)])
    for name, got, want in zip(
        ("dq", "dk", "dv"), gradients(beside, batch=two), gradients(own, batch=tree), strict=True
    ):
        assert_equal(name, got[mine], want)


def results():
    """They go through every kind of load, of block and of width."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for dims in ((6, 2, 40, 24), (7, 1, 64, 67)):
            for options in OPTIONS.values():
                found += gradients(make(150, *dims, dtype=dtype), [33, 117], **options)
    return found


@pytest.mark.parametrize("isa", instruction_sets.NARROWER)
def test_instruction_sets_change_no_bit(isa, tmp_path):
    instruction_sets.assert_not_seen(sys.modules[__name__], isa, tmp_path)


REFUSED = {
    "rows must hold each row once, got 0 again in request 1": {"rows": torch.tensor([[0, 4], [0, 2]])},
    "rows must hold rows that there are, no more than keys": {"rows": torch.tensor([[0, 4], [4, 9]])},
    "keys must hold rows of k, got 6 at 5": {"keys": torch.tensor([0, 1, 2, 3, 4, 6])},
    "keys must be of one group each, got 3 of two": {"keys": torch.tensor([0, 1, 2, 3, 3, 4])},
    "key_offsets must rise from 0 to 6": {"key_offsets": torch.tensor([0, 5, 4])},
    "group_offsets must rise from 0 to 2": {"group_offsets": torch.tensor([0, 1, 1])},
    "k must have heads that divide the 4 of q, got 3": {"k": torch.zeros(6, 3, 8), "v": torch.zeros(6, 3, 8)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_requests_that_there_are_not_are_refused(message):
    q, grad = torch.zeros(2, 6, 4, 8)
    k, v = torch.zeros(2, 6, 2, 8)
    call = {
        "q": q, "k": k, "v": v, "out": q, "lse": torch.zeros(4, 6), "grad": grad,
        "rows": torch.tensor([[0, 4], [4, 6]]), "key_offsets": torch.tensor([0, 4, 6]),
        "keys": torch.arange(6), "group_offsets": torch.arange(3), "rule": PagedRule(1.0, 0.0, 0),
        "dq": torch.zeros(6, 4, 8), "dk": torch.zeros(6, 2, 8), "dv": torch.zeros(6, 2, 8),
    }  # fmt: skip
    kernel = native.kernels(q.device).attention_backward
    kernel(**call)
    with pytest.raises(ValueError, match=message):
        kernel(**call | REFUSED[message])


def test_rows_of_no_request_get_zeros():
    q, k, v, grad = make(6)
    results = AttentionResults(torch.zeros_like(q), torch.zeros(4, 6))
    found = native_op.gradients(q, k, v, results, grad, asked([], [], []), PagedRule(1.0, 0.0, 0))
    assert not any(x.any() for x in found)
