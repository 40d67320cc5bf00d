"""Prompts and their completions packed into one row of tokens, each shared token once."""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel.prefix_layout import PrefixLayout, ranges
from rlkernel.prefix_tree import Tree, padded, same_prompt, tokens_of

_ON_THE_HOST = ("samples", "completion_lengths")


class PrefixBatch:
    """A batch for models whose attention is ``prefix_shared_attention``: ``[prompts | completions]``.

    A group of G completions of L tokens after a prompt of P tokens runs on ``P - 1 + G * L`` rows, not on
    ``G * (P + L)``.  The last token of what is shared stands in front of every continuation instead, and a
    completion's last token, which predicts nothing, is left out: so every row of the completions predicts
    exactly one token, in order, no row of the prompts does, and the lm_head runs on one view of the hidden
    states, ``completion_rows``.

    Make one with ``pack``, ``pack_tree`` or ``from_padded``.

    Attributes:
        input_ids, position_ids: [1, T] int64.
        labels: [M] int64: the token that row ``n_prefix + m`` predicts.
        n_prefix: rows of prompts, in front.
        layout: PrefixLayout: who sees whom.
        samples: [N] int64 on the CPU: which of the samples given these are; ``split`` keeps their numbers.
        completion_lengths: [N] int64 on the CPU: tokens of each sample that are predicted, the first one
            also where nothing stands in front of it.
        tokens_dense: tokens of all samples, each with its own copy of the prompt.
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
        self.samples = torch.arange(len(tree.ends)) if samples is None else samples
        self._build()
        self._index_samples(width)

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

    # the rows

    def _build(self) -> None:
        tree = self._tree
        first = tree.starts
        # Whatever no sample's label depends on is left out: prompts without completions.
        labelled = [c and n > 0 for c, n in zip(tree.completion, tree.lengths, strict=True)]
        for i in reversed(range(len(labelled))):
            if labelled[i] and tree.parents[i] >= 0:
                labelled[tree.parents[i]] = True
        before: list[int] = []  # where the token in front of each node stands, -1 without one
        runs: list[list[tuple[int, int]]] = []
        labels: list[tuple[int, int]] = []
        rows: list[int] = []
        for i, (length, parent) in enumerate(zip(tree.lengths, tree.parents, strict=True)):
            ahead = -1
            if parent >= 0:
                ahead = first[parent + 1] - 1 if tree.lengths[parent] else before[parent]
            before.append(ahead)
            body = [(ahead, ahead + 1)] if ahead >= 0 else []
            body.append((first[i], first[i + 1] - 1))
            if not length or not labelled[i]:
                body = []
            runs.append(body)
            rows.append(sum(end - start for start, end in body))
            labels.append((first[i] + (ahead < 0), first[i + 1]) if body else (first[i], first[i]))
        self.layout, place = PrefixLayout.of(rows, tree.parents, tree.completion)
        order = sorted((s, i) for i, s in enumerate(place) if s >= 0)
        source = ranges([run for _, i in order for run in runs[i] if run[1] > run[0]])
        self.n_prefix = self.layout.n_prefix
        self.input_ids = tree.tokens[source][None].to(self.device)
        self.position_ids = self.layout.row_tables().pos.long()[None].to(self.device)
        predicted = [i for _, i in order if tree.completion[i]]
        self.labels = tree.tokens[ranges([labels[i] for i in predicted])].to(self.device)
        ends = itertools.accumulate(rows[i] for i in predicted)
        self._label_rows = {i: (end - rows[i], end) for i, end in zip(predicted, ends, strict=True)}

    def _index_samples(self, width: int | None) -> None:
        """For each label of each sample: where ``unpack`` puts it, and which row's it is."""
        tree = self._tree
        lengths, dense, skipped = [], 0, []
        sources: list[tuple[int, int]] = []
        for end in tree.ends:
            path = [end]
            while tree.parents[path[-1]] >= 0:
                path.append(tree.parents[path[-1]])
            own = [i for i in reversed(path) if tree.completion[i]]
            length = sum(tree.lengths[i] for i in own)
            lengths.append(length)
            dense += sum(tree.lengths[i] for i in path)
            runs = [self._label_rows[i] for i in own if i in self._label_rows]
            sources += runs
            skipped.append(length - sum(b - a for a, b in runs))  # 1 where nothing stands in front
        self.completion_lengths = torch.tensor(lengths, dtype=torch.int64)
        self.tokens_dense = dense
        self.width = max(lengths, default=0) if width is None else width
        places = ranges(
            [
                (n * self.width + skip, n * self.width + length)
                for n, (length, skip) in enumerate(zip(lengths, skipped, strict=True))
            ]
        )
        self._places = places.to(self.device)
        self._sources = ranges(sources)
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
        """The rows that have a label: [M, ...] of [1, T, ...] or [T, ...], a view."""
        rows = hidden[0] if hidden.shape[:2] == (1, self.total) else hidden
        if rows.shape[:1] != (self.total,):
            raise ValueError(
                f"hidden must have the batch's {self.total} rows, got shape {tuple(hidden.shape)}"
            )
        return rows[self.n_prefix :]

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
        """Parts of at most ``max_tokens`` rows each, in order, that keep what shares a prompt together.

        A group that is larger than the limit is cut between its completions, and only then is its prompt
        computed again; one sample alone may exceed the limit.  ``samples`` of a part are the numbers in this
        batch's ``samples``.
        """
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"max_tokens must be an integer >= 1, got {max_tokens!r}")
        return [self.select(part) for part in self._tree.parts(max_tokens)]

    def select(self, samples: Sequence[int]) -> PrefixBatch:
        """The batch of some samples, given by their place in this batch; ``samples`` are their numbers here.

        Raises:
            ValueError: a place that this batch does not have.
        """
        if any(not 0 <= n < len(self) for n in samples):
            raise ValueError(f"samples must be places in [0, {len(self)}), got {list(samples)}")
        numbers = self.samples[torch.tensor(list(samples), dtype=torch.int64)]
        return PrefixBatch(self._tree.select(samples), width=self.width, samples=numbers, device=self.device)

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
        more = tree.tokens.new_zeros(1)
        ends, longer_nodes = [], set()
        for end in tree.ends:
            if not completion[end]:  # a prompt that nothing continues
                tokens.append(more)
                parents.append(end)
                completion.append(True)
                end = len(tokens) - 1
            elif end not in longer_nodes:
                tokens[end] = torch.cat([tokens[end], more])
            longer_nodes.add(end)
            ends.append(end)
        longer = PrefixBatch(Tree.of(tokens, parents, completion, ends), device=self.device)
        keep = torch.ones(longer.labels.numel(), dtype=torch.bool)
        for end in longer_nodes & longer._label_rows.keys():
            keep[longer._label_rows[end][1] - 1] = False
        return longer, keep.to(self.device)

    def token_counts(self) -> Tensor:
        """How many samples hold the token of each row: [T] int64, of a batch ``with_last_tokens``."""
        layout = self.layout
        counts = [0] * len(layout.lengths)
        for end in self._tree.ends:
            if end in self._label_rows:  # else it has no tokens at all
                last = self.n_prefix + self._label_rows[end][1] - 1
                counts[bisect.bisect_right(layout.starts, last) - 1] += 1
        for s in reversed(range(len(counts))):
            if layout.parents[s] >= 0:
                counts[layout.parents[s]] += counts[s]
        lengths = torch.tensor(layout.lengths, dtype=torch.int64)
        return torch.tensor(counts, dtype=torch.int64).repeat_interleave(lengths).to(self.device)


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
