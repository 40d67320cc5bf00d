"""``rlkernel.sample`` against vLLM's torch sampler, Hugging Face's processors, FlashInfer and PyTorch."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import rlkernel
from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _draws, _peers

FUNCTION = "sample"
DIMS = ("B", "V")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {"temperature": 0.8}
SHARED: tuple[str, ...] = ()
GRADIENTS: tuple[str, ...] = ()  # a draw has none

FILTERS: dict[str, dict[str, Any]] = {
    "unfiltered": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "top_k 50 top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
}


def _cases(rows: int, vocab: int, dtype: str, *names: str) -> list[Case]:
    return [Case({"B": rows, "V": vocab}, dtype, {**OPTIONS, **FILTERS[n]}, note=n) for n in names or FILTERS]


# beside the filters, so that parity looks at every kernel's paths
OTHERS: dict[str, dict[str, Any]] = {
    "top_n_sigma 1": {"top_n_sigma": 1.0},
    "gumbel": {"method": "gumbel"},
    "joint": {"top_k": 7, "top_p": 0.6, "filter_order": "joint"},
    "rank entropy": {"return_rank": True, "return_entropy": True, "top_p": 0.5},
    "greedy": {"temperature": 0.0},
}
QUICK = _cases(8, 32768, "bfloat16", "top_k 50 top_p 0.95")
PRESETS = {
    "tiny": [
        *_cases(
            3, 1030, "float32", "top_k 50 top_p 0.95", "unfiltered", "top_p 0.95", "top_k 50", "min_p 0.05"
        ),
        *(Case({"B": 3, "V": 130}, "float32", {**OPTIONS, **o}, note=name) for name, o in OTHERS.items()),
    ],
    # the logits of a decoding step of Qwen's vocabulary
    "sampling-cpu": [case for dtype in ("float32", "bfloat16") for case in _cases(64, 151936, dtype)],
    "sampling-gpu": [
        case
        for dtype, batches in (("bfloat16", (1, 8, 32, 64, 128, 256)), ("float16", (64,)))
        for rows in batches
        for case in _cases(rows, 151936, dtype)
    ],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ()  # none is differentiated


def row_elements(case: Case) -> int:
    return case.sizes["V"]


def bytes_moved(case: Case, backward: bool) -> int:
    # The logits once, B V b: what no sampler can do without. What filters read again, seeds and results are
    # left out, so the share of the floor says how far a filtered call is from a single read.
    return case.sizes["B"] * case.sizes["V"] * case.itemsize


def flops(case: Case, backward: bool) -> int:
    return 0  # an exponential or two per element


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def exact(inputs: dict[str, Any], case: Case, got: dict[str, Tensor]) -> dict[str, Tensor]:
    """The log-probabilities of the tokens that were drawn, in fp64; -inf where a filter leaves one out, so
    that a token outside of the support is an infinite error."""
    with rlkernel.use_backend("reference"):
        scored = rlkernel.score_tokens(inputs["logits"].double(), got["token_ids"].long(), **_scoring(case))
    return {
        name: value
        for name, value in scored._asdict().items()
        if name.endswith("_logprobs") and value is not None
    }


def magnitude(inputs: dict[str, Any], case: Case) -> float:
    """Of the logits, before the temperature and after: a log-probability is a difference of two of that size,
    and PyTorch's error is that of the few tokens that it happened to draw."""
    return inputs["logits"].abs().max().item() * max(1.0, 1 / (case.options.get("temperature") or 1.0))


def _scoring(case: Case) -> dict[str, Any]:
    """The options that change the distribution."""
    return {k: v for k, v in case.options.items() if k != "method" and not k.startswith("return_")}


def wrong(call: Call, inputs: dict[str, Any], case: Case, got: dict[str, Tensor]) -> list[str]:
    """What is not as it must be of the answers that are no rounded numbers."""
    own = {name: inputs[name] for name in ("seeds", "positions")}
    problems = _draws.different(got, inputs["logits"], {**own, **case.options})
    g = torch.Generator().manual_seed(7)
    row = torch.randn(_draws.VOCAB, generator=g).to(inputs["logits"])

    def draw(seeds: Tensor) -> Tensor:
        logits = row.expand(len(seeds), -1).contiguous()
        return call({"logits": logits, "seeds": seeds, "positions": torch.zeros_like(seeds)}, case)[
            "token_ids"
        ]

    return problems + _draws.unlikely(draw, row, _scoring(case))


def _filters(case: Case) -> tuple[int | None, float | None, float | None]:
    return case.options.get("top_k"), case.options.get("top_p"), case.options.get("min_p")


def _torch() -> Call:
    return _naive


