"""``batch_invariant``: torch's attention, its masks and its windows."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from accuracy import check
from bitwise import assert_equal
from invariant_rows import g, own_numbers, threads

import rlkernel

assert own_numbers and threads  # fixtures of the tests here


@pytest.mark.parametrize("value_dim", [16, 10, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_left_padding_right_padding_and_packing_change_nothing(dtype, value_dim, threads):
    """torch's attention under each of the masks that trainers make, and its gradients."""
    q, k, v, grad = (
        torch.randn(1, 4, 90, dim, generator=g).to(dtype) for dim in (16, 16, value_dim, value_dim)
    )

    def attend(left, right, behind=0.0):
        """Rows of padding are ``behind`` and have no gradient."""
        x = [F.pad(t, (0, 0, left, right), value=behind).requires_grad_() for t in (q, k, v)]
        seen = torch.zeros(90 + left + right, dtype=torch.bool)
        seen[left : left + 90] = True
        mask = seen[None] & torch.ones(len(seen), len(seen), dtype=torch.bool).tril()
        asked = mask if left % 2 else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
        out = F.scaled_dot_product_attention(*x, attn_mask=asked[None, None])
        grads = torch.autograd.grad(out, x, F.pad(grad, (0, 0, left, right)))
        return [t.detach()[:, :, left : left + 90] for t in (out, *grads)]

    def packed(*which):
        """Sequences one behind the other: the first 30 rows, and all."""
        starts = [0]
        for n in which:
            starts.append(starts[-1] + n)
        x = [torch.cat([t[:, :, :n] for n in which], 2).requires_grad_() for t in (q, k, v)]
        number = torch.arange(starts[-1]).unsqueeze(1).ge(torch.tensor(starts)).sum(1)
        mask = (number[:, None] == number) & torch.ones(starts[-1], starts[-1], dtype=torch.bool).tril()
        out = F.scaled_dot_product_attention(*x, attn_mask=mask[None, None])
        grads = torch.autograd.grad(out, x, torch.cat([grad[:, :, :n] for n in which], 2))
        at = which.index(90)
        return [t.detach()[:, :, starts[at] : starts[at + 1]] for t in (out, *grads)]

    with rlkernel.batch_invariant():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        whole = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        cases = {f"{left} in front, {right} behind": attend(left, right) for left, right in PADDED}
        cases |= {
            "NaN behind": attend(0, 9, torch.nan),
            "packed": packed(30, 90),
            "in front": packed(90, 30, 7),
        }
        for name, found in cases.items():
            for which, got, want in zip(("out", "dq", "dk", "dv"), found, whole, strict=True):
                assert_equal(f"{which}, {name}", got, want)
        for at in (1, 63, 64, 89):  # a step behind a cache
            step = F.scaled_dot_product_attention(q[:, :, at : at + 1], *(x[:, :, : at + 1] for x in (k, v)))
            assert_equal(f"step {at}", step, whole[0][:, :, at : at + 1])
        for first, end in ((20, 70), (60, 65), (65, 90)):  # a chunk of a prefill
            seen = torch.ones(end, end, dtype=torch.bool).tril()[None, None, first:]
            keys = [x[:, :, :end] for x in (k, v)]
            chunk = F.scaled_dot_product_attention(q[:, :, first:end], *keys, attn_mask=seen)
            assert_equal(f"chunk {first} to {end}", chunk, whole[0][:, :, first:end])
        # a step of an engine on pages of 7 tokens that lie backwards
        tokens = (F.pad(x[0].transpose(0, 1), (0, 0, 0, 0, 0, 1)) for x in (k, v))
        pages = [x.unflatten(0, (13, 7)).flip(0) for x in tokens]
        table, lens, starts = torch.arange(12, -1, -1)[None], torch.tensor([90]), torch.tensor([0, 25])
        found = rlkernel.paged_prefix_attention(q[0].transpose(0, 1)[65:], *pages, table, lens, starts)
        assert_equal("pages", found.transpose(0, 1)[None], whole[0][:, :, 65:])


PADDED = ((0, 0), (5, 0), (0, 7), (64, 3), (2, 2))


