"""``rlkernel.sample_linear`` from hidden states against a product and a sampler, and the bare GEMM."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rlkernel
from rlkernel.bench import parity
from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _draws, _peers

DIMS = ("B", "H", "V")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {"temperature": 0.8}
NUCLEUS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
SHARED = ("weight",)
GRADIENTS: tuple[str, ...] = ()  # a draw has none

QUICK = [Case({"B": 16, "H": 256, "V": 16384}, "float32", OPTIONS)]
PRESETS = {
    "tiny": [
        Case({"B": 3, "H": 24, "V": 1030}, "float32", options, note)
        for options, note in (
            (NUCLEUS, "top_p 0.95"),
            (OPTIONS, ""),
            ({"temperature": 0.7, "top_k": 5, "softcap": 4.0}, "top_k 5 softcap 4"),
        )
    ],
    "sample-linear-cpu": [
        Case({"B": rows, "H": 1024, "V": 65536}, "float32", options, note)
        for rows in (8, 64)
        for options, note in ((OPTIONS, ""), (NUCLEUS, "top_p 0.95"))
    ],
    # a decoding step of an 8B model
    "sample-linear-gpu": [
        Case({"B": rows, "H": 4096, "V": 151936}, "bfloat16", options, note)
        for rows in (32, 64, 128, 256)
        for options, note in ((OPTIONS, ""), (NUCLEUS, "top_p 0.95"))
    ],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ()  # none is differentiated


def row_elements(case: Case) -> int:
    return case.sizes["V"]


def bytes_moved(case: Case, backward: bool) -> int:
    # hidden, B H b, and the weight, V H b, are read once; logits need never reach memory
    rows, size, vocab = case.sizes.values()
    return (rows + vocab) * size * case.itemsize


def flops(case: Case, backward: bool) -> int:
    rows, size, vocab = case.sizes.values()
    return 2 * rows * size * vocab


def gemm(case: Case) -> tuple[int, int, int] | None:
    # the case's own product, cut where a larger one is no faster
    rows, size, vocab = case.sizes.values()
    return rows, min(vocab, 16384), size


def exact(inputs: dict[str, Any], case: Case, got: dict[str, Tensor]) -> dict[str, Tensor]:
    """The log-probabilities in fp64 of the tokens that were drawn, under distributions without a filter."""
    logits, options = _logits(inputs, case)
    with rlkernel.use_backend("reference"):
        scored = rlkernel.score_tokens(logits, got["token_ids"].long(), temperature=options["temperature"])
    # the last token of a nucleus may be another one in fp64: what rests on it is left to ``wrong``
    assert scored.raw_logprobs is not None and scored.tempered_logprobs is not None
    return {"raw_logprobs": scored.raw_logprobs, "tempered_logprobs": scored.tempered_logprobs}


def of_every_token(inputs: dict[str, Any], case: Case) -> dict[str, parity.Error]:
    """PyTorch's errors over the whole vocabulary, not those of the few tokens that it happened to draw."""
    exact, options = _logits(inputs, case)
    logits = _product(inputs, case)
    return {
        name: parity.compare((logits / t).log_softmax(-1), (exact / t).log_softmax(-1))
        for name, t in (("raw_logprobs", 1.0), ("tempered_logprobs", options["temperature"]))
    }


def _logits(inputs: dict[str, Any], case: Case) -> tuple[Tensor, dict[str, Any]]:
    """In fp64, and the options that are the sampler's."""
    logits = inputs["hidden"].double() @ inputs["weight"].double().T
    options = dict(case.options)
    if softcap := options.pop("softcap", None):
        logits = softcap * torch.tanh(logits / softcap)
    return logits, options


def wrong(call: Call, inputs: dict[str, Any], case: Case, got: dict[str, Tensor]) -> list[str]:
    """What is not as it must be of the answers that are no rounded numbers."""
    logits, options = _logits(inputs, case)
    own = {name: inputs[name] for name in ("seeds", "positions")}
    problems = _draws.different(got, logits, {**own, **options})
    one = {"hidden": inputs["hidden"][:1], "weight": inputs["weight"][: _draws.VOCAB]}

    def draw(seeds: Tensor) -> Tensor:
        key = {"seeds": seeds, "positions": torch.zeros_like(seeds)}
        hidden = one["hidden"].expand(len(seeds), -1).contiguous()
        return call({"hidden": hidden, "weight": one["weight"], **key}, case)["token_ids"]

    return problems + _draws.unlikely(draw, _logits(one, case)[0][0], options)


def _torch() -> Call:
    return _naive


def _naive(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
    # What one writes by hand: a product, a sort where top_p asks for one, Gumbel's trick, three softmaxes.
    x = _product(inputs, case)
    z = x / case.options["temperature"]
    kept = z
    if "top_k" in case.options:
        kept = z.masked_fill(z < z.topk(case.options["top_k"]).values[:, -1:], -torch.inf)
    if "top_p" in case.options:
        sorted_z, order = z.sort(dim=-1, descending=True)
        p = sorted_z.softmax(-1)
        outside = p.cumsum(-1) - p >= case.options["top_p"]
        kept = z.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    token = (kept.softmax(-1) / torch.empty_like(kept).exponential_()).argmax(-1, keepdim=True)
    names = ("raw_logprobs", "tempered_logprobs", "processed_logprobs")
    found = {n: y.log_softmax(-1).gather(-1, token)[:, 0] for n, y in zip(names, (x, z, kept), strict=True)}
    return {"token_ids": token[:, 0], **found}


def _product(inputs: dict[str, Any], case: Case) -> Tensor:
    x = (inputs["hidden"] @ inputs["weight"].T).to(torch.promote_types(case.torch_dtype, torch.float32))
    softcap = case.options.get("softcap")
    return softcap * torch.tanh(x / softcap) if softcap else x


def _two_ops() -> Call:
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        key = {name: inputs[name] for name in ("seeds", "positions")}
        logits = inputs["hidden"] @ inputs["weight"].T
        out = rlkernel.sample(logits, **key, **case.options)._asdict()
        return {name: x for name, x in out.items() if x is not None}

    return call


def _gemm_alone(inputs: dict[str, Any], case: Case, backward: bool) -> Callable[[], None]:
    """The product alone, on whole matrices that are already there."""
    hidden, weight = inputs["hidden"], inputs["weight"]
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])

    def product() -> None:
        torch.mm(hidden, weight.T, out=logits)

    return product


PEERS = (
    Peer("torch", _torch),
    Peer("product, then sample", _two_ops, cpu_note="rlkernel's own, on logits in memory"),
    Peer("bare GEMM", _torch, bare=_gemm_alone),
)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch"))


def test_sample_linear(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "sample_linear", case, backward, name)
