"""The shapes that issue after issue is judged by, as launches of kernels: what ``predict`` reckons with.

A launch says what it must move and multiply; how well its code can do that says the ledger.
"""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlkernel.bench.cases import Case
from rlkernel.bench.devices import Device
from rlkernel.calls.linear_logprob import Head
from rlkernel.calls.paged_prefix_attention import ITEM, PagedPlan
from rlkernel.drivers import linear_tiles
from rlkernel.drivers.linear_products import Scratch
from rlkernel.prefix.paged import plan_of

N, H, V = 8192, 4096, 151936
BF16 = 2


@dataclass(frozen=True)
class Launch:
    """One kernel, or ``times`` of them one after the other.

    ``kernel`` is what the ledger calls it, by the part that has it; a part that a device has none of is left
    out.  None is a product of the vendor's library.  ``alone`` is what each of ``blocks`` of ``warps`` reads
    without help: a few blocks on many multiprocessors are as slow as one.  ``beside``: as many of them share
    a multiprocessor as their registers and shared memory allow, each with the loads of ``ahead`` turns on
    their way, behind ``lead`` loads of which one waits for the other and ``waits`` seconds of other waits.
    ``turn``: bytes that a lane reads in a turn, where the code has several ways to read them and the ledger
    counts more than one.  ``issued``: instructions of a warp for a turn, in all loops over what it reads, of
    which the ledger has but one; each waits for some before it.  ``again``: another kernel has just read it
    all, and the L2 has it where it fits.
    """

    name: str
    kernel: dict[str, str] | None
    read: float = 0.0  # bytes, of all times together
    written: float = 0.0
    flops: float = 0.0
    times: int = 1
    blocks: int = 0  # of all times together
    waves: int = 0  # in which they run, a block on a multiprocessor; 0: what blocks at a time fill
    warps: int = 0
    alone: float = 0.0
    beside: bool = False
    ahead: int = 1
    lead: int = 0
    waits: float = 0.0
    turn: int = 0
    issued: float = 0.0
    again: bool = False
    apart: bool = False  # products wait for what stands between them, with no other warps to fill in


@dataclass(frozen=True)
class Headline:
    """A call; ``case``, ``backend`` and ``direction`` are those of the report that measures it."""

    op: str
    case: Case
    direction: str
    backend: str
    note: str
    launches: Callable[[Device], list[Launch]]


def _compiled(name: str) -> dict[str, str]:
    """Of csrc: one source for both vendors."""
    return {"cuda": name, "hip": name}


def _logprob(device: Device) -> list[Launch]:
    return [Launch("forward", _compiled("logprob: forward_kernel<bf16, 0, 1>"), read=N * V * BF16)]


def _logprob_backward(device: Device) -> list[Launch]:
    name = "logprob: backward_kernel<bf16, bf16, 0>"
    return [*_logprob(device), Launch("backward", _compiled(name), read=N * V * BF16, written=N * V * BF16)]


