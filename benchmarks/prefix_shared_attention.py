"""``rlkernel.prefix_shared_attention`` against attention over repeated prompts.

Not here: PrefixGrouper, whose call through PyTorch's attention lets a prompt's tokens see later ones.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.reference import prefix_shared_attention as reference

# tokens of the prompt and of each completion, completions, heads, heads of K and V, elements of a head
DIMS = ("P", "L", "G", "Hq", "Hkv", "D")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {}
SHARED: tuple[str, ...] = ()
GRADIENTS = ("q", "k", "v")
WHOLE = True


def _case(p: int, length: int, g: int, hq: int, hkv: int, d: int, dtype: str = "float32") -> Case:
    sizes = {"P": p, "L": length, "G": g, "Hq": hq, "Hkv": hkv, "D": d}
    return Case(sizes, dtype, OPTIONS)


# (P, L, G); the last two have little to share
GRID = ((1024, 64, 16), (512, 64, 8), (512, 256, 8), (128, 256, 8), (256, 1024, 4))
QUICK = [_case(256, 32, 8, 4, 2, 64)]
PRESETS = {
    "tiny": [_case(9, 3, 3, 2, 1, 16)],
    "prefix": [_case(*sizes, 8, 2, 64) for sizes in GRID],
    "prefix-gpu": [
        _case(*sizes, 32, 8, 128, "bfloat16")
        for sizes in (
            (4096, 512, 16),
            (4096, 256, 16),
            (1024, 512, 8),
            (8192, 1024, 8),
            (512, 4096, 8),
            (256, 1024, 4),
        )
    ],
    # gradients of scores of one head that the workspace does not hold, and groups of query heads of 7 and 1
    "prefix-gpu-more": [
        _case(16384, 2048, 8, 32, 8, 128, "bfloat16"),
        _case(4096, 512, 16, 28, 4, 128, "bfloat16"),
        _case(4096, 512, 16, 16, 16, 128, "bfloat16"),
    ],
}


def make_inputs(p: int, length: int, g: int, hq: int, hkv: int, d: int, **options: Any) -> dict[str, Any]:
    return reference.make_inputs(_layout(p, length, g), hq, hkv, d, **options)


def _layout(p: int, length: int, g: int) -> PrefixLayout:
    # the rows of PrefixBatch: the prompt without its last token, which stands in front of each completion
    prompt = [p - 1] if p > 1 else []
    parents = [-1] * len(prompt) + [0 if prompt else -1] * g
    return PrefixLayout((*prompt, *[length] * g), tuple(parents), (False,) * len(prompt) + (True,) * g)


def first_rows(
    inputs: dict[str, Any], grads: dict[str, Tensor], count: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    layout, lengths = inputs["batch"], _lengths(inputs["batch"])

    def cut(x: Tensor) -> Tensor:
        return torch.cat([x[: count - 1], x[layout.n_prefix :]])

    part: dict[str, Any] = {name: cut(inputs[name]) for name in ("q", "k", "v")}
    part["batch"] = _layout(count, lengths[1], lengths[2])
    return part, {name: cut(grad) for name, grad in grads.items()}


def _lengths(layout: PrefixLayout) -> tuple[int, int, int]:
    """Rows of the prompt, rows of each completion, completions."""
    g = sum(layout.completion)
    return layout.n_prefix, (layout.total - layout.n_prefix) // g, g


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("out",)


def upstream_shape(case: Case) -> tuple[int, ...]:
    return _rows(case), case.sizes["Hq"], case.sizes["D"]


def _rows(case: Case) -> int:
    p, length, g = list(case.sizes.values())[:3]
    return p - 1 + g * length


def _pairs(case: Case, shared: bool) -> int:
    """Rows times the rows that they see."""
    p, length, g = list(case.sizes.values())[:3]
    prompt = (p - 1) * p // 2
    completion = length * (p - 1) + length * (length + 1) // 2
    return prompt + g * completion if shared else g * (prompt + completion)


def ratios(case: Case, backward: bool) -> dict[str, float]:
    p, length, g = list(case.sizes.values())[:3]
    tokens = g * (p - 1 + length) / _rows(case)
    return {"fewer tokens": tokens, "fewer FLOPs": _pairs(case, False) / _pairs(case, True)}


def row_elements(case: Case) -> int:
    # q, k, v and out of all sequences, per token of the prompt
    _, length, g, hq, hkv, d = case.sizes.values()
    return g * (1 + length) * 2 * (hq + hkv) * d


def bytes_moved(case: Case, backward: bool) -> int:
    # forward: read q, k, v, write out and lse, T Hq of 4 bytes; backward: read all of it again and the
    # gradient of out, write dq, dk, dv. Each K and V is read once, however many completions see it.
    _, _, _, hq, hkv, d = case.sizes.values()
    tensors, lse = 2 * (hq + hkv) * d * case.itemsize, 4 * hq
    forward = tensors + lse
    return _rows(case) * (forward + (forward + tensors if backward else 0))


def flops(case: Case, backward: bool) -> int:
    # q k and p v: 2 D each per head and pair that is seen; backward: q k again, dp, dv, dq, dk
    _, _, _, hq, _, d = case.sizes.values()
    return (7 if backward else 2) * 2 * hq * d * _pairs(case, shared=True)


def gemm(case: Case) -> tuple[int, int, int] | None:
    return 1024, 1024, case.sizes["D"]  # a tile of scores: as narrow as a head


def _repeat(x: Tensor, layout: PrefixLayout) -> Tensor:
    """[T, H, D] -> [G, H, P + L, D]: every sample with a copy of the prompt."""
    p, length, g = _lengths(layout)
    own = x[p:].view(g, length, *x.shape[1:])
    return torch.cat([x[:p].expand(g, *[-1] * x.dim()), own], 1).transpose(1, 2)


def _packed(out: Tensor, p: int) -> Tensor:
    """[G, H, P + L, D] -> [T, H, D], the prompt's rows from the first sample."""
    rows = out.transpose(1, 2)
    return torch.cat([rows[0, :p], rows[:, p:].flatten(0, 1)])


