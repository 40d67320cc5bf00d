"""vLLM's V1 sampler: filters, draw, log-probabilities and ranks in one call of ``rlkernel.sample``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import rlkernel
from rlkernel.integrations._likeliest import all_named
from rlkernel.integrations.vllm import contract, plain, positions, support
from rlkernel.integrations.vllm.adjustments import EPSILON, Adjusted, adjusted
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

NAME = "Sampler.forward"
RAW, LOGITS = ("raw_logprobs", "raw_logits"), ("raw_logits", "processed_logits")
BANS = {"token_bitmask", "logit_bias"}  # the options that may leave a row no token
RANKS: dict[str, Any] = {"return_rank": True, "rank_ties": "max"}  # as vLLM counts


def plan(patch: VllmPatch) -> None:
    """Raises PatchError where vLLM is not what it must be."""
    contract.check_metadata(SamplingMetadata)
    forward = contract.checked(Sampler, "forward", contract.FORWARD_PARAMETERS)
    sample = contract.checked(GPUModelRunner, "_sample", contract.SAMPLE_PARAMETERS)
    sync = contract.checked(GPUModelRunner, "_bookkeeping_sync", contract.BOOKKEEPING_PARAMETERS)
    patch.replace(Sampler, "forward", _forward(forward, patch), expected=forward)
    patch.replace(GPUModelRunner, "_sample", positions.sampling_runner(sample), expected=sample)
    patch.replace(GPUModelRunner, "_bookkeeping_sync", positions.without_rewinding(sync), expected=sync)


def _forward(original: Callable[..., Any], patch: VllmPatch) -> Callable[..., Any]:
    def forward(
        self: Any,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> Any:
        if reason := unserved(self, sampling_metadata, predict_bonus_token):
            patch.left(NAME, reason)
            return original(self, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)
        patch.count(patch.calls, NAME)
        return sampled(self, logits, sampling_metadata, logprobs_mode_override or self.logprobs_mode)

    return forward


def unserved(sampler: Any, metadata: Any, predict_bonus_token: bool) -> str:
    """Why vLLM's own sampler takes this call; empty where it does not."""
    if type(sampler) is not Sampler:
        return f"{type(sampler).__name__} is a sampler of its own"
    if predict_bonus_token:
        return "the bonus token of speculative decoding"
    if metadata.max_num_logprobs == -1:
        return "the whole distribution is asked for, as a tensor"
    if metadata.generators and not positions.known():
        return "requests have seeds, and no model runner says where their tokens stand"
    return ""


class _Drawn(NamedTuple):
    token_ids: Tensor  # [n]
    logprobs: Tensor  # [n], that of the token
    rank: Tensor  # [n]
    top_ids: Tensor | None  # [n, k]
    top_logprobs: Tensor | None
    id_logprobs: Tensor | None  # [n, K]


def sampled(sampler: Any, logits: Tensor, metadata: Any, mode: str) -> SamplerOutput:
    n, device = logits.shape[0], logits.device
    seeds = positions.seeds(metadata.generators, n, device)
    place = positions.positions(n, device) if metadata.generators else None
    if mode == "raw_logprobs" and plain.takes(logits, metadata):
        seeds = positions.drawn_seeds(n, device) if seeds is None else seeds
        if (found := plain.sampled(logits, metadata, seeds, place)) is not None:
            return found
    wants = metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)
    z = adjusted(sampler, logits, metadata, whole=wants and mode not in RAW)
    z.options["seeds"] = seeds
    if place is not None:
        z.options["positions"] = place
    support.add_options(z.options, z.logits)
    given = _given(metadata.logprob_token_ids, n, device)
    return sampled_from(mode, logits, z, wants, metadata.max_num_logprobs or 0, given)


