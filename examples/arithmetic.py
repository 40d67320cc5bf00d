"""Sums, as a task that the recipes of this folder train: its data, its reward, and a model that can learn it.

Everything is made on the spot: a character tokenizer, and a Qwen2 of two layers whose vocabulary can be
padded, so that its head weighs as much as it does in a real model. The reward adds the two numbers and
compares.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+="
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
PAD, BOS, EOS = 0, 1, 2
PROMPT, ANSWER = 4, 3  # tokens: "7+8=" and "15<eos>"


def sums(largest: int) -> list[tuple[str, str]]:
    return [(f"{a}+{b}=", str(a + b)) for a in range(largest + 1) for b in range(largest + 1)]


def dataset(largest: int) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [question for question, _ in sums(largest)]})


def correct_sum(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The reward: 1 where the first word of the completion is the sum, else 0."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        a, b = prompt.rstrip("=").split("+")
        rewards.append(float(completion.split()[:1] == [str(int(a) + int(b))]))
    return rewards


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(SPECIAL + list(CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def make_model(vocabulary: int, hidden: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.1,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def warm_up(
    folder: Path, *, largest: int, vocabulary: int, hidden: int, start: float, seed: int = 0
) -> float:
    """Supervised training until the expected reward of a sample is `start`; returns what it is.

    Model and tokenizer are saved in `folder`."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer, model = make_tokenizer(), make_model(vocabulary, hidden)
    rows = [tokenizer(question + answer)["input_ids"] + [EOS] for question, answer in sums(largest)]
    ids = torch.tensor([row + [PAD] * (PROMPT + ANSWER - len(row)) for row in rows])
    targets, scored = ids[:, PROMPT:], (ids[:, PROMPT:] != PAD).float()

    used = len(tokenizer)
    head = model.lm_head.weight
    head.data[used:] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    while True:
        states = model.model(input_ids=ids[:, :-1]).last_hidden_state[:, PROMPT - 1 :]
        logits = states @ head[:used].T
        # The padding rows are zero, and so are their logits: together they add a constant to the softmax.
        padding = torch.full_like(logits[..., :1], math.log(vocabulary - used))
        logprobs = torch.cat([logits, padding], -1).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        logprobs = logprobs * scored
        expected = logprobs.sum(-1).exp().mean().item()
        if expected >= start:
            break
        (-logprobs.sum() / scored.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return expected