def _torch() -> Call:
    # what a model does that knows nothing of groups: a batch of G sequences of P - 1 + L tokens
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        layout = inputs["batch"]
        q, k, v = (_repeat(inputs[name], layout) for name in ("q", "k", "v"))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return {"out": _packed(out, layout.n_prefix)}

    return call


def _one_by_one() -> Call:
    # without padding: each sample alone
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        layout = inputs["batch"]
        p, length, g = _lengths(layout)
        found = []
        for i in range(g):
            own = slice(p + i * length, p + (i + 1) * length)
            q, k, v = (
                torch.cat([x[:p], x[own]]).transpose(0, 1)[None]
                for x in (inputs["q"], inputs["k"], inputs["v"])
            )
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            found.append(out[0].transpose(0, 1))
        return {"out": torch.cat([found[0][:p], *(out[p:] for out in found)])}

    return call


def _flex() -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    masks: dict[int, Any] = {}

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        device = inputs["q"].device
        if device.type == "cpu":
            raise NotImplementedError("FlexAttention has no backward on a CPU")
        layout = inputs["batch"]
        if id(layout) not in masks:  # made once: a model has one mask for all layers
            first, last, pos = layout.row_tables(device)

            def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return (first[j] <= first[i]) & (first[i] < last[j]) & (pos[i] >= pos[j])

            masks[id(layout)] = create_block_mask(sees, None, None, layout.total, layout.total, device=device)
        q, k, v = (inputs[name].transpose(0, 1)[None] for name in ("q", "k", "v"))
        out = compiled(q, k, v, block_mask=masks[id(layout)], enable_gqa=True)
        return {"out": out[0].transpose(0, 1)}

    return call


def _flash_attn() -> Call:
    varlen: Callable[..., Tensor] = _peers.module("flash_attn").flash_attn_varlen_func

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        q = inputs["q"]
        if q.device.type != "cuda" or q.dtype == torch.float32:
            raise NotImplementedError("flash_attn needs CUDA tensors in half precision")
        keys, cu_q, cu_k, max_q, max_k = inputs["batch"].gathered(q.device)
        k, v = (inputs[name].index_select(0, keys) for name in ("k", "v"))
        return {"out": varlen(q, k, v, cu_q, cu_k, max_q, max_k, causal=True)}

    return call


PEERS = (
    Peer("torch", _torch),
    Peer("one by one", _one_by_one),
    Peer("flex", _flex, on_request=True),
    Peer("flash-attn", _flash_attn),
)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "one by one"))


def test_prefix_shared_attention(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "prefix_shared_attention", case, backward, name)
