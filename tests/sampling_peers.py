"""Samplers of others as they stand: vLLM's V1 sampler and model runner, Hugging Face's processors."""

import sys
from types import SimpleNamespace

import pytest
import torch

from rlkernel.benchmarks import _peers


def vllm(path):
    try:
        return _peers.vllm(path)
    except ImportError as error:
        pytest.skip(f"vLLM: {error}")


def hf(name):
    processors = pytest.importorskip("transformers.generation.logits_process", reason="needs transformers")
    return getattr(processors, name)


def vllm_sampler(
    mode, logits, temperature=1.0, num_logprobs=-1, allowed=None, processors=(), given=None, **filters
):
    """The output of vLLM's ``Sampler`` for requests that all have these options; greedy with T = None."""
    sampler, metadata = vllm("v1.sample.sampler"), vllm("v1.sample.metadata")
    rows = len(logits)
    dtypes = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    made = {name: torch.full((rows,), value, dtype=dtypes[name]) for name, value in filters.items()}
    invariant = [_min_p(made.pop("min_p"))] if "min_p" in made else []
    greedy = temperature is None
    asked = metadata.SamplingMetadata(
        temperature=None if greedy else torch.full((rows,), temperature), all_greedy=greedy,
        all_random=not greedy,
        top_p=made.get("top_p"), top_k=made.get("top_k"), generators={}, max_num_logprobs=num_logprobs,
        no_penalties=True, prompt_token_ids=None, frequency_penalties=None, presence_penalties=None,
        repetition_penalties=None, output_token_ids=[[]] * rows,
        allowed_token_ids_mask=None if allowed is None else ~allowed, bad_words_token_ids={},
        logprob_token_ids=given,
        logitsprocs=SimpleNamespace(argmax_invariant=invariant, non_argmax_invariant=list(processors)),
    )  # fmt: skip
    theirs = sampler.Sampler(mode)
    theirs.greedy_sample = lambda logits: logits.argmax(-1)  # its own is a kernel of vLLM's extension
    return theirs(logits.clone(), asked)


def vllm_processed(logits, temperature=1.0, **options):
    """log_softmax of what vLLM samples from [B, V], -inf outside of what its filters keep."""
    return vllm_sampler("processed_logprobs", logits, temperature, **options).logprobs_tensors.logprobs


def _min_p(values):
    processor = object.__new__(vllm("v1.sample.logits_processor.builtin").MinPLogitsProcessor)
    processor.min_p, processor.min_p_count = values[:, None], len(values)  # as its update_state leaves them
    return processor


def vllm_logit_bias(biases):
    """vLLM's processor of ``{row: {token: bias}}``."""
    processor = object.__new__(vllm("v1.sample.logits_processor.builtin").LogitBiasLogitsProcessor)
    entries = [(row, token, bias) for row, row_biases in biases.items() for token, bias in row_biases.items()]
    rows, tokens, values = zip(*entries, strict=True)
    processor.biases, processor.bias_tensor = biases, torch.tensor(values)
    processor.logits_slice = torch.tensor(rows, dtype=torch.int32), torch.tensor(tokens, dtype=torch.int32)
    return processor


def vllm_penalised(monkeypatch, logits, prompt, output, repetition, frequency, presence):
    """Logits after vLLM's ``apply_penalties``; padding is the id V."""
    layers, custom_ops = vllm("model_executor.layers.utils"), vllm("_custom_ops")
    # imported by the function when it is called
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", custom_ops)
    return layers.apply_penalties(logits.clone(), prompt, output, presence, frequency, repetition)


def vllm_runner_tokens(logits, temperature, seeds, positions):
    """The draws of vLLM's model runner: its Triton kernel, one Gumbel variable for each token."""
    gumbel = vllm("v1.worker.gpu.sample.gumbel")
    rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    return gumbel.gumbel_sample(
        logits, rows, temperature, seeds, positions, apply_temperature=True, is_drafting=False
    )


def vllm_runner_min_p(logits, min_p):
    made, rows = logits.clone(), torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    vllm("v1.worker.gpu.sample.min_p").apply_min_p(
        made, rows, torch.full((len(logits),), min_p, device=logits.device)
    )
    return made


def hf_processed(
    logits, temperature=1.0, top_k=None, top_p=None, min_p=None, typical_p=None, epsilon_cutoff=None,
    eta_cutoff=None,
):  # fmt: skip
    """log_softmax after the processors that ``generate`` makes of these options, in its order."""
    chain = [(hf("TemperatureLogitsWarper"), temperature), (hf("TopKLogitsWarper"), top_k)]
    chain += [(hf("TopPLogitsWarper"), top_p), (hf("MinPLogitsWarper"), min_p)]
    chain += [(hf("TypicalLogitsWarper"), typical_p)]
    chain += [(hf("EpsilonLogitsWarper"), epsilon_cutoff), (hf("EtaLogitsWarper"), eta_cutoff)]
    for warper, value in chain:
        logits = logits if value is None else warper(value)(None, logits)
    return logits.log_softmax(-1)