@dataclass(frozen=True)
class _Tiled:
    """linear_logprob in tiles of ``rows`` rows, by the plans that the op itself makes for a GPU."""

    rows: int

    def tile(self, backward: bool = False) -> tuple[int, int]:
        """Tokens and vocabulary of a tile."""
        plan = self.backward_of_kept() if backward else None
        if plan is None:
            make = linear_tiles.backward_plan if backward else linear_tiles.tile_plan
            plan = make(*_WEIGHT, self.rows)  # type: ignore[arg-type]
        return min(plan.tokens, self.rows), min(plan.vocab, V)

    def spans(self, backward: bool = False) -> list[tuple[int, int]]:
        tokens, vocab = self.tile(backward)
        return [(n, v) for n in _spans(self.rows, tokens) for v in _spans(V, vocab)]

    def backward_of_kept(self) -> linear_tiles.Tile | None:
        """The tile of a backward pass over logits that the workspace kept; None: it has no room for them."""
        weight, head = _WEIGHT
        hidden = types.SimpleNamespace(**{**vars(weight), "shape": (self.rows, H)})
        scratch = Scratch(hidden, weight, head, self.rows, False, gradients=False, keep=True)  # type: ignore[arg-type]
        return scratch.backward_of_kept

    def products(
        self, name: str, device: Device, count: int, moved: float = 0.0, backward: bool = False
    ) -> Launch:
        """``count`` GEMMs of a tile for every tile, in blocks of 128 x 256, the last wave of each not full.

        ``moved``: what is read and written beside the weight, which every chunk of rows reads, and whose
        gradient is written.
        """
        spans = self.spans(backward)
        blocks = [-(-n // 128) * -(-v // 256) for n, v in spans]
        waves = sum(-(-each // device.multiprocessors) for each in blocks)
        weight = V * H * BF16 * len(_spans(self.rows, self.tile(backward)[0]))
        gradients = weight if count > 1 else 0
        return Launch(
            name, None, read=moved + weight * count - gradients, written=moved + gradients,
            flops=2 * self.rows * H * V * count, times=len(spans) * count, blocks=sum(blocks), waves=waves,
        )  # fmt: skip

    def forward(self, device: Device) -> list[Launch]:
        tokens, vocab = self.tile()
        kernel = _compiled("logprob: forward_kernel<float, 0, 0>")
        read = 0.0 if tokens * vocab * 4 < device.cache else self.rows * V * 4  # what the GEMM left in the L2
        rows = Launch("rows of tiles", kernel, read=read, times=len(self.spans()))
        return [self.products("logits", device, 1), rows]

    def train(self, device: Device) -> list[Launch]:
        kernel = _compiled("logprob: backward_kernel<float, bf16, 0>")
        kept = self.backward_of_kept() is not None
        # gradients in fp32 are read and written again: the weight's by every chunk of tokens, where there are
        # several, that of the hidden states by every slice of the vocabulary
        tokens, vocab = self.tile(backward=True)
        chunks, slices = len(_spans(self.rows, tokens)), len(_spans(V, vocab))
        gradient = 4.0 * H * ((V * chunks if chunks > 1 else 0) + self.rows * slices)
        name, count = ("hidden, weight", 2) if kept else ("logits, hidden, weight", 3)
        size = self.rows * V
        times = len(self.spans(backward=True))
        return [
            *self.forward(device),
            self.products(name, device, count, gradient, backward=True),
            Launch("rows of tiles again", kernel, read=size * 4, written=size * BF16, times=times),
        ]


_WEIGHT = (
    types.SimpleNamespace(
        device=torch.device("cuda"), shape=(V, H), dtype=torch.bfloat16, stride=lambda dim: 1
    ),
    Head(None, 1.0, 1.0, None, -100, torch.float32, torch.bfloat16),
)


def _spans(whole: int, part: int) -> list[int]:
    return [min(part, whole - start) for start in range(0, whole, part)]


def _linear_fused(device: Device) -> list[Launch]:
    name = {"triton": "linear_logprob: fused bf16: product_kernel"}
    merge = {"triton": "linear_logprob: fused bf16: merge_kernel"}
    tiles = -(-V // 256)  # which programs take one after the other, one program on a multiprocessor
    sums = 12.0 * N * tiles
    return [
        Launch("product", name, (N + V) * H * BF16, sums, 2 * N * H * V, blocks=N // 128 * tiles),
        Launch("merge", merge, read=sums),
    ]


def _linear_fused_backward(device: Device) -> list[Launch]:
    case = "linear_logprob: fused gradient bf16"
    of_logits = {"triton": f"{case}: logits_gradient_kernel"}
    of_hidden = {"triton": f"{case} entropy, in slices: gradient_product_kernel"}
    of_weight = {"triton": f"{case} of weight: gradient_product_kernel"}
    width = 50688  # that 1 GiB leaves for a slice
    slices = -(-V // width)
    blocks, flops = N // 128 * -(-V // 256), 2 * N * H * V
    return [
        *_linear_fused(device),
        Launch("gradient of logits", of_logits, (N + V) * H * BF16, N * V * BF16, flops, slices, blocks),
        Launch(
            "hidden", of_hidden, N * V * BF16, 8.0 * N * H * slices, flops, slices,
            slices * (N // 128) * (H // 128),
        ),
        Launch("weight", of_weight, N * V * BF16, V * H * BF16, flops, slices, V // 128 * (H // 256)),
    ]  # fmt: skip


def _sample(rows: int, filtered: bool) -> Callable[[Device], list[Launch]]:
    def launches(device: Device) -> list[Launch]:
        row = V * BF16
        read = Launch("statistics", _compiled("sampling: statistics_kernel<bf16, 0>"), read=rows * row)
        if not filtered:
            return [read, Launch("finish", _compiled("sampling: finish_kernel"), read=rows * V / 1024 * 80)]
        return [read, filter_launch(rows, device)]

    return launches


# Waits of a nucleus, each of which begins when the one before has ended: three reads for the statistics, the
# threshold, the masses of all (maxima, sums, bins), bins again within one bin, the prefix, the last of the
# ties (two reads and their sum), and the end. Those at which the blocks of a cluster meet: sums, bins of all,
# bins again, the ties' sum, the last of them, and the end.
FILTER_STEPS, FILTER_MEETINGS = 14, 6
# Instructions of a warp for 16 bytes of every lane of a row of randn * 3 at T = 0.8, of whose bf16 vectors
# 14% have a token of the nucleus, where the first token is not in it, as of some row of a batch. By the code
# for sm_90: 200 for the masses of all, 36 for the lists, and over these bins again (265), the ties (180), the
# last of them by one warp (172), the kept masses (370) and the draw by one warp (300). Code for AMD's GPUs
# has no lists, and bins what it meets: 300, and all other walks over all vectors.
FILTER_ISSUED = {32: 200 + 36 + 0.14 * (265 + 180 + 172 + 370 + 300), 64: 1600.0}


def filter_launch(rows: int, device: Device) -> Launch:
    """The rows once more, by clusters, blocks or half blocks as ``sampling/launch.cuh`` has it."""
    size = device.cluster
    # an H200 has no room for 32 clusters of 4: some of a GPC's multiprocessors are left over
    while size > 1 and rows * size > device.multiprocessors - (8 if size > 2 else 0):
        size //= 2
    waves = -(-rows // device.multiprocessors)
    threads = 256 if device.lanes == 32 and (waves % 2 == 0 or waves > 6) else 512
    meetings = FILTER_MEETINGS if size > 1 else 0
    return Launch(
        "filter", _compiled("sampling_bf16: filter_kernel<bf16>"), blocks=rows * size,
        warps=threads // device.lanes, alone=V * BF16 / size, beside=True, turn=16,
        issued=FILTER_ISSUED[device.lanes], again=True,
        waits=FILTER_STEPS * device.step + meetings * device.meeting,
    )  # fmt: skip


_PROMPT, _LENGTH, _GROUP, _HEADS, _KV_HEADS, _DIM = 4096, 512, 16, 32, 8, 128
_ROWS = _PROMPT - 1 + _GROUP * _LENGTH
_PAIRS = (_PROMPT - 1) * _PROMPT // 2 + _GROUP * (_LENGTH * (_PROMPT - 1) + _LENGTH * (_LENGTH + 1) // 2)
_PAIR_FLOPS = 4 * _HEADS * _DIM * _PAIRS  # q k and p v
_TENSORS = _ROWS * 2 * (_HEADS + _KV_HEADS) * _DIM * BF16


def _attention(device: Device) -> list[Launch]:
    name = {"triton": "prefix_shared_attention: bf16 D = 128: attention_forward_kernel"}
    return [Launch("forward", name, read=_TENSORS, flops=_PAIR_FLOPS, apart=True)]


def _attention_backward(device: Device) -> list[Launch]:
    case = "prefix_shared_attention: bf16 D = 128"
    queries = {"triton": f"{case}: attention_query_grad_kernel"}
    keys = {"triton": f"{case}: attention_key_grad_kernel"}
    delta = {"triton": f"{case}: attention_delta_kernel"}
    return [  # a kernel for the queries' gradients (q k, dp, dq), another for those of keys and values
        *_attention(device),
        Launch("delta", delta, read=_TENSORS / 2),
        Launch("gradients of queries", queries, read=_TENSORS, flops=1.5 * _PAIR_FLOPS, apart=True),
        Launch("gradients of keys", keys, read=_TENSORS, flops=2.0 * _PAIR_FLOPS, apart=True),
    ]


# samples, those of one prompt, its tokens; the last step is one of the benchmark
_STEPS = ((16, 8, 512), (16, 8, 4096), (64, 8, 1024), (64, 16, 8192), (256, 16, 8192), (128, 16, 4096))
_OWN = 256  # tokens that each sample of a prompt has by then
_PLACES = 64  # rows and query heads of a program


@functools.cache
def _step(samples: int, group: int, prompt: int) -> PagedPlan:
    """Of a decode: one row for each sample, ``group`` of them behind each prompt."""
    block = 16
    own, shared = _OWN // block, prompt // block
    width = shared + own
    tables = torch.arange(samples * width, dtype=torch.int32).view(samples, width)
    tables[:, :shared] = tables[: samples // group, :shared].repeat_interleave(group, 0)
    return plan_of(tables, [prompt + _OWN] * samples, list(range(samples + 1)), block, 0)


def _decode(samples: int, group: int, prompt: int) -> Callable[[Device], list[Launch]]:
    heads, kv_heads, dim = _HEADS, _KV_HEADS, _DIM
    state = heads * (dim + 2) * 4  # of a row: sums, top and total of each head
    key = 2 * kv_heads * dim * BF16

    def launches(device: Device) -> list[Launch]:
        plan = _step(samples, group, prompt)
        case = "paged_prefix_attention: bf16 D = 128"
        attend, merge = ({"triton": f"{case}: paged_{name}_kernel"} for name in ("attention", "merge"))
        found = []
        for first, end, *_ in plan.launches.tolist():
            columns = [dict(zip(ITEM, item, strict=True)) for item in plan.items[first:end].tolist()]
            rows = [item["end"] - item["first"] for item in columns]
            programs = [-(-n // (_PLACES * kv_heads // heads)) for n in rows]
            keys = [item["keys"] for item in columns]
            carried = sum(n for n, item in zip(rows, columns, strict=True) if item["carry"])
            multiplied = sum(n * m for n, m in zip(programs, keys, strict=True))
            blocks = sum(programs) * kv_heads
            items = Launch(
                "items", attend, read=sum(keys) * key + carried * state, written=sum(rows) * state,
                flops=4.0 * _PLACES * dim * kv_heads * multiplied, blocks=blocks,
                waves=-(-blocks // device.multiprocessors), warps=4, alone=multiplied * key / blocks,
                beside=True, ahead=2 if device.lanes == 32 else 1, lead=4,
            )  # fmt: skip
            found.append(items)
        chunks = len(plan.slots) // samples
        part = state * dim // heads // dim * 4  # of 4 heads
        merged = Launch(
            "merge", merge, read=len(plan.slots) * state, written=samples * heads * dim * BF16,
            blocks=samples * heads // 4, warps=4, alone=part * chunks, beside=True, lead=2 * -(-chunks // 4),
        )  # fmt: skip
        return [*found, merged]

    return launches


def _policy(device: Device) -> list[Launch]:
    tokens = 64 * 4096
    kernel = _compiled("policy_loss: policy_loss_kernel<0>")
    values = _compiled("policy_loss: policy_loss_values_kernel")
    loss = Launch(
        "sequences", kernel, read=13 * tokens, written=4 * tokens, blocks=64, warps=8, alone=13 * 4096
    )
    return [loss, Launch("values", values, blocks=1, warps=1, alone=64 * 80)]


def headlines() -> list[Headline]:
    entropy = {"temperature": 1.0, "return_entropy": True}
    logits = Case({"N": N, "V": V}, "bfloat16", entropy)
    linear = Case({"N": N, "H": H, "V": V}, "bfloat16", {"temperature": 0.8})
    policy = Case({"B": 64, "L": 4096})
    sizes = {"P": _PROMPT, "L": _LENGTH, "G": _GROUP, "Hq": _HEADS, "Hkv": _KV_HEADS, "D": _DIM}
    attention = Case(sizes, "bfloat16")
    found = [
        Headline("logprob", logits, "forward", "native", "", _logprob),
        Headline("logprob", logits, "forward+backward", "native", "", _logprob_backward),
        Headline("linear_logprob", linear, "forward", "native", "tiled", _Tiled(N).forward),
        Headline("linear_logprob", linear, "forward", "triton", "fused", _linear_fused),
        Headline("linear_logprob", linear, "forward+backward", "native", "tiled", _Tiled(N).train),
        Headline("linear_logprob", linear, "forward+backward", "triton", "fused", _linear_fused_backward),
        Headline("policy_loss", policy, "forward", "native", "", _policy),
    ]
    for rows in (256, 1024):
        case, tiled = linear.replace(sizes={"N": rows, "H": H, "V": V}), _Tiled(rows)
        found += [
            Headline("linear_logprob", case, "forward", "native", "tiled", tiled.forward),
            Headline("linear_logprob", case, "forward+backward", "native", "tiled", tiled.train),
        ]
    for rows in (1, 8, 32, 64, 128, 256):
        for note in ("unfiltered", "top_p 0.95"):
            options = {"temperature": 0.8} | ({} if note == "unfiltered" else {"top_p": 0.95})
            case = Case({"B": rows, "V": V}, "bfloat16", options, note=note)
            launches = _sample(rows, note != "unfiltered")
            found.append(Headline("sampling", case, "forward", "native", "", launches))
    for rows, group, prompt in _STEPS:
        sizes = {"P": prompt, "L": _OWN, "N": rows // group, "G": group}
        heads = {"Hq": _HEADS, "Hkv": _KV_HEADS, "D": _DIM}
        case, step = Case(sizes | heads, "bfloat16"), _decode(rows, group, prompt)
        found.append(Headline("paged_prefix_attention", case, "forward", "triton", "", step))
    return [
        *found,
        Headline("prefix_shared_attention", attention, "forward", "triton", "", _attention),
        Headline("prefix_shared_attention", attention, "forward+backward", "triton", "", _attention_backward),
    ]
