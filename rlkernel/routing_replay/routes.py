"""Which experts each token of each layer of a mixture of experts went to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_EXPERTS = 1 << 16


def storage_dtype(num_experts: int) -> torch.dtype:
    """The smallest type that holds the ids of so many experts: uint8 up to 256, uint16 up to 65536."""
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts must be in [1, {MAX_EXPERTS}], got {num_experts}")
    return torch.uint8 if num_experts <= 256 else torch.uint16


@dataclass(frozen=True, eq=False)
class Routes:
    """The experts of every token in every layer, in the order in which the router gave them.

    ``experts [layers, tokens, top_k]`` is uint8 or uint16.  A token whose ``known [tokens]`` is False has no
    record: its experts are 0 and mean nothing, and it routes freely when the rest is replayed.  Layers are
    those that have a router, from the first to the last; tokens stand as the router sees them: the rows of a
    padded batch one after the other, or one packed row.
    """

    experts: Tensor
    known: Tensor
    num_experts: int

    @staticmethod
    def of(ids: Any, num_experts: int, known: Tensor | None = None) -> Routes:
        """Of ``ids [layers, tokens, top_k]`` of any integer type; a token of -1s has no record.

        Raises:
            ValueError: ids that are no expert's, -1 beside other ids of its token, or twice the same expert
                for a token.
        """
        ids = ids if isinstance(ids, Tensor) else torch.as_tensor(ids, device="cpu")
        dtype = storage_dtype(num_experts)
        if ids.dim() != 3 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise ValueError(
                f"ids must be integers [layers, tokens, top_k], got {ids.dtype} {tuple(ids.shape)}"
            )
        ids = ids.long()
        absent = (ids == -1).permute(1, 0, 2).flatten(1)
        there = ~absent.any(1)
        if not bool((absent.all(1) | there).all()):
            token = int((absent.all(1) | there).logical_not().nonzero()[0])
            raise ValueError(f"ids[:, {token}] must be -1 in every layer or in none, got some")
        if known is not None:
            if known.shape != there.shape or known.dtype != torch.bool:
                raise ValueError(
                    f"known must be bool {tuple(there.shape)}, got {known.dtype} {tuple(known.shape)}"
                )
            there = there & known.to(there.device)
        ids = ids.where(there[None, :, None], 0)
        outside = (ids < 0) | (ids >= num_experts)
        if bool(outside.any()):
            place = tuple(outside.nonzero()[0].tolist())
            raise ValueError(f"ids{list(place)} = {int(ids[place])} is outside [0, {num_experts})")
        ordered = ids.sort(-1).values
        twice = ((ordered[..., 1:] == ordered[..., :-1]).any(-1)) & there
        if bool(twice.any()):
            layer, token = twice.nonzero()[0].tolist()
            raise ValueError(
                f"ids[{layer}, {token}] must be different experts, got {ids[layer, token].tolist()}"
            )
        return Routes(ids.to(dtype), there, num_experts)

    @property
    def layers(self) -> int:
        return self.experts.shape[0]

    @property
    def tokens(self) -> int:
        return self.experts.shape[1]

    @property
    def top_k(self) -> int:
        return self.experts.shape[2]

    @property
    def device(self) -> torch.device:
        return self.experts.device

    @property
    def ids(self) -> Tensor:
        """``[layers, tokens, top_k]`` as int64, -1 where there is no record."""
        return self.experts.long().where(self.known[None, :, None], -1)

    def __repr__(self) -> str:
        shape = f"layers={self.layers}, tokens={self.tokens}, top_k={self.top_k}"
        return f"Routes({shape}, num_experts={self.num_experts}, known={int(self.known.sum())})"

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, tokens: slice | Tensor | Sequence[int]) -> Routes:
        """Those of some tokens: a slice, indices, or a mask ``[tokens]`` (that of a batch, flattened)."""
        if not isinstance(tokens, slice):
            tokens = torch.as_tensor(tokens, device=self.device).flatten()
            if tokens.dtype == torch.bool and len(tokens) != self.tokens:
                raise ValueError(f"a mask must have {self.tokens} tokens, got {len(tokens)}")
            tokens = tokens.nonzero()[:, 0] if tokens.dtype == torch.bool else tokens.long()
        # torch indexes no uint16: its bits as int16 are the same bytes
        experts = _bits(self.experts)[:, tokens].view(self.experts.dtype)
        return Routes(experts, self.known[tokens], self.num_experts)

    def to(self, device: torch.device | str) -> Routes:
        return Routes(self.experts.to(device), self.known.to(device), self.num_experts)

    def only(self, mask: Tensor) -> Routes:
        """The same with no record where ``mask [tokens]`` (that of a batch, flattened) is False or 0."""
        mask = mask.flatten().bool().to(self.device)
        if mask.shape != self.known.shape:
            raise ValueError(f"mask must have {self.tokens} tokens, got {len(mask)}")
        return Routes(self.experts, self.known & mask, self.num_experts)

    def take_layers(self, layers: Sequence[int]) -> Routes:
        """Some layers, in this order."""
        wrong = [layer for layer in layers if not 0 <= layer < self.layers]
        if wrong:
            raise ValueError(f"layers must be in [0, {self.layers}), got {wrong[0]}")
        experts = _bits(self.experts)[torch.tensor(list(layers), dtype=torch.long, device=self.device)]
        return Routes(experts.view(self.experts.dtype), self.known, self.num_experts)

    def padded(self, left: int = 0, right: int = 0) -> Routes:
        """With tokens that have no record on either side."""
        if left < 0 or right < 0:
            raise ValueError(f"left and right must be >= 0, got {left} and {right}")
        experts = torch.nn.functional.pad(_bits(self.experts), (0, 0, left, right))
        known = torch.nn.functional.pad(self.known, (left, right), value=False)
        return Routes(experts.view(self.experts.dtype), known, self.num_experts)

    def split(self, lengths: Sequence[int]) -> list[Routes]:
        """The sequences of these lengths, one after the other."""
        if sum(lengths) != self.tokens or min(lengths, default=0) < 0:
            raise ValueError(f"lengths must sum to {self.tokens} tokens, got {list(lengths)}")
        ends = torch.tensor([0, *lengths], device="cpu").cumsum(0).tolist()
        return [self[start:end] for start, end in zip(ends, ends[1:], strict=False)]

    def unpack(self, cu_seqlens: Tensor) -> list[Routes]:
        """The sequences of a packed row, from where each begins and the end of the last ``[n + 1]``."""
        ends = cu_seqlens.tolist()
        if not ends or ends[0] != 0:
            raise ValueError(f"cu_seqlens must begin with 0, got {ends[:1]}")
        return self.split([end - start for start, end in zip(ends, ends[1:], strict=False)])

    def equal(self, other: Routes) -> bool:
        """Whether both know of the same tokens, and their experts are the same in the same order."""
        return (
            self.num_experts == other.num_experts
            and self.experts.shape == other.experts.shape
            and bool((self.known == other.known).all())
            and bool((self.ids == other.ids).all())
        )

    def overlap(self, other: Routes) -> Tensor:
        """Of each layer, the fraction of these experts that are the other's for the same token: ``[layers]``.

        Over tokens that both know; NaN where there is none.
        """
        if self.experts.shape != other.experts.shape:
            raise ValueError(
                f"other must have shape {tuple(self.experts.shape)}, got {tuple(other.experts.shape)}"
            )
        both = self.known & other.known
        return torch.stack(
            [share_chosen(a.long(), b.long(), both) for a, b in zip(self.experts, other.experts, strict=True)]
        )


def share_chosen(recorded: Tensor, chosen: Tensor, known: Tensor) -> Tensor:
    """The fraction of ``recorded [tokens, top_k]`` that is among ``chosen``, over known tokens, in fp64."""
    among = (recorded[:, :, None] == chosen[:, None, :]).any(-1).sum(-1)
    return among.where(known, 0).sum().double() / (known.sum() * recorded.shape[1])


def cat(parts: Sequence[Routes]) -> Routes:
    """One after the other: a prompt's and its completion's, or the sequences of a packed row.

    Examples:
        >>> routes = rlkernel.routing_replay.from_vllm(np.zeros((4, 2, 1), dtype=np.int32), 8)
        >>> rlkernel.routing_replay.cat([routes, routes]).experts.shape
        torch.Size([2, 8, 1])
    """
    if not parts:
        raise ValueError("parts must be one Routes or more, got none")
    first = parts[0]
    for part in parts:
        found = (part.layers, part.top_k, part.num_experts)
        if found != (first.layers, first.top_k, first.num_experts):
            raise ValueError(
                f"parts must have layers, top_k, num_experts = "
                f"{(first.layers, first.top_k, first.num_experts)}, got {found}"
            )
    experts = torch.cat([_bits(part.experts) for part in parts], 1).view(first.experts.dtype)
    return Routes(experts, torch.cat([part.known for part in parts]), first.num_experts)


def pack(sequences: Sequence[Routes]) -> tuple[Routes, Tensor]:
    """The sequences as one packed row, and its ``cu_seqlens [n + 1]`` (int32).

    Examples:
        >>> routes = rlkernel.routing_replay.from_vllm(np.zeros((4, 2, 1), dtype=np.int32), 8)
        >>> rlkernel.routing_replay.pack([routes, routes])[1]
        tensor([0, 4, 8], dtype=torch.int32)
    """
    lengths = [0, *(len(sequence) for sequence in sequences)]
    return cat(sequences), torch.tensor(lengths, device="cpu").cumsum(0).int()


def pad(sequences: Sequence[Routes], length: int | None = None, side: str = "right") -> Routes:
    """The sequences as the rows of a padded batch, each of ``length`` (the longest's) tokens.

    Examples:
        >>> routes = rlkernel.routing_replay.from_vllm(np.zeros((4, 2, 1), dtype=np.int32), 8)
        >>> rlkernel.routing_replay.pad([routes], length=6).known
        tensor([ True,  True,  True,  True, False, False])
    """
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', got {side!r}")
    longest = max((len(sequence) for sequence in sequences), default=0)
    length = longest if length is None else length
    if length < longest:
        raise ValueError(f"length must be >= {longest}, the longest sequence, got {length}")
    return cat([sequence.padded(**{side: length - len(sequence)}) for sequence in sequences])


def pad_like(sequences: Sequence[Routes], mask: Tensor) -> Routes:
    """The sequences in the places of a batch where ``mask [n, S]`` is not 0, on whatever side it is padded.

    A sequence may be one token shorter than its row: the last token, which an engine drew and never ran, has
    no record.

    Examples:
        >>> routes = rlkernel.routing_replay.from_vllm(np.zeros((2, 2, 1), dtype=np.int32), 8)
        >>> rlkernel.routing_replay.pad_like([routes], torch.tensor([[0, 1, 1]])).known
        tensor([False,  True,  True])
    """
    if mask.dim() != 2 or len(mask) != len(sequences):
        raise ValueError(f"mask must be [{len(sequences)}, S], got {tuple(mask.shape)}")
    rows = []
    for number, (sequence, places) in enumerate(zip(sequences, mask.bool(), strict=True)):
        there = places.nonzero()[:, 0]
        missing = len(there) - len(sequence)
        if missing not in (0, 1):
            raise ValueError(
                f"sequences[{number}] must have the {len(there)} tokens of its row, or all but the last, "
                f"got {len(sequence)}"
            )
        experts = sequence.experts.new_zeros((sequence.layers, len(places), sequence.top_k))
        known = sequence.known.new_zeros(len(places))
        there = there[: len(sequence)].to(sequence.device)
        _bits(experts)[:, there] = _bits(sequence.experts)
        known[there] = sequence.known
        rows.append(Routes(experts, known, sequence.num_experts))
    return cat(rows)


def _bits(experts: Tensor) -> Tensor:
    return experts.view(torch.int16) if experts.dtype == torch.uint16 else experts
