"""Prompts and their completions packed into one row of tokens, each shared token once."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel.prefix import parts
from rlkernel.prefix.layout import Run, ranges
from rlkernel.prefix.rows import rows_of
from rlkernel.prefix.sequences import tree_of
from rlkernel.prefix.tree import Tree, listed, padded, same_prompt, tokens_of

_ON_THE_HOST = ("samples", "completion_lengths")


class PrefixBatch:
    """A batch for models whose attention is ``prefix_shared_attention``: ``[prompts | completions]``.

    A group of G completions of L tokens after a prompt of P tokens runs on ``P - 1 + G * L`` rows, not on
    ``G * (P + L)``.  The last token of what is shared stands in front of every continuation instead, and a
    completion's last token, which predicts nothing, is left out: so every row of the completions predicts
    exactly one token, in order, no row of the prompts does, and the lm_head runs on one view of the hidden
    states, ``completion_rows``.  (Of whole sequences some rows predict nothing; they are left out of these.)

    Make one with ``pack``, ``pack_tree``, ``from_padded`` or ``from_sequences``.

    Attributes:
        input_ids: [1, T] int64.
        position_ids: [1, T] int64.
        labels: [M] int64: the tokens that ``completion_rows`` predict.
        n_prefix: rows of prompts, in front.
        layout: PrefixLayout: who sees whom.
        samples: [N] int64 on the CPU: which of the samples given these are; ``split`` keeps their numbers.
        completion_lengths: [N] int64 on the CPU: tokens of each sample that are predicted, the first one
            also where nothing stands in front of it; of whole sequences all tokens.
        tokens_dense: tokens of all samples, each with its own copy of the prompt.
        longest: tokens of the longest sample that has a label, from its first to its last, 0 without one.

    Examples:
        >>> batch = rlkernel.PrefixBatch.pack([[5, 6, 7]], [[[1, 2], [3]]])
        >>> batch.input_ids, batch.labels
        (tensor([[5, 6, 7, 1, 7]]), tensor([1, 2, 3]))
    """

    def __init__(
        self,
        tree: Tree,
        *,
        width: int | None = None,
        samples: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._tree = tree
        self.device = torch.device("cpu" if device is None else device)
        self.samples = torch.arange(len(tree.ends), device="cpu") if samples is None else samples
        self._parts: dict[int, list[list[int]]] = {}
        self._build(width)

    # making one

    @classmethod
    def pack(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[Sequence[int]]],
        *,
        device: torch.device | str | None = None,
    ) -> PrefixBatch:
        """Pack token lists: ``completions[b]`` are the completions of ``prompts[b]``.

        Samples are numbered in that order.  Prompts and completions may be empty; the first token of a
        completion without a prompt has no row that predicts it, as in any causal model.

        Raises:
            ValueError: the two lists differ in length, or hold something else than lists of integers.
        """
        prompts, completions = listed("prompts", prompts), listed("completions", completions)
        if len(prompts) != len(completions):
            raise ValueError(
                f"completions must have a list for each of the {len(prompts)} prompts, got {len(completions)}"
            )
        nodes: list[Any] = []
        parents: list[int] = []
        ends: list[int] = []
        for b, (prompt, group) in enumerate(zip(prompts, completions, strict=True)):
            root = len(nodes)
            nodes.append(tokens_of(f"prompts[{b}]", prompt))
            parents.append(-1)
            if not isinstance(group, Iterable):
                raise ValueError(f"completions[{b}] must be a list of completions, got {group!r:.80}")
            for g, completion in enumerate(group):
                ends.append(len(nodes))
                nodes.append(tokens_of(f"completions[{b}][{g}]", completion))
                parents.append(root)
        is_completion = tuple(parent >= 0 for parent in parents)
        return cls(Tree.of(nodes, parents, is_completion, ends), device=device)

    @classmethod
    def pack_tree(
        cls,
        nodes: Sequence[Sequence[int]],
        parents: Sequence[int],
        completion: Sequence[bool],
        *,
        device: torch.device | str | None = None,
    ) -> PrefixBatch:
        """Pack a tree of any depth, such as ``system prompt > prompt > shared reasoning > continuation``.

        Args:
            nodes: the tokens of each node.
            parents: the node above, which comes earlier; -1 for a root.
            completion: whether a node's tokens are predicted; all nodes below such a one are.

        The samples are the nodes with nothing below, in their order.  A token that several samples share is
        predicted by one row, whose logprob ``unpack`` gives to each of them.

        Raises:
            ValueError: the lists differ in length, a parent is not an earlier node, or a node below a
                completion is none.
        """
        nodes, parents = listed("nodes", nodes), listed("parents", parents)
        completion = listed("completion", completion)
        if not len(nodes) == len(parents) == len(completion):
            got = f"{len(nodes)}, {len(parents)} and {len(completion)}"
            raise ValueError(f"nodes, parents and completion must have the same length, got {got}")
        for i, parent in enumerate(parents):
            if not -1 <= parent < i:
                raise ValueError(f"parents[{i}] must be -1 or an earlier node, got {parent}")
            if parent >= 0 and completion[parent] and not completion[i]:
                raise ValueError(f"completion[{i}] must be True below completion node {parent}, got False")
        tokens = [tokens_of(f"nodes[{i}]", node) for i, node in enumerate(nodes)]
        inner = set(parents)
        ends = [i for i in range(len(nodes)) if i not in inner]
        return cls(Tree.of(tokens, parents, tuple(map(bool, completion)), ends), device=device)

    @classmethod
    def from_padded(
        cls,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        *,
        device: torch.device | str | None = None,
    ) -> PrefixBatch:
        """Pack the padded tensors of TRL and verl; samples with the same prompt form a group.

        Args:
            prompt_ids, prompt_mask: [N, P]; the mask is nonzero on tokens, which stand together on either
                side (TRL and verl pad on the left).
            completion_ids, completion_mask: [N, L], padded on the right.
            device: of the batch; that of ``completion_ids`` unless given.

        Sample n is row n, in whatever order the groups come; ``unpack`` gives [N, L].  Reads the ids on the
        host, once.

        Raises:
            ValueError: shapes differ, ids are not integers, or a mask has a hole.
        """
        prompt_ids, prompt_mask = padded("prompt", prompt_ids, prompt_mask)
        home = completion_ids.device if isinstance(completion_ids, Tensor) and device is None else device
        completion_ids, completion_mask = padded("completion", completion_ids, completion_mask)
        n = len(completion_ids)
        if len(prompt_ids) != n:
            raise ValueError(f"prompt_ids must have the {n} rows of completion_ids, got {len(prompt_ids)}")
        if bool((completion_mask[:, 1:] & ~completion_mask[:, :-1]).any()):
            raise ValueError("completion_mask must be padded on the right, got a gap or padding on the left")
        groups = same_prompt(prompt_ids, prompt_mask)
        roots: dict[int, int] = {}  # group -> its first row
        for row, group in enumerate(groups):
            roots.setdefault(group, row)
        place = {group: i for i, group in enumerate(roots)}
        first = list(roots.values())
        lengths = torch.cat([prompt_mask[first].sum(1), completion_mask.sum(1)])
        tree = Tree(
            torch.cat([prompt_ids[first][prompt_mask[first]], completion_ids[completion_mask]]),
            tuple(lengths.tolist()),
            (-1,) * len(first) + tuple(place[group] for group in groups),
            (False,) * len(first) + (True,) * n,
            tuple(range(len(first), len(first) + n)),
        )
        return cls(tree, width=completion_ids.shape[1], device=home)

    @classmethod
    def from_sequences(
        cls,
        token_ids: Sequence[Sequence[int]],
        loss_mask: Sequence[Sequence[int]],
        *,
        device: torch.device | str | None = None,
    ) -> PrefixBatch:
        """Pack whole sequences, of which some begin alike: conversations of agents, turn by turn.

        Args:
            token_ids: the tokens of each sequence, prompt and completion, whatever their turns.
            loss_mask: of each sequence, nonzero on the tokens that are predicted: the policy's own, not the
                prompt's and a tool's.

        The tree of what the sequences share is found here: a token behind the same tokens is one row, and a
        sequence may end where another goes on.  Five turns of 200 tokens behind a prompt of 1,000, each
        turn a sequence with all before it, are 2,000 rows instead of 8,000.  ``unpack`` gives [N, S], where
        the longest sequence has S tokens, with a value at the place of each token under its mask.  Rows that
        predict nothing are none of ``completion_rows``: tool output costs the lm_head nothing.

        Raises:
            ValueError: the two lists differ in length, a mask has another shape than its tokens, or tokens
                are no integers.
        """
        return cls(tree_of(token_ids, loss_mask), device=device)

    # the rows

    def _build(self, width: int | None) -> None:
        tree, rows = self._tree, rows_of(self._tree)
        self._rows = rows
        self.layout = rows.layout
        self.n_prefix = self.layout.n_prefix
        self.input_ids = tree.tokens[rows.tokens][None].to(self.device)
        self.position_ids = self.layout.row_tables().pos.long()[None].to(self.device)
        self.labels = tree.tokens[rows.labels].to(self.device)
        self._label_rows = None if rows.label_rows is None else rows.label_rows.to(self.device)
        lengths, self.tokens_dense, self.longest = [], 0, 0
        samples: list[list[tuple[int, int, Run]]] = []
        for n in range(len(tree.ends)):
            path = tree.path(n)
            wanted = set(tree.predicted(n))
            counted = path if tree.labelled is not None else [i for i in path if i in wanted]
            at, places = 0, []
            for i in counted:
                if i in wanted and i in rows.label_runs:
                    a, b = rows.label_runs[i]
                    skip = tree.lengths[i] - (b - a)  # 1 where nothing stands in front
                    places.append((at + skip, at + tree.lengths[i], (a, b)))
                at += tree.lengths[i]
            samples.append(places)
            lengths.append(at)
            dense = sum(tree.lengths[i] for i in path)
            self.tokens_dense += dense
            if places:
                self.longest = max(self.longest, dense)
        self.completion_lengths = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        self.width = max(lengths, default=0) if width is None else width
        self._index(samples)

    def _index(self, samples: list[list[tuple[int, int, Run]]]) -> None:
        """For each label of each sample: where ``unpack`` puts it, and which row's it is."""
        places = [
            (n * self.width + a, n * self.width + b) for n, own in enumerate(samples) for a, b, _ in own
        ]
        self._places = ranges(places).to(self.device)
        self._sources = ranges([run for own in samples for *_, run in own])
        shared = torch.bincount(self._sources, minlength=self.labels.numel())
        self._is_shared = bool((shared > 1).any())
        self._sources = self._sources.to(self.device)
        if self._is_shared:
            self._uses = shared.to(self.device)
            self._by_source = torch.argsort(self._sources, stable=True)

    # using it

    @property
    def total(self) -> int:
        """T, the number of rows."""
        return self.input_ids.shape[1]

    @property
    def ratio(self) -> float:
        """How many times fewer rows than tokens of the samples: ``tokens_dense / total``."""
        return self.tokens_dense / self.total if self.total else 1.0

    def __len__(self) -> int:
        return len(self._tree.ends)

    def __repr__(self) -> str:
        return (
            f"PrefixBatch({len(self)} samples, {self.tokens_dense} tokens in {self.total} rows, "
            f"ratio {self.ratio:.2f}, {self.device})"
        )

    def model_kwargs(self) -> dict[str, Any]:
        """What a Hugging Face model on ``attn_implementation="rlkernel"`` takes: ``model(**model_kwargs())``.

        The mask is a 4-d stand-in: transformers hands such a one on as it is, and makes none of its own.
        """
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self.device),
            "use_cache": False,
            "prefix_batch": self,
        }

    def completion_rows(self, hidden: Tensor) -> Tensor:
        """The rows that have a label: [M, ...] of [1, T, ...] or [T, ...], a view if they are consecutive."""
        rows = hidden[0] if hidden.shape[:2] == (1, self.total) else hidden
        if rows.shape[:1] != (self.total,):
            raise ValueError(
                f"hidden must have the batch's {self.total} rows, got shape {tuple(hidden.shape)}"
            )
        return rows[self.n_prefix :] if self._label_rows is None else rows[self._label_rows]

    def unpack(self, per_token: Tensor, fill: float = 0.0) -> Tensor:
        """One value per label to the samples: [M] -> [N, L], ``fill`` where a sample has no label.

        Differentiable.  A value that several samples share is given to each of them, and gets the sum of
        their gradients, in a fixed order.
        """
        if per_token.shape[:1] != self.labels.shape:
            want = tuple(self.labels.shape)
            raise ValueError(
                f"per_token must have shape {want} (one value a label), got {tuple(per_token.shape)}"
            )
        values = _Shared.apply(per_token, self) if self._is_shared else per_token[self._sources]
        shape = (len(self), self.width, *per_token.shape[1:])
        out = per_token.new_full((shape[0] * shape[1], *shape[2:]), fill)
        return out.index_copy(0, self._places, values).view(shape)

    def to(self, device: torch.device | str) -> PrefixBatch:
        """The same batch on another device."""
        if torch.device(device) == self.device:
            return self
        moved = copy.copy(self)
        moved.device = torch.device(device)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name not in _ON_THE_HOST:
                setattr(moved, name, value.to(device))
        return moved

    def split(self, max_tokens: int) -> list[PrefixBatch]:
        """Parts of at most ``max_tokens`` rows each that keep what shares a prompt together, few by best fit.

        A group that is larger than the limit is cut below what it shares, between the branches of a tree,
        and only then is its prompt computed again.  A part may exceed the limit by one sample that does so
        alone; whatever begins it, such as its earlier turns, stays with it.  The parts are in the order of
        their first samples; ``samples`` of a part are the numbers in this batch's ``samples``.
        """
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"max_tokens must be an integer >= 1, got {max_tokens!r}")
        if max_tokens not in self._parts:
            self._parts[max_tokens] = parts.parts(self._tree, max_tokens)
        return [self.select(part) for part in self._parts[max_tokens]]

    def balance(self, ranks: int, *, pair_cost: float = 0.0) -> list[PrefixBatch]:
        """One batch for each of several ranks, of nearly equal cost, that keep what shares a prompt together.

        A row costs 1, and ``pair_cost`` for each row that it sees: ``7 Hq D / (3 w)`` for a model with w
        weights a layer, which does 6 operations a weight and row, and ``14 Hq D`` a pair of rows.  A group is
        cut only if it costs more than a rank's share.  Ranks for which nothing is left get a batch without
        samples.  Every rank must be given the same batch; nothing is communicated.

        Raises:
            ValueError: ``ranks`` is no integer >= 1, or ``pair_cost`` no finite number >= 0.
        """
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise ValueError(f"ranks must be an integer >= 1, got {ranks!r}")
        if not isinstance(pair_cost, (int, float)) or not 0 <= pair_cost < math.inf:
            raise ValueError(f"pair_cost must be a finite number >= 0, got {pair_cost!r}")
        return [self.select(part) for part in parts.balanced(self._tree, ranks, pair_cost)]

    def select(self, samples: Sequence[int]) -> PrefixBatch:
        """The batch of some samples, given by their place in this batch; ``samples`` are their numbers here.

        Raises:
            ValueError: a place that this batch does not have.
        """
        try:
            places = [operator.index(n) for n in samples]
        except TypeError:
            places = [-1]
        if any(not 0 <= n < len(self) for n in places):
            raise ValueError(f"samples must be places in [0, {len(self)}), got {samples!r:.80}")
        numbers = self.samples[torch.tensor(places, dtype=torch.int64, device="cpu")]
        return PrefixBatch(self._tree.select(places), width=self.width, samples=numbers, device=self.device)

    def one_row(self) -> PrefixBatch:
        """The smallest batch with a label, for a rank that must call the model as often as others do."""
        token = self._tree.tokens[:1].tolist() or [0]
        return PrefixBatch.pack([token], [[token]], device=self.device)

    def with_last_tokens(self) -> tuple[PrefixBatch, Tensor]:
        """The batch with a row for every sample's last token too, and which of its labels are this batch's.

        A last token predicts nothing, but a mixture of experts routes it.  One more token behind each sample
        gives the token before it a row, whose label means nothing: ``labels[keep]`` are this batch's.
        """
        tree = self._tree
        tokens = list(tree.tokens.split(list(tree.lengths)))
        parents, completion = list(tree.parents), list(tree.completion)
        last: dict[int, int] = {}  # end of a sample -> the node of its one token more
        for end in tree.ends:
            if end not in last:
                last[end] = len(tokens)
                tokens.append(tree.tokens.new_zeros(1))
                parents.append(end)
                completion.append(True)
        labelled = tuple((*tree.predicted(n), last[end]) for n, end in enumerate(tree.ends))
        ends = [last[end] for end in tree.ends]
        longer = PrefixBatch(Tree.of(tokens, parents, completion, ends, labelled), device=self.device)
        keep = torch.ones(longer.labels.numel(), dtype=torch.bool, device="cpu")
        for node in last.values():
            if node in longer._rows.label_runs:
                keep[slice(*longer._rows.label_runs[node])] = False
        return longer, keep.to(self.device)

    def token_counts(self) -> Tensor:
        """How many samples hold the token of each row: [T] int64, of a batch ``with_last_tokens``."""
        tree, nodes = self._tree, self._rows.nodes
        counts = [0] * len(tree.lengths)
        for end in tree.ends:
            counts[end] += 1
        for i in reversed(range(len(counts))):
            if tree.parents[i] >= 0:
                counts[tree.parents[i]] += counts[i]
        lengths = torch.tensor(
            [end - first for first, end in nodes.values()], dtype=torch.int64, device="cpu"
        )
        found = torch.tensor([counts[i] for i in nodes], dtype=torch.int64, device="cpu")
        return found.repeat_interleave(lengths).to(self.device)


class _Shared(torch.autograd.Function):
    """Values of labels to samples, where several samples share a label; gradients summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, per_token: Tensor, batch: PrefixBatch) -> Tensor:
        ctx.batch = batch
        return per_token[batch._sources]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        batch = ctx.batch
        wide = torch.promote_types(grad.dtype, torch.float32)
        sorted_grad = grad[batch._by_source].to(wide)
        summed = torch.segment_reduce(sorted_grad, "sum", lengths=batch._uses, unsafe=True, initial=0)
        return summed.to(grad.dtype), None