def sampled_from(
    mode: str, logits: Tensor, z: Adjusted, wants: bool, top: int, given: Tensor | None
) -> SamplerOutput:
    """A token of each row of ``z``; where ``wants``, with log-probabilities of it and ``top`` or ``given``
    others, in the ``mode``."""
    if not wants:
        return SamplerOutput(sampled_token_ids=_drawn(z)[:, None], logprobs_tensors=None)
    asked: dict[str, Any] = dict(RANKS)
    if given is not None:
        asked["logprob_token_ids"] = given
    elif top:
        asked["top_logprobs"] = top
    drawn = _raw(logits, z, asked) if mode in RAW else _processed(z, asked)
    if mode in LOGITS:
        drawn = _as_logits(drawn, logits if mode in RAW else _tempered(z), given)
    others, values = (given, drawn.id_logprobs) if given is not None else (drawn.top_ids, drawn.top_logprobs)
    ids, logprobs = drawn.token_ids.long()[:, None], drawn.logprobs[:, None]
    if others is not None and values is not None:
        named = others.clamp(min=0) if given is not None else all_named(others, logits.shape[1])
        ids = torch.cat((ids, named), 1)
        logprobs = torch.cat((logprobs, values), 1)
    return SamplerOutput(
        sampled_token_ids=drawn.token_ids[:, None],
        logprobs_tensors=LogprobsTensors(ids.to(torch.int32), logprobs, drawn.rank),
    )


def _sample(z: Adjusted, **asked: Any) -> Any:
    if z.tokens is None:
        out = rlkernel.sample(z.logits, **asked, **z.options)
    else:
        out = rlkernel.score_tokens(z.logits, z.tokens, **asked, **z.options)
    support.keep(out)
    return out


def _drawn(z: Adjusted) -> Tensor:
    """The tokens alone."""
    if z.tokens is not None and not support.asked():
        return z.tokens.to(torch.int32)
    return _tokens(_sample(z, return_logprobs=()))


def _raw(logits: Tensor, z: Adjusted, asked: dict[str, Any]) -> _Drawn:
    """Of the model's own distribution, whatever the token is drawn from."""
    asked = asked | {"ranking": "raw"}
    if z.logits is logits:
        out = _sample(z, return_logprobs=("raw",), **asked)
        tokens = _tokens(out)
        again = BANS & z.options.keys() and not bool(out.valid.all())  # of a row without a token left
    else:
        tokens, again = _drawn(z), True
    if again:
        out = rlkernel.score_tokens(logits, tokens.long(), return_logprobs=("raw",), **asked)
    assert out.raw_logprobs is not None and out.rank is not None
    return _Drawn(tokens, out.raw_logprobs, out.rank, out.top_ids, out.top_logprobs, out.id_logprobs)


def _processed(z: Adjusted, asked: dict[str, Any]) -> _Drawn:
    """Of the distribution that the token is drawn from; of a greedy row, that before its largest is taken."""
    asked = asked | {"ranking": "processed", "greedy_logprobs": "softmax"}
    out = _sample(z, return_logprobs=("processed",), **asked)
    assert out.processed_logprobs is not None and out.rank is not None
    return _Drawn(
        _tokens(out), out.processed_logprobs, out.rank, out.top_ids, out.top_logprobs, out.id_logprobs
    )


def _as_logits(drawn: _Drawn, values: Tensor, given: Tensor | None) -> _Drawn:
    """With the logits in place of the log-probabilities; what these leave out stays left out."""

    def at(ids: Tensor, logprobs: Tensor) -> Tensor:
        found = values.gather(1, ids.long().clamp(min=0)).to(torch.float32)
        return torch.where(logprobs == -torch.inf, -torch.inf, found)

    top, mine = drawn.top_logprobs, drawn.id_logprobs
    return drawn._replace(
        logprobs=at(drawn.token_ids[:, None], drawn.logprobs[:, None])[:, 0],
        top_logprobs=None if drawn.top_ids is None or top is None else at(drawn.top_ids, top),
        id_logprobs=None if given is None or mine is None else at(given, mine),
    )


def _tempered(z: Adjusted) -> Tensor:
    t = z.options["temperature"]
    if not isinstance(t, Tensor):
        return z.logits
    return z.logits / torch.where(t < EPSILON, 1.0, t)[:, None]


def _tokens(out: Any) -> Tensor:
    """Of a row without a distribution, token 0: vLLM has no token that is none."""
    return out.token_ids.clamp(min=0).to(torch.int32)


def _given(asked: dict[int, list[int]] | None, n: int, device: torch.device) -> Tensor | None:
    """The tokens whose log-probabilities each row asks for, [n, K], with -1 behind fewer."""
    if not asked:
        return None
    made = torch.full((n, max(map(len, asked.values()))), -1, dtype=torch.int64, device="cpu")
    for row, ids in asked.items():
        made[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64, device="cpu")
    return made.to(device)
