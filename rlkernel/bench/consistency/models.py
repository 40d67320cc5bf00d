"""Small models of transformers: a rollout behind a cache, and what a trainer computes of its tokens."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rlkernel
from rlkernel.bench.cases import UsageError
from rlkernel.bench.consistency.pairs import MODES, mode_named, pairs
from rlkernel.consistency.report import Report
from rlkernel.integrations.hf.models import behind

WINDOWED = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 32}
EXPERTS = {"head_dim": 64, "num_experts_per_tok": 2}


class Family(NamedTuple):
    """Of transformers: a class and its configuration, and what this says beside the sizes."""

    model: str
    config: str
    options: dict[str, Any]
    windows: bool = False  # or softcaps or sinks: for these the mode wants rlkernel's attention
    experts: str = ""  # what the configuration calls their number
    packs: bool = True  # transformers keeps sequences of one row apart, by their positions


FAMILIES = {
    "Qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 64}),
    "Qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", {}),
    "Llama": Family("LlamaForCausalLM", "LlamaConfig", {}),
    "Gemma 2": Family("Gemma2ForCausalLM", "Gemma2Config", WINDOWED, windows=True),
    "Gemma 3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", WINDOWED, windows=True),
    "Qwen3-MoE": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS, experts="num_experts"),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**EXPERTS, "sliding_window": 32},
        windows=True,
        experts="num_local_experts",
        packs=False,
    ),
}


Score = Callable[[Tensor, Tensor], Tensor]  # log-probabilities of ids, from logits


class Sizes(NamedTuple):
    """Of a model and of what it is given."""

    hidden: int
    inner: int
    layers: int
    heads: int
    experts: int
    vocabulary: int
    prompts: tuple[int, ...]  # their lengths
    new: int  # tokens that each sample adds
    cached: int  # tokens before a timed step of decoding
    batch: tuple[int, int]  # sequences and tokens of a timed pass of the trainer, and of a prefill


FULL = Sizes(512, 1536, 2, 8, 8, 4096, (1, 3, 17, 40, 90, 150), 12, 128, (2, 128))
SHORT = Sizes(128, 128, 2, 2, 4, 512, (1, 9, 40), 4, 16, (2, 16))


class Sample(NamedTuple):
    """Of the tokens [T] the last ones were drawn, with these log-probabilities [new]."""

    tokens: Tensor
    logprobs: Tensor


def measured(family: str, dtype: torch.dtype, s: Sizes, seconds: float, least: int) -> dict[str, Any]:
    """A row of the report; of a mode that refuses the model the reason."""
    found: dict[str, Any] = {"family": family, "dtype": str(dtype)[6:]}
    models = {mode: made(family, dtype, s, mode) for mode in MODES}
    for mode, model in models.items():
        try:
            with mode_named(mode):
                scores = differences(model, s, FAMILIES[family].packs)
            found[mode] = agreement(*scores)
        except RuntimeError as refused:
            found[mode] = {"refused": str(refused)}
    if "refused" not in found["batch_invariant"]:
        calls = (steps(model, s) for model in models.values())
        found["cost"] = {
            name: pairs(default, ours, seconds, least).summary()
            for (name, default), (_, ours) in zip(*calls, strict=True)
        }
    return found


def made(family: str, dtype: torch.dtype, s: Sizes, mode: str) -> Any:
    """A model with random weights, norms and biases that are not all alike, as the mode wants it."""
    transformers = _transformers()
    transformers.utils.logging.disable_progress_bar()
    kind = FAMILIES[family]
    experts = {kind.experts: s.experts, "moe_intermediate_size": s.inner // 4} if kind.experts else {}
    config = getattr(transformers, kind.config)(
        vocab_size=s.vocabulary,
        hidden_size=s.hidden,
        intermediate_size=s.inner // 4 if kind.experts else s.inner,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.heads // 2,
        initializer_range=0.05,
        tie_word_embeddings=False,
        **kind.options,
        **experts,
    )
    torch.manual_seed(0)
    model = getattr(transformers, kind.model)(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
        parameter.data = parameter.data.to(dtype)  # and not the model's buffers: rotary frequencies are fp32
    wants_ours = kind.windows or torch.get_default_device().type == "cuda"
    if mode == "batch_invariant" and wants_ours:
        model.set_attn_implementation(rlkernel.register_hf())
    return model.eval()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"the part `models` must have transformers, got {error}") from error
    return transformers


def differences(model: Any, s: Sizes, packs: bool) -> tuple[Tensor, Tensor]:
    """The trainer's log-probabilities and the rollout's, [n] each."""
    g = _generator(1)
    prompts = [torch.randint(s.vocabulary, (n,), generator=g) for n in s.prompts]
    with torch.no_grad():
        samples = [alone(model, p, s.new, g) for p in prompts] + together(model, prompts, s.new, g)
        return scored(model, samples, log_softmax, packs)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def scored(model: Any, samples: Sequence[Sample], score: Score, packs: bool) -> tuple[Tensor, Tensor]:
    """The trainer's log-probabilities, for every way to lay the tokens out, and the rollout's, [n] each."""
    trained = [padded(model, samples, left, score) for left in (True, False)]
    trained += [packed(model, samples, score)] if packs else []
    rolled = torch.cat([sample.logprobs for sample in samples])
    return torch.cat(trained), rolled.repeat(len(trained))


def log_softmax(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def agreement(trained: Tensor, rolled: Tensor) -> dict[str, Any]:
    report: Report = rlkernel.consistency.compare(trained[None], rolled[None])
    return {
        "tokens": report.tokens,
        "equal": report.equal,
        "max_abs_difference": report.max_abs_difference,
        "k1": report.kl.k1,
        "k3": report.kl.k3,
    }


def alone(model: Any, prompt: Tensor, new: int, g: torch.Generator) -> Sample:
    """One sequence: its prompt in two chunks, then a token a step."""
    cut = len(prompt) * 2 // 3
    cache = _transformers().DynamicCache(config=model.config)
    for chunk in (prompt[:cut], prompt[cut:]):
        if len(chunk):
            logits = model(input_ids=chunk[None], **behind(model, cache)).logits[:, -1]
    tokens, logprobs = [prompt], []
    for step in range(new):
        token, logprob = _draw(logits, g)
        tokens.append(token[0])
        logprobs.append(logprob[0])
        if step < new - 1:
            logits = model(input_ids=token, **behind(model, cache)).logits[:, -1]
    return Sample(torch.cat(tokens), torch.cat(logprobs))


def together(model: Any, prompts: Sequence[Tensor], new: int, g: torch.Generator) -> list[Sample]:
    """All of them in one batch that is padded on the left, in step."""
    cache = _transformers().DynamicCache(config=model.config)
    ids, mask = _batch(prompts, left=True)
    logits = model(
        input_ids=ids, attention_mask=mask, position_ids=_positions(mask), **behind(model, cache)
    ).logits[:, -1]
    tokens, logprobs = [], []
    for step in range(new):
        token, logprob = _draw(logits, g)
        tokens.append(token)
        logprobs.append(logprob)
        if step < new - 1:
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
            logits = model(
                input_ids=token,
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                **behind(model, cache),
            ).logits[:, -1]
    drawn, scores = torch.cat(tokens, 1), torch.cat(logprobs, 1)
    return [Sample(torch.cat((p, t)), x) for p, t, x in zip(prompts, drawn, scores, strict=True)]


def _draw(logits: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """A token [B, 1] of each row, and its log-probability [B, 1]."""
    logprobs = logits.float().log_softmax(-1)
    token = torch.multinomial(logprobs.exp(), 1, generator=g)
    return token, logprobs.gather(1, token)


def _batch(rows: Sequence[Tensor], left: bool) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), longest, dtype=torch.int64) for _ in range(2))
    for i, row in enumerate(rows):
        where = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids[i, where], mask[i, where] = row, 1
    return ids, mask


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def padded(model: Any, samples: Sequence[Sample], left: bool, score: Score) -> Tensor:
    """The log-probabilities of the drawn tokens [n], from whole sequences in a padded batch."""
    ids, mask = _batch([sample.tokens for sample in samples], left)
    logprobs = _scored(model, score, ids, attention_mask=mask, position_ids=_positions(mask))
    ends = [ids.shape[1] if left else len(sample.tokens) for sample in samples]
    rows = zip(logprobs, ends, samples, strict=True)
    return torch.cat([row[end - 1 - len(sample.logprobs) : end - 1] for row, end, sample in rows])


def packed(model: Any, samples: Sequence[Sample], score: Score) -> Tensor:
    """The same, from one row in which the sequences follow each other."""
    positions = torch.cat([torch.arange(len(sample.tokens)) for sample in samples])[None]
    ids = torch.cat([sample.tokens for sample in samples])[None]
    logprobs = _scored(model, score, ids, position_ids=positions)[0]
    ends = torch.tensor([len(sample.tokens) for sample in samples]).cumsum(0).tolist()
    rows = zip(ends, samples, strict=True)
    return torch.cat([logprobs[end - 1 - len(sample.logprobs) : end - 1] for end, sample in rows])


def _scored(model: Any, score: Score, ids: Tensor, **options: Tensor) -> Tensor:
    """Of each token but the first, [B, T - 1]."""
    return score(model(input_ids=ids, use_cache=False, **options).logits[:, :-1], ids[:, 1:])


def steps(model: Any, s: Sizes) -> Iterator[tuple[str, Callable[[], object]]]:
    """What rollout and trainer do all day, by the names of the report's columns."""
    g = _generator(2)
    ids = torch.randint(s.vocabulary, s.batch, generator=g)

    @torch.no_grad()
    def prefill() -> None:
        cache = _transformers().DynamicCache(config=model.config)
        model(input_ids=ids, logits_to_keep=1, **behind(model, cache))

    def decode(rows: int) -> Callable[[], None]:
        """Each call is one token further."""
        cache = _transformers().DynamicCache(config=model.config)
        given = torch.randint(s.vocabulary, (rows, s.cached + 1), generator=g)

        @torch.no_grad()
        def step() -> None:
            model(input_ids=given[:, -1:], **behind(model, cache))

        with torch.no_grad():
            model(input_ids=given[:, :-1], **behind(model, cache), logits_to_keep=1)
        return step

    @torch.no_grad()
    def forward() -> None:
        _scored(model, log_softmax, ids)

    def both() -> None:
        model.zero_grad()
        _scored(model, log_softmax, ids).mean().backward()

    yield "prefill", prefill
    yield "decode, 1 row", decode(1)
    yield "decode, 16 rows", decode(16)
    yield "forward", forward
    yield "forward+backward", both
