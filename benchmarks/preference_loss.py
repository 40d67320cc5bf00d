"""``rlkernel.preference_loss`` against PyTorch and the loss code of TRL and Liger, as they stand."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("B", "L")  # pairs, tokens of a side
INPUTS: dict[str, Any] = {"pairs": True}
OPTIONS: dict[str, Any] = {}
SHARED: tuple[str, ...] = ()
GRADIENTS = ("logprobs",)
SCALARS = ("loss",)

# of the chosen and the rejected log-ratio times beta; those that take more are in _by_hand
PAIRED = {
    "sigmoid": lambda c, r: -F.logsigmoid(c - r),
    "robust": lambda c, r: -F.logsigmoid(c - r),
    "hinge": lambda c, r: F.relu(1 - (c - r)),
    "bco_pair": lambda c, r: -F.logsigmoid(c) - F.logsigmoid(-r),
    "nca_pair": lambda c, r: -F.logsigmoid(c) - (F.logsigmoid(-c) + F.logsigmoid(-r)) / 2,
    "apo_zero": lambda c, r: torch.sigmoid(-c) + torch.sigmoid(r),
    "apo_down": lambda c, r: torch.sigmoid(c) + torch.sigmoid(r - c),
}
TERMS = (*PAIRED, "sppo_hard", "sigmoid_norm", "aot")
QUICK = [Case({"B": 16, "L": 4096}, "float32", OPTIONS)]
_SEVERAL = {"loss_type": ("sigmoid", "bco_pair", "sft"), "loss_weights": (0.8, 0.2, 1.0)}
PRESETS = {
    "tiny": [
        Case({"B": 2, "L": 130}, "float32", OPTIONS),
        Case({"B": 2, "L": 130}, "float32", {"ld_alpha": 0.5}, note="ld_dpo"),
        Case({"B": 2, "L": 130}, "float32", _SEVERAL, note="mpo"),
        *(Case({"B": 2, "L": 130}, "float32", {"loss_type": name}, note=name) for name in TERMS),
    ],
    "preference-cpu": [
        Case({"B": 32, "L": 4096}, "float32", OPTIONS),
        Case({"B": 32, "L": 4096}, "float32", {"ld_alpha": 0.5}, note="ld_dpo"),
        Case({"B": 32, "L": 4096}, "float32", _SEVERAL, note="mpo"),
        Case({"B": 32, "L": 4096}, "float32", {"loss_type": "aot"}, note="aot"),
        Case({"B": 4, "L": 65536}, "float32", OPTIONS, note="long"),
    ],
    "preference-terms": [
        Case({"B": 16, "L": 1024}, "float32", {"loss_type": name}, note=name) for name in TERMS
    ],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("loss",)


def row_elements(case: Case) -> int:
    return 2 * case.sizes["L"]


def bytes_moved(case: Case, backward: bool) -> int:
    # forward: read both policies' logprobs (4 each) and the mask (1); backward reads the mask and writes the
    # gradient (4): 9 and 5 bytes for each token
    return (14 if backward else 9) * 2 * case.sizes["B"] * case.sizes["L"]


def flops(case: Case, backward: bool) -> int:
    return 0  # two additions for each token


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _torch() -> Call:
    return lambda inputs, case: _by_hand(**inputs, **case.options)


def _by_hand(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    beta: float = 0.1,
    loss_type: str | tuple[str, ...] = "sigmoid",
    loss_weights: tuple[float, ...] = (1.0,),
    ld_alpha: float | None = None,
) -> dict[str, Tensor]:
    # What one writes by hand, with the same metrics: whole tensors, summed in fp32.
    kept, tokens = torch.where(mask, logprobs, 0), mask.sum(1)
    weight = mask
    if ld_alpha is not None:
        shared = tokens.view(2, -1).amin(0).repeat(2)
        weight = torch.where(mask.cumsum(1) > shared[:, None], ld_alpha, mask.to(logprobs.dtype))
    logps, ref = (kept * weight).sum(1), (torch.where(mask, ref_logprobs, 0) * weight).sum(1)
    nll = -kept.chunk(2)[0].sum() / tokens.chunk(2)[0].sum()
    chosen, rejected = (beta * (logps - ref)).chunk(2)
    preference, loss = torch.zeros_like(nll), torch.zeros_like(nll)
    for name, factor in zip(
        (loss_type,) if isinstance(loss_type, str) else loss_type, loss_weights, strict=True
    ):
        if name == "sft":
            loss = loss + factor * nll
        elif name in PAIRED:
            preference = preference + factor * PAIRED[name](chosen, rejected).mean()
        elif name == "sppo_hard":
            c, r = (logps - ref).chunk(2)
            preference = preference + factor * ((c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2).mean()
        elif name == "sigmoid_norm":
            c, r = (beta * (logps - ref) / tokens).chunk(2)
            preference = preference - factor * F.logsigmoid(c - r).mean()
        else:  # aot
            ours, theirs = (x.view(2, -1) for x in (logps, ref))
            gap = torch.sort(ours[0] - ours[1]).values - torch.sort(theirs[0] - theirs[1]).values
            preference = preference - factor * F.logsigmoid(beta * gap).mean()
    with torch.no_grad():
        zero, one = torch.zeros_like(nll), torch.ones_like(nll)
        c, r = logps.chunk(2)
        metrics = torch.stack([
            chosen.mean(), rejected.mean(), (chosen - rejected).mean(),
            (chosen > rejected).to(c.dtype).mean(),
            c.mean(), r.mean(), preference, nll, zero, zero, one, zero, one * len(c),
            *(x.sum().to(c.dtype) for x in tokens.chunk(2)), (~logps.isfinite()).sum().to(c.dtype),
            zero,  # outside_support: no token here is
        ])  # fmt: skip
    return {
        "loss": loss + preference, "metrics": metrics, "chosen_rewards": chosen.detach(),
        "rejected_rewards": rejected.detach(), "logps": logps.detach(),
    }  # fmt: skip


def _trl() -> Call:
    trainer = _peers.module("trl.trainer.dpo_trainer").DPOTrainer

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        return {"loss": trl_dpo_loss(trainer, inputs, **case.options)}

    return call


def _fake_model() -> Any:
    model: Any = torch.nn.Module()  # accelerate looks for its parts where PEFT is installed
    model.is_gradient_checkpointing = False
    return model


def _fake_accelerator() -> Any:
    return SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)


def _fake_outputs(inputs: dict[str, Any]) -> Any:
    """What TRL's fused head returns: 0 where the labels are ignored."""
    mask, zero = inputs["mask"], torch.zeros_like(inputs["logprobs"])
    return SimpleNamespace(
        log_probs=torch.where(mask, inputs["logprobs"], 0), entropy=zero, mean_logits=zero, is_top1=mask,
        log_sum_sq_probs=torch.where(mask, inputs.get("log_sum_sq_probs", zero), 0),
    )  # fmt: skip