# What cannot run without a GPU, or not be installed here, restated from its source.


def flashinfer_kept(p, top_k, top_p, order):
    """FlashInfer's rejection samplers accept a token while fewer than ``top_k`` are likelier and the likelier
    ones have less than ``top_p`` (``include/flashinfer/sampling.cuh``); "top_k_first" renormalises what top_k
    leaves before it looks at ``top_p`` (``flashinfer/sampling.py``, ``top_k_top_p_sampling_from_logits``)."""
    likelier = p[None] > p[:, None]
    first = likelier.sum(-1) < top_k
    if order == "top_k_first":
        p = torch.where(first, p, 0) / p[first].sum()
    return first & ((likelier * p).sum(-1) < top_p)


def xtc_kept(p, threshold):
    """llama.cpp (``llama_sampler_xtc``) and text-generation-webui (``XTCLogitsWarper``): of the tokens in the
    order of probability a token goes where the next one reaches the threshold too."""
    order = p.argsort(descending=True, stable=True)
    goes = torch.cat([p[order][1:] >= threshold, torch.tensor([False])])
    return torch.zeros_like(goes).scatter(0, order, ~goes)


def sglang_kept(p, top_k, top_p, min_p):
    """``top_k_top_p_min_p_sampling_from_probs_torch`` of ``sglang/srt/layers/sampler.py``: a token stays when
    fewer than ``top_k`` stand before it, they have at most ``top_p``, and it has ``min_p`` of the largest."""
    order = p.argsort(descending=True, stable=True)
    before = p[order].cumsum(0) - p[order]
    stays = (torch.arange(len(p)) < top_k) & (before <= top_p) & (p[order] >= min_p * p.max())
    return torch.zeros_like(stays).scatter(0, order, stays)


def sglang_flashinfer_kept(p, top_k, top_p, min_p):
    """The path of the same file that has ``need_min_p_sampling``: FlashInfer's ``top_k_renorm_prob``, its
    ``top_p_renorm_prob`` and its ``min_p_sampling_from_probs`` one after another."""
    p = torch.where((p[None] > p[:, None]).sum(-1) < top_k, p, 0)
    p = p / p.sum()
    p = torch.where(((p[None] > p[:, None]) * p).sum(-1) < top_p, p, 0)
    return (p > 0) & (p >= min_p * p.max())


def xgrammar_masked(logits, bitmask, vocab_size=None):
    """``apply_token_bitmask_inplace`` of xgrammar 0.2.8 (``kernels/apply_token_bitmask_inplace_torch.py``):
    the first ``vocab_size`` logits, by default as many as both have, are masked and the others left alone,
    with a warning that they may be drawn."""
    size = min(logits.shape[-1], bitmask.shape[-1] * 32) if vocab_size is None else vocab_size
    bits = bitmask.repeat_interleave(32, -1) >> torch.arange(32, device=bitmask.device).repeat(
        bitmask.shape[-1]
    )
    made = logits.clone()
    made[..., :size] = made[..., :size].masked_fill((bits & 1)[..., :size] == 0, -torch.inf)
    return made


def dry(tokens, scores, multiplier, base, allowed_length, breakers, last_n):
    """``DRYLogitsProcessor`` of text-generation-webui (``modules/sampler_hijack.py``), for one row in place:
    each earlier place of the last token is followed back, 50 tokens at most and not over a breaker; what came
    after it loses ``multiplier * base ** (length - allowed_length)`` of the longest length."""
    tokens = tokens[-last_n:] if last_n else tokens
    longest = {}
    for i in range(len(tokens) - 1):
        length = 0
        while length < min(50, i + 1) and tokens[i - length] == tokens[-1 - length] not in breakers:
            length += 1
        if length and tokens[i + 1] not in breakers:
            longest[tokens[i + 1]] = max(longest.get(tokens[i + 1], 0), length)
    for token, length in longest.items():
        if length >= allowed_length:
            scores[token] -= multiplier * base ** (length - allowed_length)


def top_a_processed(logits, top_a):
    """log_softmax after ``TopALogitsWarper`` of text-generation-webui (``modules/sampler_hijack.py``)."""
    probs = logits.softmax(-1)
    most = probs.amax(-1, keepdim=True)
    return logits.masked_fill(probs < most * most * top_a, -torch.inf).log_softmax(-1)
