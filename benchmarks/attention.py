"""``rlkernel.attention`` against torch's: what it costs that a row has the same bits in every batch."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

# sequences, tokens of each, heads, heads of K and V, elements of a head
DIMS = ("B", "T", "Hq", "Hkv", "D")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {}
SHARED: tuple[str, ...] = ()
GRADIENTS = ("q", "k", "v")
WHOLE = True


def _case(*sizes: int, dtype: str = "float32") -> Case:
    return Case(dict(zip(DIMS, sizes, strict=True)), dtype, OPTIONS)


QUICK = [_case(2, 256, 4, 2, 64)]
PRESETS = {
    "tiny": [_case(2, 9, 2, 1, 16)],
    "attention": [_case(*shape, 8, 2, 64) for shape in ((8, 256), (4, 1024), (1, 4096))],
    "attention-gpu": [
        _case(*shape, 32, 8, 128, dtype="bfloat16") for shape in ((16, 1024), (4, 4096), (1, 16384))
    ],
}


def make_inputs(
    b: int,
    t: int,
    hq: int,
    hkv: int,
    d: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    g = torch.Generator(device).manual_seed(seed)
    heads = {"q": hq, "k": hkv, "v": hkv}
    return {name: torch.randn(b, t, h, d, generator=g, device=device).to(dtype) for name, h in heads.items()}


def first_rows(
    inputs: dict[str, Any], grads: dict[str, Tensor], count: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return (
        {name: x[:, :count].contiguous() for name, x in inputs.items()},
        {name: grad[:, :count].contiguous() for name, grad in grads.items()},
    )


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("out",)


def upstream_shape(case: Case) -> tuple[int, ...]:
    b, t, hq, _, d = case.sizes.values()
    return b, t, hq, d


def row_elements(case: Case) -> int:
    b, _, hq, hkv, d = case.sizes.values()
    return b * 2 * (hq + hkv) * d


def bytes_moved(case: Case, backward: bool) -> int:
    # forward: read q, k, v, write out and lse; backward: read these and the gradient of out, write dq, dk, dv
    b, t, hq, hkv, d = case.sizes.values()
    tensors, lse = 2 * (hq + hkv) * d * case.itemsize, 4 * hq
    forward = tensors + lse
    return b * t * (forward + (forward + tensors if backward else 0))


def flops(case: Case, backward: bool) -> int:
    # q k and p v: 2 D each per head and pair that is seen; backward: q k again, dp, dv, dq, dk
    b, t, hq, _, d = case.sizes.values()
    return (7 if backward else 2) * 2 * hq * d * b * t * (t + 1) // 2


def gemm(case: Case) -> tuple[int, int, int] | None:
    return 1024, 1024, case.sizes["D"]  # a tile of scores: as narrow as a head


def _torch() -> Call:
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
        return {"out": scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)}

    return call


PEERS = (Peer("torch", _torch),)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch"))


def test_attention(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "attention", case, backward, name)
