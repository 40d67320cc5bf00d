"""Trainings of a tiny model by the real trainers of LLaMA-Factory, and what they logged."""

import tempfile

import tiny
import torch
from datasets import Dataset
from llamafactory.data.collator import (
    KTODataCollatorWithPadding,
    PairwiseDataCollatorWithPadding,
    SFTDataCollatorWith4DAttentionMask,
)
from llamafactory.data.template import TEMPLATES
from llamafactory.hparams import FinetuningArguments, TrainingArguments
from llamafactory.train.dpo.trainer import CustomDPOTrainer
from llamafactory.train.kto.trainer import CustomKTOTrainer
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

VOCAB = 2048
IGNORED = -100
TIMES = ("runtime", "per_second", "time", "epoch", "learning_rate")  # of a log, which no two runs share
SENTENCES = [f"what is {i} plus {i + 1}?" for i in range(16)]


def _example(tokenizer, prompt, answer, prefix=""):
    """As LLaMA-Factory's processors of data sets make them."""
    source, target = tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], tiny.EOS]
    return {
        f"{prefix}input_ids": source + target,
        f"{prefix}attention_mask": [1] * len(source + target),
        f"{prefix}labels": [IGNORED] * len(source) + target,
    }


def _data(stage, tokenizer):
    nothing = {"images": None, "videos": None, "audios": None}
    rows = []
    for i, prompt in enumerate(SENTENCES):
        good, bad = f" it is {2 * i + 1}.", " no idea, sorry."
        if stage == "dpo":
            row = _example(tokenizer, prompt, good, "chosen_") | _example(tokenizer, prompt, bad, "rejected_")
        elif stage == "kto":
            row = _example(tokenizer, prompt, bad if i % 3 else good)
            row |= _example(tokenizer, prompt, f" it is {i}.", "kl_") | {"kto_tags": i % 3 == 0}
        else:
            row = _example(tokenizer, prompt, good)
        rows.append(row | nothing)
    return Dataset.from_list(rows)


TRAINERS = {
    "dpo": (CustomDPOTrainer, PairwiseDataCollatorWithPadding),
    "kto": (CustomKTOTrainer, KTODataCollatorWithPadding),
    "sft": (CustomSeq2SeqTrainer, SFTDataCollatorWith4DAttentionMask),
}


def model_of(path, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, **options)


def make(stage, model, reference=None, settings=None, **finetuning):
    """A trainer; ``settings`` are those of transformers' trainer, the others LLaMA-Factory's own."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.padding_side = "right"
    options = {**tiny.TRAINING, "output_dir": tempfile.mkdtemp(), "max_steps": 3, **(settings or {})}
    options = {"per_device_train_batch_size": 4, "remove_unused_columns": False, **options}
    kind, collator = TRAINERS[stage]
    given = {
        "model": model,
        "args": TrainingArguments(**options),
        "finetuning_args": FinetuningArguments(stage=stage, **finetuning),
        "processor": None,
        "data_collator": collator(
            template=TEMPLATES["llama3"], tokenizer=tokenizer, model=None, pad_to_multiple_of=8,
            label_pad_token_id=IGNORED,
        ),
        "train_dataset": _data(stage, tokenizer),
        "eval_dataset": _data(stage, tokenizer).select(range(6)),
        "tokenizer": tokenizer,
    }  # fmt: skip
    if stage == "sft":
        given |= {"model_args": None, "gen_kwargs": None}
    return kind(ref_model=reference, **given)


def log_of(trainer):
    """Every number that was logged, but for times, step by step."""
    return [
        {name: float(x) for name, x in entry.items() if not any(time in name for time in TIMES)}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def trained(*args, **options):
    """What a training logged, and its weights."""
    trainer = make(*args, **options)
    trainer.train()
    return log_of(trainer), {name: x.clone() for name, x in trainer.model.state_dict().items()}


def check_same(ours, theirs, metric=1e-5, weight=1e-5):
    assert len(ours[0]) == len(theirs[0]) > 0
    for step, (mine, other) in enumerate(zip(ours[0], theirs[0], strict=True)):
        assert mine.keys() == other.keys(), f"step {step}"
        for name, value in mine.items():
            limit = metric * max(1, abs(other[name]))
            assert abs(value - other[name]) <= limit, f"step {step}: {name} {value} instead of {other[name]}"
    apart = max((ours[1][name] - x).abs().max().item() for name, x in theirs[1].items())
    assert apart <= weight, f"weights differ by {apart:.1e}"


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
