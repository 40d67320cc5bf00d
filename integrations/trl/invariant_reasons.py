"""What ``batch_invariant`` does not cover: what a trainer, an engine or a server must have and has not."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from rlkernel.integrations.trl.reasons import noise_of
from rlkernel.integrations.vllm import VllmPatch, switch

# of vLLM's sampling parameters, those that leave the distribution as TRL's options make it
HARMLESS = (
    "detokenize", "ignore_eos", "include_stop_str_in_output", "max_tokens", "seed", "skip_special_tokens",
    "spaces_between_special_tokens", "stop", "stop_token_ids",
)  # fmt: skip
OFF = {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None)}
WHOLE = ("NO", "MULTI_CPU", "MULTI_GPU")  # accelerate's ways that leave a model in one piece


def of_trainer(trainer: Any, room: int) -> str:
    """What must be otherwise; empty where all of it is covered."""
    args, model = trainer.args, trainer.model
    return (
        _wrapped(trainer)
        or _model(model)
        or _precision(trainer)
        or (_rollout(args, model, room) if args.use_vllm else _generation(args))
    )


def _wrapped(trainer: Any) -> str:
    if getattr(trainer, "_is_vlm", False):
        return "a model of text alone: others make positions of their own"
    kind = str(getattr(trainer.accelerator.distributed_type, "value", "NO"))
    if kind not in WHOLE or getattr(trainer, "is_fsdp_enabled", False):
        return f"a model in one piece on each rank, got {kind}"
    if isinstance(trainer.model_wrapped, torch.nn.DataParallel) or trainer.args.n_gpu > 1:
        return "one process for each GPU, got DataParallel"
    return ""


def _model(model: Any) -> str:
    for path, module in model.named_modules():
        if noise := noise_of(path, module):
            return f"no dropout, got {noise[0]} of {path or type(module).__name__}: disable_dropout=True"
    inside = model.get_base_model() if hasattr(model, "peft_config") else model
    if "position_ids" not in inspect.signature(inside.forward).parameters:
        return f"a model whose forward takes position_ids, got {type(inside).__name__}"
    return ""


def of_length(model: Any, longest: int) -> str:
    """What must be otherwise of samples of which one has so many tokens."""
    told = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    for rope in (told, *told.values()):  # of all layers, or of each kind of them
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            limit = rope.get("original_max_position_embeddings", longest)
            if longest > limit:
                return (
                    f"samples of at most {limit} tokens, got one of {longest}: behind that the rotary angles "
                    "of longrope follow the longest row of a batch"
                )
    return ""


def _precision(trainer: Any) -> str:
    args, model = trainer.args, trainer.model
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(dtypes) != 1:
        return f"parameters of one dtype, got {', '.join(sorted(map(_name, dtypes)))}"
    (dtype,) = dtypes
    if getattr(args, "cast_lm_head_to_fp32", False) and dtype != torch.float32:
        return "cast_lm_head_to_fp32=False: an engine computes its logits in the dtype of the model"
    casts = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision)
    if casts not in (None, dtype):
        return (
            f"weights in the dtype of its products, got {_name(dtype)} under autocast to {_name(casts)}: "
            f"bf16=False, fp16=False, or model_init_kwargs={{'dtype': '{_name(casts)}'}}"
        )
    if args.neftune_noise_alpha is not None:
        return f"neftune_noise_alpha=None, got {args.neftune_noise_alpha}"
    return ""


def _rollout(args: Any, model: Any, room: int) -> str:
    if hasattr(model, "peft_config"):
        return "no adapter: an engine has it merged into the weights, and the trainer beside them"
    if getattr(args, "use_liger_kernel", False):
        return "use_liger_kernel=False: those layers round otherwise"
    if args.vllm_tensor_parallel_size != 1:
        return f"vllm_tensor_parallel_size=1, got {args.vllm_tensor_parallel_size}"
    given = dict(args.generation_kwargs or {})
    if getattr(args, "vllm_structured_outputs_regex", None) is not None:
        given["structured_outputs"] = args.vllm_structured_outputs_regex
    if args.repetition_penalty != 1:
        given["repetition_penalty"] = args.repetition_penalty
    filters = [name for name, off in OFF.items() if given.pop(name, getattr(args, name)) not in off]
    if others := sorted(given.keys() - set(HARMLESS)):
        return f"rollouts of the model's own distribution, got {', '.join(others)}"
    vocab = model.config.get_text_config().vocab_size
    if filters and args.vllm_mode != "colocate":
        return f"rollouts without filters where vllm_mode is {args.vllm_mode!r}, got {', '.join(filters)}"
    if filters and room < vocab:
        return f"room for every kept token with {', '.join(filters)}: support={vocab}, got {room}"
    return ""


def _generation(args: Any) -> str:
    if getattr(args, "use_transformers_continuous_batching", False):
        return "use_transformers_continuous_batching=False: its paged attention is torch's"
    return ""


def of_patch(on: VllmPatch | None) -> str:
    """What vLLM in this process must have."""
    wanted = "patch_vllm(batch_invariant=True) in place before its engine is made"
    if on is None:
        return f"{wanted}, got none"
    if not on.batch_invariant:
        return f"{wanted}, got one without batch_invariant"
    missing = {"sampler", "attention"} - set(on.ops) | set(on.refused)
    return f"{wanted}, got one that leaves {', '.join(sorted(missing))} to vLLM" if missing else ""


def of_server(client: Any, dtype: torch.dtype) -> str:
    """What a server must have, by what it says of itself."""
    info = client.session.get(client.base_url + "/server_info", params={"config_format": "json"})
    told = info.json() if info.ok else {}
    known = told.get("vllm_env", {})
    wanted = f"{switch.SWITCH}=sampler,attention {switch.INVARIANT}=1 in its environment"
    ops = (known.get(switch.SWITCH) or "").split(",")
    if not {"sampler", "attention"} <= set(ops) or known.get(switch.INVARIANT) != "1":
        return f"{wanted} where rlkernel is installed"
    config = told.get("vllm_config", {}).get("model_config", {})
    for name, value in (("dtype", str(dtype)), ("logprobs_mode", "processed_logprobs")):
        if str(config.get(name)) != value:
            return f"{name} {value}, got {config.get(name)}"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
