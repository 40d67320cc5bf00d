"""Attention of an engine's step on a paged KV cache, blocks that requests share read once for all of them."""

from types import ModuleType
from typing import Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from rlkernel import dispatch
from rlkernel.calls.paged_prefix_attention import PagedCall, PagedPlan, PagedResults, PagedRule
from rlkernel.opaque import Op
from rlkernel.ops import _validate
from rlkernel.ops._options import PagedAttentionOptions
from rlkernel.ops._typed import typed
from rlkernel.prefix import paged
from rlkernel.runtime.modes import without_autocast

# flashinfer's bits depend on what else is in the batch: it runs where it is asked for by name
ORDER = ("native", "triton", "reference")
_INT32 = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max


@overload
def paged_prefix_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[PagedAttentionOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def paged_prefix_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PagedAttentionOptions],
) -> Tensor: ...


@overload
def paged_prefix_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[PagedAttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


@typed
def paged_prefix_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    plan: PagedPlan | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the rows of each request to its keys in a paged cache; shared leading blocks are read once.

    Request b has the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``, which are its last positions, and
    its key at position j stands in row ``j % block_size`` of block ``block_table[b, j // block_size]``.
    Equal to, for row i of head h, at position pos[i], which reads K/V head ``h * Hkv // Hq``, over the keys j
    of its request with ``0 <= pos[i] - j < window``,

        s_ij = softcap * tanh(scale * q_i . k_j / softcap)          scale * q_i . k_j without a softcap
        lse_i = log(sum_j exp(s_ij) + exp(sinks[h]))                without the last term without sinks
        out_i = sum_j exp(s_ij - lse_i) * v_j

    which is FlashAttention's and vLLM's paged varlen call, causal.  Requests share what their tables show:
    leading blocks of the same number hold the same keys.  Forward only.

    Args:
        query: [T, Hq, D] fp16, bf16, fp32 or fp64.
        key_cache, value_cache: [blocks, block_size, Hkv, D] and [blocks, block_size, Hkv, Dv] of the same
            dtype, with any strides; Hq is a multiple of Hkv.
        block_table: [B, max_blocks] int32; entries behind a request's last key, and in front of its window,
            may be anything.
        seq_lens: [B] int32: keys of each request, those of its rows included.
        cu_seqlens_q: [B + 1] int32, from 0 to T.
        scale: None means ``1 / sqrt(D)``.
        window: how many positions a row sees, itself included; None means all.  FlashAttention's left window
            is one less.
        softcap: > 0, or None.
        sinks: [Hq], a logit beside each row's that takes weight and gives nothing (gpt-oss).
        plan: ``paged_prefix_plan`` of the same tables and window, which the layers of a step share; None
            makes one, which reads the tables, so it synchronises on a GPU.
        return_lse: also return ``lse`` [Hq, T] in natural log, fp32 (fp64 for fp64), the sinks included.

    Returns:
        out [T, Hq, Dv] in the query's dtype, or (out, lse).

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.

    Sharing the reading follows Hydragen (arXiv 2402.05099) and FlashInfer's cascades.

    Examples:
        >>> cache = torch.randn(3, 16, 2, 8)
        >>> table, lengths = torch.tensor([[0, 1], [0, 2]]).int(), torch.tensor([20, 17]).int()
        >>> query, rows = torch.randn(2, 4, 8), torch.tensor([0, 1, 2]).int()
        >>> rlkernel.paged_prefix_attention(query, cache, cache, table, lengths, rows).shape
        torch.Size([2, 4, 8])
    """
    _check_tensors(query, key_cache, value_cache, sinks)
    block_table, seq_lens, cu_seqlens_q = _tables(block_table, seq_lens, cu_seqlens_q, query.device)
    rule = rule_of(query.shape[2], scale, softcap, window)
    if plan is None:
        if torch.compiler.is_compiling():
            raise ValueError("plan must be given under torch.compile, which cannot read the tables, got None")
        plan = paged_prefix_plan(block_table, seq_lens, cu_seqlens_q, key_cache.shape[1], window=window)
    _check_plan(plan, query, key_cache, seq_lens, rule)
    query = query if query.stride(2) == 1 else query.contiguous()
    out, lse = op(
        PagedCall(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, plan, rule, sinks)
    )
    return (out, lse) if return_lse else out


@typed
def paged_prefix_plan(
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    block_size: int,
    *,
    window: int | None = None,
    device: torch.device | str | None = None,
) -> PagedPlan:
    """What ``paged_prefix_attention`` reads together, of tables that lie on the host.

    Made once a step and for each window that layers have.  Tables on a GPU are read from there, which
    synchronises: engines have them on the host too.

    Args:
        block_table, seq_lens, cu_seqlens_q, window: those of ``paged_prefix_attention``.
        block_size: keys of a block.
        device: where the plan is used; None means where ``block_table`` lies.

    Returns:
        PagedPlan; ``keys_read`` and ``keys_apart`` tell what sharing saves.

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.

    Examples:
        >>> table = torch.cat([torch.arange(64).repeat(8, 1), torch.arange(64, 72)[:, None]], 1).int()
        >>> lengths, rows = torch.full((8,), 64 * 16 + 1).int(), torch.arange(9).int()
        >>> plan = rlkernel.paged_prefix_plan(table, lengths, rows, block_size=16)
        >>> plan.keys_read, plan.keys_apart
        (1032, 8200)
    """
    block_table, seq_lens, cu_seqlens_q = _tables(block_table, seq_lens, cu_seqlens_q, block_table.device)
    try:
        place = block_table.device if device is None else torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"device must be a torch.device or the name of one, got {device!r}") from error
    if block_size < 1:
        raise ValueError(f"block_size must be >= 1, got {block_size}")
    for name, x in (("block_table", block_table), ("seq_lens", seq_lens), ("cu_seqlens_q", cu_seqlens_q)):
        _validate.readable(name, x, "make the plan of tables that have them")
    table, lens, starts = block_table.cpu(), seq_lens.tolist(), cu_seqlens_q.tolist()
    if starts[0] != 0:
        raise ValueError(f"cu_seqlens_q must begin with 0, got {starts[0]}")
    room = table.shape[1] * block_size
    for b, length in enumerate(lens):
        rows = starts[b + 1] - starts[b]
        if rows < 0:
            _validate.rising("cu_seqlens_q", cu_seqlens_q)
        if length < rows:
            raise ValueError(f"seq_lens[{b}] must be at least the request's {rows} rows, got {length}")
        if rows and length > room:
            raise ValueError(f"seq_lens[{b}] must be at most {room}, the keys of its blocks, got {length}")
    return paged.on(paged.plan_of(table, lens, starts, block_size, _window(window)), place)


def rule_of(head_dim: int, scale: float | None, softcap: float | None, window: int | None) -> PagedRule:
    return PagedRule(_option("scale", scale) or head_dim**-0.5, _option("softcap", softcap), _window(window))


def _check_tensors(query: Tensor, key_cache: Tensor, value_cache: Tensor, sinks: Tensor | None) -> None:
    for name, x, dims, shape in (
        ("query", query, 3, "[T, Hq, D]"),
        ("key_cache", key_cache, 4, "[blocks, block_size, Hkv, D]"),
        ("value_cache", value_cache, 4, "[blocks, block_size, Hkv, Dv]"),
    ):
        _validate.constant(name, x)
        if x.dim() != dims or 0 in x.shape[1:]:
            raise ValueError(f"{name} must be {shape}, each but the first >= 1, got {tuple(x.shape)}")
        if x.dtype != query.dtype:
            want, got = _validate.name(query.dtype), _validate.name(x.dtype)
            raise ValueError(f"{name} must have query's dtype {want}, got {got}")
        _validate.same_device(name, x, "query", query.device)
    if key_cache.shape[3] != query.shape[2]:
        raise ValueError(f"key_cache must have query's head dim {query.shape[2]}, got {key_cache.shape[3]}")
    if value_cache.shape[:3] != key_cache.shape[:3]:
        want = f"[{', '.join(map(str, key_cache.shape[:3]))}, Dv], as key_cache"
        raise ValueError(f"value_cache must be {want}, got {tuple(value_cache.shape)}")
    if query.shape[1] % key_cache.shape[2]:
        want = f"a multiple of the {key_cache.shape[2]} heads of key_cache"
        raise ValueError(f"query must have {want}, got {query.shape[1]}")
    if sinks is not None:
        _validate.constant("sinks", sinks)
        _validate.same_device("sinks", sinks, "query", query.device)
        if sinks.shape != query.shape[1:2]:
            raise ValueError(
                f"sinks must have shape ({query.shape[1]},), one a head, got {tuple(sinks.shape)}"
            )


def _tables(
    block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, device: torch.device
) -> tuple[Tensor, ...]:
    """int32, dense."""
    found: list[Tensor] = []
    requests = block_table.shape[0] if block_table.dim() else 0
    for name, x, dims in (
        ("block_table", block_table, 2),
        ("seq_lens", seq_lens, 1),
        ("cu_seqlens_q", cu_seqlens_q, 1),
    ):
        if x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {_validate.name(x.dtype)}")
        wanted = ("[B, max_blocks]", "[B]", "[B + 1]")[len(found)]
        shape = x.shape
        if len(shape) != dims or shape[0] != requests + (name == "cu_seqlens_q"):
            raise ValueError(f"{name} must be {wanted} with B = {requests}, got {tuple(shape)}")
        if x.device != device:
            _validate.same_device(name, x, "query" if device != block_table.device else "block_table", device)
        if x.dtype == torch.int64:
            x = x.clamp(*_INT32)  # 2**32 would become 0, a block like any other
        found.append(_validate.dense(x, torch.int32))
    return tuple(found)


def _option(name: str, value: float | None) -> float:
    """0 for None."""
    if value is None:
        return 0.0
    return _validate.number(name, value, 0.0, above=True)


def _window(window: int | None) -> int:
    """0 for None."""
    if window is not None and window < 1:
        raise ValueError(f"window must be >= 1, or None, got {window}")
    return window or 0


def _check_plan(plan: PagedPlan, query: Tensor, key_cache: Tensor, seq_lens: Tensor, rule: PagedRule) -> None:
    if not isinstance(plan, PagedPlan):
        raise ValueError(f"plan must be a PagedPlan, got {type(plan).__name__}")
    for what, wanted, got in (
        ("rows, the query's", len(query), len(plan.rows)),
        ("requests, those of seq_lens", len(seq_lens), plan.requests),
        ("keys in a block, those of key_cache", key_cache.shape[1], plan.block_size),
        ("positions in the window, 0 for all", rule.window, plan.window),
    ):
        if wanted != got:
            raise ValueError(f"plan must be of {wanted} {what}, got {got}")
    if plan.highest_page >= len(key_cache):
        blocks = f"the {len(key_cache)} blocks of key_cache"
        raise ValueError(f"block_table must be below {blocks} where a key is read, got {plan.highest_page}")
    _validate.same_device("plan", plan.items, "query", query.device)


def _pick(call: PagedCall) -> ModuleType:
    return dispatch.pick(
        "paged_prefix_attention", call.query, call.key_cache, call.value_cache, rule=call.rule, plan=call.plan
    )


def _forward(impl: ModuleType, call: PagedCall) -> PagedResults:
    with without_autocast(call.query.device):  # the dtype is that of the tensors
        return impl.forward(call)


def _like(call: PagedCall) -> PagedResults:
    rows, heads, _ = call.query.shape
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    out = call.query.new_empty(rows, heads, call.value_cache.shape[3])
    return PagedResults(out, call.query.new_empty(heads, rows, dtype=dtype))


op = Op(
    "paged_prefix_attention",
    PagedCall,
    PagedResults,
    pick=_pick,
    forward=_forward,
    like=_like,
)
