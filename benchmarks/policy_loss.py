"""``rlkernel.policy_loss`` against PyTorch and the loss code of TRL and verl, as they stand."""

from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import rlkernel
from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers
from rlkernel.ops.policy_loss.rule import LOSS_TYPES

DIMS = ("B", "L")
INPUTS: dict[str, Any] = {"bias": 1.0}  # the loss is a sum that does not cancel: its error is worth a look
OPTIONS: dict[str, Any] = {}
SHARED: tuple[str, ...] = ()
GRADIENTS = ("logprobs",)
SCALARS = ("loss",)

# what a loss type cannot do without
NEEDS: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.7}, "kl_cov": {"cov_ratio": 0.1}}


def _terms(sizes: dict[str, int], names: Iterable[str]) -> list[Case]:
    return [Case(sizes, "float32", {"loss_type": name} | NEEDS.get(name, {}), note=name) for name in names]


QUICK = [Case({"B": 16, "L": 1024}, "float32", OPTIONS)]
PRESETS = {
    "tiny": [
        Case({"B": 3, "L": 130}, "float32", OPTIONS),
        Case({"B": 3, "L": 130}, "float32", {"importance_sampling_level": "sequence"}, note="sequence"),
        # vespo's terms cancel in a loss of so few tokens, whose error is then that of its terms
        *_terms({"B": 3, "L": 130}, [name for name in LOSS_TYPES if name != "vespo"]),
    ],
    "policy-cpu": [
        Case({"B": 64, "L": 4096}, "float32", OPTIONS),
        Case({"B": 64, "L": 4096}, "float32", {"importance_sampling_level": "sequence"}, note="sequence"),
    ],
    "policy-terms": _terms({"B": 64, "L": 1024}, LOSS_TYPES),
}
# the names that peers give a loss type, where both mean over tokens
TRLS = {"grpo": "dapo", "dapo": "dapo", "cispo_cap": "cispo", "vespo": "vespo"}
VERLS = {name: name for name in ("reinforce", "gpg", "cispo", "dppo_tv", "dppo_kl", "kl_cov", "dro")}
VERLS |= dict.fromkeys(("grpo", "ppo", "dapo"), "vanilla")


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("loss",)


def row_elements(case: Case) -> int:
    return case.sizes["L"]


def bytes_moved(case: Case, backward: bool) -> int:
    # forward: read logprobs, old logprobs, advantages (4 each) and the mask (1), write the gradient (4);
    # backward reads and writes that once more: 17 and 25 bytes for each token
    return (25 if backward else 17) * case.sizes["B"] * case.sizes["L"]


def flops(case: Case, backward: bool) -> int:
    return 0  # two exponentials for each token


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _torch() -> Call:
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        with rlkernel.use_backend("reference"):
            return rlkernel.policy_loss(**inputs, **case.options)._asdict()

    return call


def _trl() -> Call:
    trainer = _peers.module("trl.trainer.grpo_trainer").GRPOTrainer

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        level = case.options.get("importance_sampling_level", "token")
        loss_type = case.options.get("loss_type", "grpo")
        if loss_type not in TRLS:
            raise NotImplementedError(f"TRL has no {loss_type} with a mean over tokens")
        return {"loss": trl_loss(trainer, inputs, loss_type=TRLS[loss_type], importance_sampling_level=level)}

    return call


def trl_loss(trainer: Any, inputs: dict[str, Any], **options: Any) -> Tensor:
    """``GRPOTrainer._compute_loss``, unbound, on an object with the attributes that it reads."""
    mask = inputs["mask"].to(inputs["logprobs"].dtype)
    args = SimpleNamespace(
        delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, steps_per_generation=1,
    )  # fmt: skip
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    entropy = inputs.get("entropy", torch.zeros_like(mask))
    this = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (inputs["logprobs"], entropy, None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=0.0,
        importance_sampling_level="token", loss_type="grpo", epsilon_low=0.2, epsilon_high=0.2, args=args,
        use_vllm="weights" in inputs, vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        max_completion_length=mask.shape[1], accelerator=accelerator, use_adaptive_entropy=False,
        entropy_coef=0.0, get_gamma_weights=getattr(trainer, "get_gamma_weights", None),
        get_off_policy_mask=getattr(trainer, "get_off_policy_mask", None),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    for key, value in options.items():
        setattr(args if hasattr(args, key) else this, key, value)
    this._entropy_bonus_enabled = this.entropy_coef != 0
    batch = {
        "prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0], "completion_ids": mask,
        "completion_mask": mask,
        "advantages": inputs["advantages"], "old_per_token_logps": inputs["old_logprobs"],
        "ref_per_token_logps": inputs.get("ref_logprobs"), "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": inputs.get("weights"),
    }  # fmt: skip
    if "sampling" in inputs:
        batch["sampling_per_token_logps"] = inputs["sampling"]
    return trainer._compute_loss(this, None, batch)


def _verl() -> Call:
    core = _peers.verl_core_algos()

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        sequence = case.options.get("importance_sampling_level") == "sequence"
        # verl's GSPO is the one whose gradient is the token's own
        if sequence and inputs["logprobs"].requires_grad:
            raise NotImplementedError("verl's sequence level has another gradient with per-token advantages")
        loss_type = case.options.get("loss_type", "grpo")
        if loss_type not in VERLS:
            raise NotImplementedError(f"verl has no {loss_type} with a mean over tokens, or picks at random")
        # the dual clip is on by default there; 1e9 is none
        config: dict[str, Any] = {} if loss_type.startswith("dppo") else {"clip_ratio_c": 1e9}
        config |= {"kl_cov_ratio": 0.1, "dro_beta": 0.7}
        name = "gspo" if sequence else VERLS[loss_type]
        return {"loss": verl_loss(core, name, inputs, "token-mean", **config)}

    return call


def _settings(core: Any) -> Any:
    """An ActorConfig of verl's without its forty fields: attributes, and ``get`` with a default."""
    get = lambda self, key, default=None: getattr(self, key, default)  # noqa: E731
    made = type("Settings", (core.ActorConfig,), {"__init__": lambda self: None, "get": get})
    return made()


def verl_loss(
    core: Any, name: str, inputs: dict[str, Any], agg: str, weights: Tensor | None = None, **config: Any
) -> Tensor:
    """``name`` of verl's registry, or "reinforce", with ``config`` as its ActorConfig."""
    of_policy_loss = {
        "clip_cov_ratio",
        "clip_cov_lb",
        "clip_cov_ub",
        "kl_cov_ratio",
        "ppo_kl_coef",
        "dro_beta",
    }
    settings = _settings(core)
    # what these functions take by default, also where the real ActorConfig has another number
    far = 20.0 if name.startswith("dppo") else 3.0
    settings.__dict__.update(
        clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=far, global_batch_info={},
        tau_pos=1.0, tau_neg=1.05,
        policy_loss=SimpleNamespace(**{key: config.pop(key, None) for key in of_policy_loss}),
    )  # fmt: skip
    settings.__dict__.update(config)
    mask = inputs["mask"].to(inputs["logprobs"].dtype)
    advantages = inputs["advantages"]
    advantages = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(mask)
    arguments = (inputs["old_logprobs"], inputs["logprobs"], advantages, mask, agg, settings, weights)
    if name == "reinforce":
        return core.compute_policy_loss_reinforce(*arguments)[0]
    return core.POLICY_LOSS_REGISTRY[name](*arguments)[0]


PEERS = (Peer("torch", _torch), Peer("trl", _trl), Peer("verl", _verl))


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "trl", "verl"))


def test_policy_loss(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "policy_loss", case, backward, name)
