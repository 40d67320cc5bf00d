"""A vocabulary that ranks share out, as ``logprob`` and ``linear_logprob`` take it: groups and DTensors."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import LinearLogprobCall
from rlkernel.calls.logprob import LogprobCall
from rlkernel.drivers import vocab_parallel
from rlkernel.drivers.rank_tree import SEGMENTS, bytes_of, segments_of
from rlkernel.ops import _validate
from rlkernel.runtime import debug, invariance

# A mesh dimension of such a name splits the vocabulary; over any other weights are split as FSDP does.
VOCAB_DIMENSIONS = ("tp", "vocab")

# What all ranks are asked alike.
SHARED = (
    "target_ids", "temperature", "ignore_index", "return_entropy", "logit_scale", "softcap", "logits_dtype",
    "input_scheme", "input_group", "input_scale",
)  # fmt: skip


def named(group: Any, vocab_start: int | None) -> tuple[str | None, int]:
    """The name of the group, None where it has one rank; and the first entry of this one."""
    if group is None:
        if vocab_start is not None:
            raise ValueError(f"vocab_start must be None without a group, got {vocab_start}")
        return None, 0
    if not (torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)):
        raise ValueError(f"group must be a torch.distributed process group, got {type(group).__name__}")
    if vocab_start is None:
        raise ValueError("vocab_start must be given with group: the first vocabulary entry of this rank")
    if vocab_start < 0:
        raise ValueError(f"vocab_start must be >= 0, got {vocab_start}")
    if group.size() == 1 and vocab_start:
        raise ValueError(f"vocab_start must be 0 on the only rank of group, got {vocab_start}")
    return (group.group_name if group.size() > 1 else None), vocab_start


def no_support(support_ids: Tensor | None, group: str | None) -> None:
    if group is not None and support_ids is not None:
        raise ValueError("support_ids must be None with group, got a tensor")


def parts_of(group: str | None, vocab_start: int, vocab: int, *, whole: bool = False) -> int:
    """Into how many the ``vocab`` entries here are cut, so that no number of ranks shows in a sum over all.

    1 but under the level "tensor_parallel", and there for a ``whole`` vocabulary that is not to be cut; 0
    where ranks have shares that ``check`` refuses.
    """
    if not _is_for_any_number_of_ranks():
        return 1
    if group is None:
        return 1 if whole else segments_of(vocab)
    members = vocab_parallel.group_of(group)
    ranks = members.size()
    even = SEGMENTS % ranks == 0 == vocab * ranks % SEGMENTS and vocab_start == members.rank() * vocab
    return SEGMENTS // ranks if even and vocab else 0


def _is_for_any_number_of_ranks() -> bool:
    return invariance.is_on() and invariance.settings[-1].level == "tensor_parallel"


def _refuse_uneven(spans: Sequence[tuple[int, int]]) -> None:
    want = f"equal parts, in the order of 2, 4 or 8 ranks, of a vocabulary that {SEGMENTS} divides"
    inside = "inside rlkernel.batch_invariant(level='tensor_parallel')"
    shards = ", ".join(f"[{a}, {b})" for a, b in spans)
    raise ValueError(f"vocab_start must share out {want}, {inside}, got the shards {shards}")


def check(call: LogprobCall | LinearLogprobCall, vocab: int) -> None:
    """Looks at what the ranks hold, and at the targets: on a CPU, and on a GPU in debug mode."""
    if not debug.may_read(call.target_ids):
        if call.parts == 0:
            _refuse_uneven([(call.vocab_start, call.vocab_start + vocab)])
        return
    shared = {name: value for name, value in call._asdict().items() if name in SHARED}
    facts = vocab_parallel.facts(call, vocab, *map(digest, shared.values()))
    _, _, rows, *others = zip(*facts, strict=True)
    if len(set(rows)) > 1:
        want = "the same number of rows on every rank of group"
        raise ValueError(f"target_ids must be {want}, got {list(rows)}")
    same(shared, others)
    spans = [(start, start + size) for start, size, *_ in facts]
    end = size_of(spans)
    sizes = {b - a for a, b in spans}
    uneven = len(sizes) > 1 or end % SEGMENTS or SEGMENTS % len(spans) or spans != sorted(spans)
    if uneven and _is_for_any_number_of_ranks():
        _refuse_uneven(spans)
    _validate.values(call.target_ids, end, call.temperature, call.ignore_index)


def same(shared: Mapping[str, Any], digests: Sequence[Sequence[int]]) -> None:
    """Of each argument, its digest on each rank."""
    for (name, value), of_ranks in zip(shared.items(), digests, strict=True):
        if len(set(of_ranks)) > 1:
            raise ValueError(f"{name} must be the same on every rank of group, got here {value!r}")


def digest(value: Any) -> int:
    """The same for the same values."""
    if isinstance(value, Tensor):
        x = value.detach().cpu().reshape(-1)
        kind = f"{x.dtype} {tuple(value.shape)}".encode()
        return zlib.crc32(bytes_of(x).numpy().tobytes(), zlib.crc32(kind))
    if isinstance(value, Mapping):
        value = sorted(value.items(), key=repr)
    if isinstance(value, (tuple, list)):
        return zlib.crc32(repr([digest(part) for part in value]).encode())
    return zlib.crc32(repr(value).encode())


def size_of(spans: Sequence[tuple[int, int]]) -> int:
    """The entries of the whole vocabulary, of those that the ranks have from one to another."""
    end = 0
    for start, behind in sorted(spans):
        if start != end:
            shards = ", ".join(f"[{a}, {b})" for a, b in spans)
            raise ValueError(f"vocab_start must follow the entries of another rank, got the shards {shards}")
        end = behind
    return end


def is_dtensor(x: Any) -> bool:
    return hasattr(x, "device_mesh") and hasattr(x, "full_tensor")


def local_logits(logits: Tensor, group: Any, vocab_start: int | None) -> tuple[Tensor, Any, int | None]:
    """Logits of this rank, their group and its first entry; of a DTensor they are told by its placements."""
    if not is_dtensor(logits):
        return logits, group, vocab_start
    whole: Any = logits
    split = [i for i, p in enumerate(whole.placements) if p.is_shard(logits.dim() - 1)]
    if len(split) > 1 or any(p.is_partial() for p in whole.placements):
        raise ValueError(f"logits must be split over the vocabulary once, got {whole.placements}")
    if not split:
        return whole.to_local(), group, vocab_start
    found, start = _place(whole, split[0], logits.shape[-1], group, vocab_start)
    return whole.to_local(), found, start


def local_head(
    weight: Tensor, bias: Tensor | None, group: Any, vocab_start: int | None, prefix: str = ""
) -> tuple[Tensor, Tensor | None, Any, int | None]:
    """The rank's part of an lm_head, its group and its first entry.  ``prefix``: of the names in errors.

    What data parallelism splits is gathered, and its gradient averaged over those ranks, as FSDP does it:
    ``full_tensor()`` alone would leave every rank the gradient of its own rows.
    """
    if not is_dtensor(weight):
        if is_dtensor(bias):
            raise ValueError(f"{prefix}bias must be a plain tensor as {prefix}weight is one, got a DTensor")
        return weight, bias, group, vocab_start
    if bias is not None and not is_dtensor(bias):
        raise ValueError(f"{prefix}bias must be a DTensor as {prefix}weight is one, got a plain tensor")
    whole: Any = weight
    dimension = _vocab_dimension(whole, group)
    vocab = weight.shape[0]
    weight, bias = _part(whole, dimension), None if bias is None else _part(bias, dimension)
    if dimension is None:
        return weight, bias, group, vocab_start
    return weight, bias, *_place(whole, dimension, vocab, group, vocab_start)


def _vocab_dimension(weight: Any, group: Any) -> int | None:
    """The dimension of the mesh over which ranks share the vocabulary and have the same rows."""
    mesh, names = weight.device_mesh, weight.device_mesh.mesh_dim_names or ()
    if group is None:
        found = [i for i, name in enumerate(names) if name in VOCAB_DIMENSIONS]
    else:
        found = [i for i in range(mesh.ndim) if mesh.get_group(i).group_name == group.group_name]
        if not found:
            raise ValueError(f"group must be one of the mesh of weight {mesh}, got {group.group_name}")
    found = [i for i in found if weight.placements[i].is_shard(0)]
    return found[0] if found else None


def _part(whole: Any, dimension: int | None) -> Tensor:
    from torch.distributed.tensor import Partial, Replicate, Shard

    count = whole.device_mesh.ndim
    here: list[Any] = [Shard(0) if i == dimension else Replicate() for i in range(count)]
    grads: list[Any] = [Shard(0) if i == dimension else Partial("avg") for i in range(count)]
    return whole.redistribute(placements=here).to_local(grad_placements=grads)


def _place(whole: Any, dimension: int, vocab: int, group: Any, vocab_start: int | None) -> tuple[Any, int]:
    mesh = whole.device_mesh
    start = min(mesh.get_local_rank(dimension) * -(-vocab // mesh.size(dimension)), vocab)
    if vocab_start not in (None, start):
        raise ValueError(f"vocab_start must be {start}, as the DTensor is split, got {vocab_start}")
    return mesh.get_group(dimension) if group is None else group, start
