"""Trainers of an earlier TRL on two ranks, under DDP, FSDP 2 and ZeRO-3: stock and rlkernel.patch_trl().

../test_trl_earlier.py runs this file by itself: the ranks import TRL, and this process does not.
"""

import os
import warnings

import pytest
import ranks
import tiny
import torch

import rlkernel

VOCABULARY = 2048
ROWS = 128  # of logits, which are as much as the least of workspaces
TRAININGS = {"GRPO": {"num_iterations": 2, "temperature": 0.7}, "DPO": {}}
SHARDING = {
    "ddp": {"ddp_find_unused_parameters": False},
    "fsdp2": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
    },
    "zero3": {"deepspeed": ranks.automatic_zero(3)},
}


def _trainings(rank, kind, folder):
    """Of each algorithm: rows of logits that stock TRL made at once, those of the patched, and the patch's
    counts.  Logs and weights are compared here."""
    import earlier

    warnings.simplefilter("ignore")
    ranks.accelerate_without_gpus()
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):  # of the kind before
        os.environ.pop(name, None)
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # or DDP takes the GPU of the rank's number
    path = f"{folder}/{kind}"
    if rank == 0:
        tiny.save(path, vocab=VOCABULARY, hidden=32)
    torch.distributed.barrier()
    found = {}
    for algorithm in TRAININGS:
        stock, stock_rows = _trained(algorithm, kind, path)
        with rlkernel.workspace.limited(4 * ROWS * VOCABULARY), rlkernel.patch_trl() as patch:
            patched, rows = _trained(algorithm, kind, path)
        assert len(stock[0]) == 2 and abs(stock[0][1]["loss"]) > 1e-3, stock[0]
        earlier.check_same(patched, stock, 1e-5, 1e-5)
        found[algorithm] = stock_rows, rows, dict(patch.calls), dict(patch.fallbacks)
    return found


def _trained(algorithm, kind, path):
    """What a training logged and its weights, and the most rows of logits in a tensor of its losses."""
    import accelerate
    import earlier

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    rows = []
    base = earlier.watched(getattr(earlier.trl, f"{algorithm}Trainer"), VOCABULARY, rows)
    settings = {"use_cpu": False, "optim": "adamw_torch", "max_steps": 2, "per_device_train_batch_size": 16}
    trainer = earlier.make(algorithm, path, base, **settings | TRAININGS[algorithm] | SHARDING[kind])
    trainer.train()
    return (earlier.log_of(trainer), ranks.weights(trainer.model_wrapped, kind)), max(rows)


@pytest.mark.parametrize("kinds", ranks.kinds("ddp", "fsdp2", "zero3", apart=True))
def test_ranks_train_the_same(tmp_path, kinds):
    for kind, reports in ranks.run(_trainings, kinds, tmp_path, str(tmp_path / "models")).items():
        assert len(reports) == ranks.RANKS
        for found in reports:
            print(kind, found)
            for stock, patched, _, fallbacks in found.values():
                assert stock > 2 * ROWS > ROWS >= patched > 0 and not fallbacks, (kind, found)
            # the old logprobs and the reference's of a batch, and each of two losses: one pass each
            assert found["GRPO"][2] == {"GRPOTrainer._get_per_token_logps_and_entropies": 4}, (kind, found)
            assert found["DPO"][2] == {"DPOTrainer._compute_loss": 2}, (kind, found)