def trl_dpo_loss(trainer: Any, inputs: dict[str, Any], **options: Any) -> Tensor:
    """``DPOTrainer._compute_loss``, unbound, on an object with the attributes that it reads."""
    mask = inputs["mask"]
    with_prompt = F.pad(mask, (1, 0)).long()
    options = {  # DPOConfig's
        "beta": 0.1, "loss_type": "sigmoid", "loss_weights": None, "label_smoothing": 0.0, "ld_alpha": None,
        "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "use_weighting": False,
    } | options  # fmt: skip
    given: Any = options.pop("loss_type")
    types = [given] if isinstance(given, str) else list(given)
    weights = options.pop("loss_weights") or [1.0] * len(types)
    reference = {"logprobs": inputs["ref_logprobs"], "mask": mask}
    this = SimpleNamespace(
        model=_fake_model(),
        accelerator=_fake_accelerator(), aux_loss_enabled=False,
        precompute_ref_logps=False, ref_model=lambda **kwargs: _fake_outputs(reference), loss_types=types,
        loss_weights=weights, _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0,
        _tp_size=1,
        args=SimpleNamespace(discopop_tau=options.pop("discopop_tau", 0.05),
        gradient_checkpointing_kwargs=None),
        **options,
    )  # fmt: skip
    batch = {"input_ids": with_prompt, "attention_mask": with_prompt, "completion_mask": with_prompt}
    return trainer._compute_loss(this, lambda **kwargs: _fake_outputs(inputs), batch, False)


def trl_kto_loss(trainer: Any, inputs: dict[str, Any], kl: Tensor, **options: Any) -> Tensor:
    """``KTOTrainer._compute_loss``, as above; ``kl`` is the log-ratio of its mismatched completions."""
    mask, labels = inputs["mask"], inputs["labels"]
    with_prompt = F.pad(mask, (1, 0)).long()
    options = {
        "beta": 0.1, "loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0,
    } | options  # fmt: skip
    this = SimpleNamespace(
        model=_fake_model(),
        accelerator=_fake_accelerator(), aux_loss_enabled=False,
        precompute_ref_logps=True, calculate_KL=options["loss_type"] == "kto",
        _compute_kl_logps=lambda *a: kl,
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1, **options,
    )  # fmt: skip
    batch = {
        "input_ids": with_prompt, "attention_mask": with_prompt, "completion_mask": with_prompt,
        "label": labels,
        "ref_logps": torch.where(mask, inputs["ref_logprobs"], 0).sum(1),
        "ref_KL_logps": torch.zeros_like(kl),
    }  # fmt: skip
    return trainer._compute_loss(this, lambda **kwargs: _fake_outputs(inputs), batch, False)


def _liger() -> Call:
    function = _peers.module("liger_kernel.chunked_loss.dpo_loss").LigerFusedLinearDPOFunction

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        if case.options:
            raise NotImplementedError("compared by its sigmoid loss")
        # as its chunk_forward sums, without the head in front of it
        mask = inputs["mask"]
        logps, ref = ((inputs[k] * mask).sum(-1).chunk(2) for k in ("logprobs", "ref_logprobs"))
        loss, *_ = function.preference_loss_fn(*logps, mask, *ref)
        return {"loss": loss}

    return call


def _compiled() -> Call:
    compiled = torch.compile(_by_hand)
    return lambda inputs, case: compiled(**inputs, **case.options)


PEERS = (
    Peer("torch", _torch),
    Peer("trl", _trl),
    Peer("liger", _liger),
    Peer("torch.compile", _compiled, on_request=True),
)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "trl", "liger"))


def test_preference_loss(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "preference_loss", case, backward, name)
