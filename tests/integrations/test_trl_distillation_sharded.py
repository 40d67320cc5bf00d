"""TRL's DistillationTrainer under rlkernel.patch_trl() on two ranks, over which both models are spread."""

import warnings

import pytest
import ranks
import tiny
import torch

pytest.importorskip("trl.kernels.chunked_divergence", reason="needs TRL 1.15 or later")
pytestmark = ranks.pytestmark

NAME = "ChunkedDivergenceFunction"
SHARDING = {
    "zero3": {"deepspeed": ranks.automatic_zero(3)},
    "fsdp2": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
    },
}


def _train(rank, kind, student, teacher):
    """Losses, gradient norms and entropies of stock TRL and of the patched one, and the patch's counts."""
    import accelerate
    import trl
    from datasets import Dataset

    import rlkernel

    warnings.simplefilter("ignore")
    ranks.accelerate_without_gpus()
    settings = {
        **tiny.TRAINING, "use_cpu": False, "output_dir": f"{student}/out", "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "beta": 0.3, "max_completion_length": 6, "max_steps": 3,
        "optim": "adamw_torch", "gradient_checkpointing": False,
    }  # fmt: skip
    data = Dataset.from_dict({"prompt": ["say abc def ghi", "the quick brown", "hello there", "one two"] * 8})

    def train():
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        trainer = trl.DistillationTrainer(
            model=student, teacher_model=teacher, args=trl.DistillationConfig(**settings, **SHARDING[kind]),
            train_dataset=data, processing_class=tiny.make_tokenizer(),
        )  # fmt: skip
        trainer.train()
        steps = [row for row in trainer.state.log_history if "loss" in row]
        return [[row[name] for name in ("loss", "grad_norm", "entropy")] for row in steps]

    stock = train()
    with rlkernel.patch_trl(vllm=False) as patch:
        found = train()
    return stock, found, dict(patch.calls), dict(patch.fallbacks)


@pytest.mark.parametrize("kinds", ranks.kinds("zero3", "fsdp2", apart=True))
def test_training_is_that_of_stock_trl(kinds, tmp_path):
    """The heads of both models are gathered for forward, and under ZeRO-3 again for backward."""
    vocab = len(tiny.make_tokenizer())
    paths = [str(tmp_path / name) for name in ("student", "teacher")]
    for path, hidden in zip(paths, (32, 64), strict=True):
        tiny.make_model(vocab=vocab, hidden=hidden).save_pretrained(path)
    (reports,) = ranks.run(_train, kinds, tmp_path, *paths).values()
    for stock, found, calls, fallbacks in reports:
        assert calls == {NAME: 6} and not fallbacks
        assert len(stock) == 3 and stock[0][0] > 1e-3
        torch.testing.assert_close(torch.tensor(found), torch.tensor(stock), rtol=1e-5, atol=1e-6)
