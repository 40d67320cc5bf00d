"""What trainers log of the drift of their rollout, by their own code; skips where that is not here."""

import ast
import collections
import importlib.util
import inspect
import logging
import math
import textwrap
from pathlib import Path
from types import SimpleNamespace

import torch
from peer_sources import load, taken
from policy_peers import trl_trainer, verl_rollout_corr
from policy_sources import Base, configured, skyrl_correction


def verl_metrics(train, rollout, mask, **settings):
    """Of its trainer: rollout correction, and what it logs of the probabilities."""
    helper = verl_rollout_corr()
    found = helper.compute_offpolicy_metrics(train, rollout, mask.double())
    if settings:
        found |= helper.compute_rollout_correction_weights(train - rollout, mask.double(), **settings)[1]
    found = {f"rollout_corr/{name}": value for name, value in found.items()}
    folder = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    debug = taken(
        folder / "utils/debug/metrics.py", "calculate_debug_metrics", "pearson_correlation_coefficient",
        "calculate_log_prob_diff", logger=logging.getLogger("verl"),
    )  # fmt: skip
    batch = {"rollout_log_probs": rollout, "old_log_probs": train, "response_mask": mask.double()}
    batch["responses"] = torch.zeros_like(train)
    return found | debug.calculate_debug_metrics(SimpleNamespace(batch=batch))


def trl_metrics(train, rollout, mask, mode, low, high):
    """Of the two blocks of GRPOTrainer's method that make the ratio and log it."""
    method = ast.parse(
        textwrap.dedent(inspect.getsource(trl_trainer()._generate_and_score_completions))
    ).body[0]
    test = "self.use_vllm and self.vllm_importance_sampling_correction"
    blocks = [x for x in ast.walk(method) if isinstance(x, ast.If) and ast.unparse(x.test) == test]
    blocks = sorted((x for x in blocks if len(x.body) > 1), key=lambda x: x.lineno)
    assert len(blocks) == 2, "TRL computes or logs the ratio elsewhere"
    trainer = SimpleNamespace(
        use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low, vllm_importance_sampling_clip_max=high,
        _metrics={"train": collections.defaultdict(list)}, accelerator=SimpleNamespace(gather=lambda x: x),
    )  # fmt: skip
    names = {
        "self": trainer, "mode": "train", "torch": torch, "math": math, "device": train.device,
        "old_per_token_logps": train, "sampling_per_token_logps": rollout, "completion_mask": mask.long(),
        "tool_mask": None, "nanmin": lambda x: x.min(), "nanmax": lambda x: x.max(),
    }  # fmt: skip
    for block in blocks:
        exec(compile(ast.Module([block], []), "grpo_trainer.py", "exec"), names)
    return {name: value for name, (value,) in trainer._metrics["train"].items()}


def skyrl_metrics(train, rollout, mask, **correction):
    """Of its off-policy correction, as its worker and its trainer prefix them."""
    kinds = load("skyrl", "skyrl/train/config/config.py", "OffPolicyCorrectionConfig", BaseConfig=Base)
    config = configured(kinds.OffPolicyCorrectionConfig, **correction)
    found = skyrl_correction().compute_off_policy_correction(train, rollout, mask.double(), config)[1]
    return {f"policy/loss_metrics/{name}": value for name, value in found.items()}
