"""``rlkernel.paged_prefix_attention`` against attention that reads each request's own copy of the keys."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import rlkernel
from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers
from rlkernel.reference import paged_prefix_attention as reference

# tokens of a prompt and behind it, prompts, samples of each, heads, heads of K and V, elements of a head
DIMS = ("P", "L", "N", "G", "Hq", "Hkv", "D")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {}
SHARED: tuple[str, ...] = ()
GRADIENTS: tuple[str, ...] = ()  # an engine has none
WHOLE = True


def _case(*sizes: int, dtype: str = "float32") -> Case:
    return Case(dict(zip(DIMS, sizes, strict=True)), dtype, OPTIONS)


QUICK = [_case(512, 32, 1, 8, 4, 2, 64)]
PRESETS = {
    "tiny": [_case(70, 3, 1, 2, 2, 1, 16)],
    # a decode of a group: the heads of Qwen2.5-0.5B and of Llama-3-8B
    "paged": [
        _case(p, 64, 1, g, *heads)
        for heads in ((14, 2, 64), (32, 8, 128))
        for p, g in ((1024, 8), (1024, 16), (4096, 8), (4096, 16))
    ],
    "paged-gpu": [
        _case(p, 256, n, g, 32, 8, 128, dtype="bfloat16")
        for p, n, g in ((4096, 8, 16), (32768, 2, 16), (1024, 64, 8))
    ],
}


def make_inputs(
    p: int, length: int, n: int, g: int, hq: int, hkv: int, d: int, **options: Any
) -> dict[str, Any]:
    inputs = reference.make_inputs(p, n, g, length, hq, hkv, d, **options)
    tables = (inputs["block_table"], inputs["seq_lens"], inputs["cu_seqlens_q"])
    # an engine makes it once a step, for all layers
    return {**inputs, "plan": rlkernel.paged_prefix_plan(*tables, inputs["key_cache"].shape[1])}


def first_rows(
    inputs: dict[str, Any], grads: dict[str, Tensor], count: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return inputs, grads  # nothing grows with the rows but the cache, which is there


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ()


def _keys(case: Case) -> tuple[int, int]:
    """Keys that are read together, and that would be read by each request alone."""
    p, length, n, g, *_ = case.sizes.values()
    return n * (p + g * length), n * g * (p + length)


def ratios(case: Case, backward: bool) -> dict[str, float]:
    together, apart = _keys(case)
    return {"fewer KV bytes": apart / together}


def row_elements(case: Case) -> int:
    _, length, n, g, hq, hkv, d = case.sizes.values()
    return n * (1 + g * length) * 2 * hkv * d + g * 2 * hq * d


def bytes_moved(case: Case, backward: bool) -> int:
    # each key and value that a group shares is read once; a row of the query read and of the output written
    _, _, n, g, hq, hkv, d = case.sizes.values()
    together, _ = _keys(case)
    return (2 * hkv * together + 2 * hq * n * g) * d * case.itemsize


def flops(case: Case, backward: bool) -> int:
    # q k and p v: 2 D each per head, row and key
    hq, d = case.sizes["Hq"], case.sizes["D"]
    _, apart = _keys(case)
    return 4 * hq * d * apart


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _torch() -> Call:
    # what an engine of torch alone does: gather each request's keys, then one row of attention
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        length = int(inputs["seq_lens"][0])
        blocks = inputs["block_table"].long()
        k, v = (
            inputs[name][blocks].flatten(1, 2)[:, :length].transpose(1, 2)
            for name in ("key_cache", "value_cache")
        )
        query = inputs["query"][:, :, None]
        return {"out": scaled_dot_product_attention(query, k, v, enable_gqa=True)[:, :, 0]}

    return call


def _flash_attn() -> Call:
    varlen = _peers.module("flash_attn").flash_attn_varlen_func

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        query = inputs["query"]
        if query.device.type != "cuda" or query.dtype == torch.float32:
            raise NotImplementedError("flash_attn needs CUDA tensors in half precision")
        starts = inputs["cu_seqlens_q"]
        keys = torch.nn.functional.pad(inputs["seq_lens"].cumsum(0), (1, 0)).int()
        longest = case.sizes["P"] + case.sizes["L"]
        caches = inputs["key_cache"], inputs["value_cache"]
        table = inputs["block_table"]
        return {"out": varlen(query, *caches, starts, keys, 1, longest, causal=True, block_table=table)}

    return call


PEERS = (Peer("torch", _torch), Peer("flash-attn", _flash_attn))


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch"))


def test_paged_prefix_attention(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "paged_prefix_attention", case, backward, name)