def masked_attention(mask, q, k, v):
    """The output and the gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(
        *leaves, attn_mask=mask.to(q.dtype) if mask.is_floating_point() else mask
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out) * q.sign())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_share_keys_have_the_gradients_of_repeated_keys(dtype):
    """transformers repeats them under a mask, and not without one."""
    q, grad = (torch.randn(1, 6, 150, 16, generator=g).to(dtype) for _ in range(2))
    leaves = [q, *(torch.randn(1, 2, 150, 16, generator=g).to(dtype) for _ in range(2))]
    leaves = [x.requires_grad_() for x in leaves]

    def repeated(x):
        return x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(1, 6, 150, 16)

    mask = torch.ones(150, 150, dtype=torch.bool).tril()[None, None]
    with rlkernel.batch_invariant():
        shared = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        q, k, v = leaves
        apart = F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)
        assert_equal("out", shared, apart)
        grads = (torch.autograd.grad(x, leaves, grad) for x in (shared, apart))
        for name, got, want in zip(("dq", "dk", "dv"), *grads, strict=True):
            assert_equal(name, got, want)


MASKS = {
    "a row sees those in front of it": torch.ones(70, 70, dtype=torch.bool).tril(-1),
    "a window": torch.ones(70, 70, dtype=torch.bool).tril().triu(-20),
    "all keys": torch.zeros(70, 70),
    "rows that see nothing": torch.ones(70, 70, dtype=torch.bool).tril()
    & (torch.arange(70) % 9 > 2)[:, None],
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_mean_what_they_do_in_torch(name):
    x = [torch.randn(16, 2, 70, 8, generator=g) for _ in range(3)]
    want, truth = (masked_attention(MASKS[name], *y) for y in (x, [t.double() for t in x]))
    with rlkernel.batch_invariant():
        got = masked_attention(MASKS[name], *x)
    for which, *values in zip(("out", "dq", "dk", "dv"), got, want, truth, strict=True):
        check(which, *values, magnitude=4.0)


def windowed(rows, window, left=0, right=0):
    """What a trainer's mask shows of a sequence that is padded."""
    place = torch.arange(left + rows + right)
    inside = (place >= left) & (place < left + rows)
    back = place[:, None] - place
    return inside & (back >= 0) & (back < window)


def test_rows_of_a_window_are_those_of_attention_at_their_positions():
    """And their gradients."""
    q, k, v, grad = (torch.randn(1, 4, 150, 16, generator=g) for _ in range(4))

    def masked(mask, left=0, right=0):
        x = [F.pad(t, (0, 0, left, right)).requires_grad_() for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*x, attn_mask=mask)
        grads = torch.autograd.grad(out, x, F.pad(grad, (0, 0, left, right)))
        return torch.stack([t.detach()[0, :, left : left + 150].transpose(0, 1) for t in (out, *grads)])

    def whole(starts):
        x = [t[0].transpose(0, 1).requires_grad_() for t in (q, k, v)]
        out = rlkernel.attention(*x, cu_seqlens_q=torch.tensor(starts), window=40)
        return torch.stack([out.detach(), *torch.autograd.grad(out, x, grad[0].transpose(0, 1))])

    with rlkernel.batch_invariant():
        for left, right in ((0, 0), (5, 0), (0, 7), (64, 3)):
            found = masked(windowed(150, 40, left, right), left, right)
            assert_equal(f"{left} in front, {right} behind", found, whole([0, 150]))
        mask = torch.block_diag(*(windowed(n, 40) for n in (1, 49, 100)))
        assert_equal("packed", masked(mask), whole([0, 1, 50, 150]))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (windowed(9, 3), None),
        (windowed(9, 3)[3:], "do not say where their sequence begins"),
        (torch.block_diag(windowed(5, 2), windowed(6, 4)), "must see one window, got one of 2"),
    ],
    ids=["whole", "behind a cache", "two windows"],
)
def test_windows_without_a_beginning_are_refused(mask, message):
    q, k = torch.randn(1, 2, mask.shape[0], 8), torch.randn(1, 2, mask.shape[1], 8)
    expected = pytest.raises(RuntimeError, match=message) if message else contextlib.nullcontext()
    with rlkernel.batch_invariant(), expected:
        F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.randn(6, 6), "its mask must hide keys, and not weigh them"),
        (torch.eye(6, dtype=torch.bool).logical_not(), "must show keys that follow each other"),
        (
            torch.ones(1, 2, 6, 6, dtype=torch.bool).tril_() & torch.tensor([1, 0]).bool()[:, None, None],
            "all heads",
        ),
    ],
    ids=["weights", "holes", "heads"],
)
def test_masks_that_are_no_intervals_are_refused(mask, message):
    x = torch.randn(1, 2, 6, 8)
    with rlkernel.batch_invariant(), pytest.raises(RuntimeError, match=message):
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