def _naive(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
    # What one writes by hand: three softmaxes, a sort where top_p asks for one, torch.multinomial.
    x = inputs["logits"].float()
    greedy = case.options["temperature"] == 0
    z = x if greedy else x / case.options["temperature"]
    top_k, top_p, min_p = (1, None, None) if greedy else _filters(case)
    tempered, kept = z.log_softmax(-1), z
    if sigmas := case.options.get("top_n_sigma"):
        lowest = x.amax(-1, keepdim=True) - sigmas * x.std(-1, keepdim=True, correction=0)
        kept = kept.masked_fill(x < lowest, -torch.inf)
    if min_p is not None:
        kept = kept.masked_fill(
            tempered < tempered.amax(-1, keepdim=True) + torch.tensor(min_p).log(), -torch.inf
        )
    if top_k is not None:
        # of tokens that tie with the k-th, the lowest ids
        last = kept.topk(top_k).values[:, -1:]
        above, ties = kept > last, kept == last
        room = top_k - above.sum(-1, keepdim=True)
        kept = kept.masked_fill(~(above | (ties & (ties.cumsum(-1) <= room))), -torch.inf)
    if top_p is not None:
        sorted_z, order = kept.sort(dim=-1, descending=True, stable=True)
        # of which top_p takes its share: of what is kept so far, or of the whole row
        whole = z.gather(-1, order) if case.options.get("filter_order") == "joint" else sorted_z
        p = whole.softmax(-1)
        outside = p.cumsum(-1) - p >= top_p
        kept = kept.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    processed = tempered if kept is z else kept.log_softmax(-1)
    token = torch.multinomial(processed.exp(), 1)
    names = ("raw_logprobs", "tempered_logprobs", "processed_logprobs")
    logprobs = (x.log_softmax(-1), tempered, processed)
    found = {name: values.gather(-1, token)[:, 0] for name, values in zip(names, logprobs, strict=True)}
    return {"token_ids": token[:, 0], **found}


def _vllm() -> Call:
    sampler = _peers.vllm("v1.sample.sampler").Sampler("raw_logprobs")
    metadata = _peers.vllm("v1.sample.metadata").SamplingMetadata
    builtin = _peers.vllm("v1.sample.logits_processor.builtin")

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        logits = inputs["logits"]
        # it works in place on fp32 logits, which the next round must find as they were
        logits = logits.clone() if logits.dtype == torch.float32 else logits
        made = [
            None if value is None else torch.full((len(logits),), value, device=logits.device)
            for value in (*_filters(case), case.options["temperature"])
        ]
        top_k, top_p, min_p, temperature = made
        processors = []
        if min_p is not None:
            processors = [object.__new__(builtin.MinPLogitsProcessor)]
            processors[0].min_p, processors[0].min_p_count = min_p[:, None], 1  # as its update_state does
        asked = metadata(
            temperature=temperature, all_greedy=False, all_random=True, top_p=top_p, top_k=top_k,
            generators={}, max_num_logprobs=0, no_penalties=True, prompt_token_ids=None,
            frequency_penalties=None, presence_penalties=None, repetition_penalties=None,
            output_token_ids=[], allowed_token_ids_mask=None, bad_words_token_ids={},
            logitsprocs=SimpleNamespace(argmax_invariant=processors, non_argmax_invariant=[]),
        )  # fmt: skip
        out = sampler(logits, asked)
        return {
            "token_ids": out.sampled_token_ids[:, 0],
            "raw_logprobs": out.logprobs_tensors.logprobs[:, 0],
        }

    return call


def _transformers() -> Call:
    warpers = _peers.module("transformers.generation.logits_process")

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        # what `generate` does with a step's logits, and then its compute_transition_scores
        top_k, top_p, min_p = _filters(case)
        scores = warpers.TemperatureLogitsWarper(case.options["temperature"])(None, inputs["logits"].float())
        chain = ((top_k, "TopKLogitsWarper"), (top_p, "TopPLogitsWarper"), (min_p, "MinPLogitsWarper"))
        for value, name in chain:
            scores = scores if value is None else getattr(warpers, name)(value)(None, scores)
        token = torch.multinomial(scores.softmax(-1), 1)
        return {
            "token_ids": token[:, 0],
            "processed_logprobs": scores.log_softmax(-1).gather(-1, token)[:, 0],
        }

    return call


def _flashinfer() -> Call:
    sampling = _peers.module("flashinfer.sampling")

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        if inputs["logits"].device.type == "cpu":
            raise NotImplementedError("its kernels are CUDA")
        top_k, top_p, min_p = _filters(case)
        logits, temperature = inputs["logits"], case.options["temperature"]
        if (top_k is None) == (top_p is None) and min_p is None:
            scaled = logits.float() / temperature
            both = sampling.top_k_top_p_sampling_from_logits
            token = sampling.sampling_from_logits(scaled) if top_k is None else both(scaled, top_k, top_p)
        else:
            probs = sampling.softmax(logits, temperature)  # in one pass, which torch's is not
            if top_k is not None:
                token = sampling.top_k_sampling_from_probs(probs, top_k)
            elif top_p is not None:
                token = sampling.top_p_sampling_from_probs(probs, top_p)
            else:
                token = sampling.min_p_sampling_from_probs(probs, min_p)
        return {"token_ids": token}  # it returns no log-probability

    return call


PEERS = (
    Peer("torch", _torch),
    Peer(
        "vllm",
        _vllm,
        cpu_note="its V1 sampler on the torch path, with the raw log-probability of the token; "
        "its compiled CPU sampler is part of a build of its own",
    ),
    Peer("transformers", _transformers),
    Peer("flashinfer", _flashinfer),
)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "vllm", "transformers"))


def test_sampling(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "sampling", case, backward, name)
