"""Why a pass of a trainer cannot run packed."""

from __future__ import annotations

from typing import Any

import torch

NOTHING = "no completion has a token"
DROPOUT = "dropout: completions would share the noise of their prompt"
ATTENTION_DROPOUT = "attention dropout must be 0 in training"
ADVICE = {
    DROPOUT: "a row that samples share can only have one draw: patch_trl(dropout='shared') takes that, "
    "disable_dropout=True in the config draws none",
    ATTENTION_DROPOUT: "model_init_kwargs={'attention_dropout': 0.0} in the config turns it off; "
    "disable_dropout=True does not reach it",
    "tokens a row": "prefix_min_ratio=1 packs it all the same",
}


def wrapper_reason(trainer: Any, model: Any, inside: Any) -> str | None:
    if getattr(trainer, "use_transformers_continuous_batching", False):
        return "continuous batching runs on no registered attention, and the model would be on one"
    if getattr(trainer, "_is_vlm", False):
        return "a vision-language model makes positions of its own"
    if isinstance(model, torch.nn.DataParallel):
        return "DataParallel splits the batch by samples"
    accelerator = trainer.accelerator
    kind = str(getattr(accelerator.distributed_type, "value", ""))
    if kind in ("MEGATRON_LM", "XLA"):
        return f"accelerate runs the model through {kind}"
    parallel = getattr(accelerator, "parallelism_config", None)
    if getattr(parallel, "cp_enabled", False) or getattr(parallel, "sp_enabled", False):
        return "context parallelism splits the tokens of a sequence over ranks"
    if hasattr(inside, "_orig_mod") or inside._compiled_call_impl is not None:
        return "torch.compile would compile anew for every batch"
    return None


def model_reason(model: Any, shared_dropout: bool) -> str | None:
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, dict) and any(getattr(c, "is_prompt_learning", False) for c in configs.values()):
        return "PEFT puts virtual tokens in front of each prompt"
    for path, module in model.named_modules():
        if not module.training:
            continue
        if hasattr(module, "neftune_noise_alpha"):
            return "NEFTune: its noise grows smaller with the length of a row, and a packed row is longer"
        noise = noise_of(path, module)
        if noise and not shared_dropout:
            return DROPOUT
        if any("att" in name for name in noise):
            return f"{ATTENTION_DROPOUT}, got that of {path}"
    return None


def noise_of(path: str, module: Any) -> list[str]:
    """The names by which a module draws noise."""
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return [path.rpartition(".")[2]] if module.p > 0 else []
    values = {name: x for name, x in vars(module).items() if "dropout" in name or "jitter" in name}
    kind = "attention " if "attention" in type(module).__name__.lower() else ""
    return [kind + name for name, x in values.items() if isinstance(x, float) and x > 0]


def is_reference(model: Any) -> bool:
    """Whether a PEFT model stands for the reference now: its adapters are off, or TRL's copy of one is on."""
    if getattr(model, "peft_config", None) is None:
        return False
    off = any(getattr(module, "_disable_adapters", False) for module in model.modules())
    return off or "ref" in model.active_adapters


def is_rotary(model: Any) -> bool:
    return any("rotary" in type(module).__name__.lower() for module in model.modules())


def norm_after_rotary(model: Any) -> str | None:
    """The attention whose queries and keys are weighted after they were turned, as in HunYuan's models."""
    names = (type(m).__name__ for m in model.modules() if hasattr(m, "query_layernorm"))
    return next((name for name in names if name.startswith("HunYuan")), None)
