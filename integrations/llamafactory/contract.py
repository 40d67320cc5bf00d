"""What rlkernel takes LLaMA-Factory to be: its version, its functions and how they are called."""

from __future__ import annotations

from rlkernel.integrations import _contract

FRAMEWORK = "LLaMA-Factory"
SUPPORTED = ">=0.9.5,<0.10"  # 0.9.5 has been run

TRAIN = "llamafactory.train"
HOMES = {  # of each part, the module that it replaces something in
    "logprobs": f"{TRAIN}.trainer_utils",
    "dpo": f"{TRAIN}.dpo.trainer",
    "kto": f"{TRAIN}.kto.trainer",
    "sft": f"{TRAIN}.sft.trainer",
    "v1": "llamafactory.v1.core.base_trainer",
}

_PAIRS = ("self", "chosen_logps", "rejected_logps")
PARAMETERS = {
    # train.trainer_utils
    "get_batch_logps": ("logits", "labels", "label_pad_token_id=-100", "ld_alpha=None"),
    "dft_loss_func": ("outputs", "labels", "num_items_in_batch=None"),
    # train.dpo.trainer, train.kto.trainer and train.sft.trainer
    "CustomDPOTrainer.concatenated_forward": ("self", "model", "batch", "is_ref_model=False"),
    "odds_ratio_loss": _PAIRS,
    "simpo_loss": _PAIRS,
    "CustomKTOTrainer.forward": ("self", "model", "batch", "prefix=''"),
    "compute_log_probs": ("self", "model", "batch"),  # of v1.core.base_trainer
    "CustomSeq2SeqTrainer.compute_loss": ("self", "model", "inputs", "*args", "**kwargs"),
}
# of TRL, whose kind of loss is an attribute before 0.20, and an argument since
_LOGPS = (*_PAIRS, "ref_chosen_logps", "ref_rejected_logps")
DPO_LOSS = (_LOGPS, (*_LOGPS, "loss_type='sigmoid'", "model_output=None"))

_CONTRACT = _contract.Contract(FRAMEWORK, SUPPORTED, PARAMETERS)
require_version, checked = _CONTRACT.require_version, _CONTRACT.checked
