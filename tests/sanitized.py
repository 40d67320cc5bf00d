"""Calls of the device kernels on blocks of exactly their size, where a sanitizer sees one element too far.

`python tests/sanitized.py <emulated module under sanitizers> <the same without>`, run by tests/emulation.py.
What a kernel writes must be the same bits in both.
"""

import sys
from pathlib import Path

import emulation
import seam_calls
import torch

import rlkernel
from rlkernel import native
from rlkernel.native.prefix_shared_attention.kernels import attention_merge, gather_kv, segment_reduce

OFFSETS = range(3)  # elements behind a boundary of 16 bytes where rows start, which may start anywhere
ROWS = ("logits", "values", "returns", "old_values", "out", "part", "k", "v")


class Checked:
    """A part that runs each call on both modules, with the sanitizers' on blocks of its own."""

    def __init__(self, sanitized, plain):
        self.sanitized, self.plain = sanitized, plain

    def __getattr__(self, name):
        kernel = getattr(self.sanitized, name)
        if not callable(kernel):
            return kernel

        def called(*stream, **fields):
            tensors = {k: x for k, x in fields.items() if isinstance(x, torch.Tensor)}
            offsets = OFFSETS if any(k in ROWS for k in tensors) else OFFSETS[:1]
            copies = [placed(tensors, offset) for offset in offsets]
            for ours in copies:
                kernel(*stream, **fields | ours)
            getattr(self.plain, name)(*stream, **fields)
            for k, x in tensors.items():
                for offset, ours in zip(offsets, copies, strict=True):
                    assert torch.equal(bits(ours[k]), bits(x)), f"{name}: {k} differs, offset {offset}"

        return called


def placed(tensors, offset):
    """Copies of tensors; what may be one memory, as logits and their gradient, stays one."""
    blocks = {}
    for k, x in tensors.items():
        if (x.data_ptr(), x.shape) not in blocks:
            blocks[x.data_ptr(), x.shape] = block(x, offset if k in ROWS else 0)
    return {k: blocks[x.data_ptr(), x.shape] for k, x in tensors.items()}


def block(x, offset):
    """A copy of x, with its strides, that ends where its memory ends."""
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    copy = torch.empty(offset + span, dtype=x.dtype).as_strided(x.shape, x.stride(), offset)
    raw(copy).copy_(raw(x))
    return copy


def raw(x):
    """A bool that nobody has written yet may be neither 0 nor 1."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def bits(x):
    return torch.empty(x.shape, dtype=raw(x).dtype).copy_(raw(x)).view(-1).view(torch.uint8)


def rows():
    """Logits whose rows are shorter and longer than a block, and end everywhere in a vector."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for vocab in (1, 5, 250, 2051):
            x, head = torch.randn(3, vocab).to(dtype).requires_grad_(), torch.randn(vocab, 8).to(dtype)
            call = {"target_ids": torch.tensor([0, vocab - 1, -100]), "return_entropy": True}
            plain = rlkernel.logprob(x, **call)
            capped = rlkernel.linear_logprob(
                torch.ones(3, 8, dtype=dtype, requires_grad=True),
                head,
                bias=head[:, 0].clone(),
                softcap=5.0,
                **call,
            )
            for out in (plain, capped):
                (out.logprobs + out.entropy).sum().backward()
        for options in ({}, {"top_k": 5, "top_p": 0.9, "return_support": 8, "return_rank": True}):
            rlkernel.sample(torch.randn(2, 4099).to(dtype), seeds=torch.arange(2), **options)
        out, part = torch.randn(2, 5, 3, 7).to(dtype)
        lse, part_lse = torch.randn(2, 3, 5)
        attention_merge(out, lse, part, part_lse, torch.zeros(3))
        segment_reduce(
            *gather_kv(out, part, torch.tensor([4, 0, 2])), torch.tensor([0, 2]), torch.tensor([0, 1, 2])
        )


def sequences():
    """Packed ones that are shorter and longer than a chunk, and padding behind them."""
    offsets = torch.tensor([0, 1, 1, 38, 2087, 6186])
    noise = [torch.randn(6200) for _ in range(4)]
    packed = {"mask": noise[3] < 0.5, "cu_seqlens": offsets}
    rlkernel.gae(*noise[:2], gamma=0.9, lam=0.9, **packed)
    rlkernel.kl_shaped_rewards(*noise[:3], beta=0.1, **packed)
    rlkernel.whiten(noise[0], packed["mask"])
    rows = [torch.randn(3, 40)[:, 1:38] for _ in range(3)]
    rlkernel.gae(*rows[:2], rows[2] < 0, gamma=0.9, lam=0.9)
    rlkernel.kl_shaped_rewards(*rows, beta=0.1)
    rlkernel.value_loss(rows[0], rows[1], rows[2] < 0)
    groups = torch.tensor([0, 1, 2100, 6200])
    rlkernel.group_advantages(noise[0], group_offsets=groups, scale_rewards="batch")
    x = noise[0].requires_grad_()
    rlkernel.value_loss(x, noise[1], old_values=noise[2], cliprange_value=0.2, **packed).loss.backward()
    for loss in ("grpo", "kl_cov"):
        rlkernel.policy_loss(x, *noise[1:3], loss_type=loss, **packed).loss.backward()
    pairs = packed | {"cu_seqlens": offsets[[0, 1, 3, 4, 5]]}
    rlkernel.preference_loss(x, noise[1], loss_type="sigmoid", **pairs).loss.backward()


if __name__ == "__main__":
    sanitized, plain = (emulation.load(Path(path)) for path in sys.argv[1:])
    with native.emulated(Checked(sanitized, plain)), rlkernel.use_backend("native"):
        for make in (rows, sequences, *seam_calls.ONE_OF_EACH):
            make()
