"""TRL's real DistillationTrainer, stock and under rlkernel.patch_trl(): the same training."""

import subprocess
import sys

import pytest
import tiny
import torch
import trl_places
from trl_places import trl
from trl_trainers import lora

import rlkernel

pytest.importorskip("trl.kernels.chunked_divergence", reason="needs TRL 1.15 or later")
nothing_left_behind = trl_places.nothing_left_behind

NAME = "ChunkedDivergenceFunction"
STEPS = 3
VOCAB = len(tiny.make_tokenizer())
SCALARS = ("loss", "grad_norm", "entropy", "eval_loss", "eval_entropy")
FAMILIES = {
    "Qwen2": {},
    "Gemma2": {"final_logit_softcapping": 0.2, "head_dim": 8, "query_pre_attn_scalar": 8},
    "Cohere": {"logit_scale": 0.5},
    "Phi": {},  # whose lm_head has a bias
}


def model(family="Qwen2", hidden=32, seed=0):
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
        pad_token_id=tiny.PAD, bos_token_id=tiny.BOS, eos_token_id=tiny.EOS, **FAMILIES[family],
    )  # fmt: skip
    found = getattr(transformers, f"{family}ForCausalLM")(config)
    if (bias := found.get_output_embeddings().bias) is not None:
        torch.nn.init.normal_(bias)
    return found


@pytest.fixture
def train(tmp_path):
    from datasets import Dataset

    prompts = Dataset.from_dict({"prompt": [f"what is {i} plus {i + 1}?" for i in range(32)]})

    def train(student="Qwen2", teacher="Qwen2", peft_config=None, **options):
        """Losses and metrics of every step and of an evaluation, and the weights after the last."""
        settings = {
            **tiny.TRAINING, "output_dir": str(tmp_path), "max_steps": STEPS, "temperature": 0.9,
            "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_completion_length": 6,
            "gradient_checkpointing": False, **options,
        }  # fmt: skip
        trainer = trl.DistillationTrainer(
            model=model(student), teacher_model=model(teacher, hidden=64, seed=1),
            args=trl.DistillationConfig(**settings), train_dataset=prompts,
            eval_dataset=prompts.select(range(4)), processing_class=tiny.make_tokenizer(),
            peft_config=peft_config,
        )  # fmt: skip
        trainer.train()
        trainer.evaluate()
        logs = [{k: x[k] for k in SCALARS if k in x} for x in trainer.state.log_history]
        weights = {k: x.clone() for k, x in trainer.model.state_dict().items()}
        return [x for x in logs if x], weights

    return train


def check_same(train, calls, metric=1e-5, weight=1e-4, **options):
    stock = train(**options)
    with rlkernel.patch_trl(vllm=False) as patch:
        found = train(**options)
    assert patch.calls == {NAME: calls} and not patch.fallbacks
    assert len(stock[0]) == STEPS + 1 and stock[0][-1].keys() == {"eval_loss", "eval_entropy"}
    assert len({round(x["loss"], 6) for x in stock[0][:-1]}) == STEPS  # what does not train is equal, too
    for step, (ours, theirs) in enumerate(zip(found[0], stock[0], strict=True)):
        assert ours == pytest.approx(theirs, rel=metric, abs=metric), step
    apart = {k: (found[1][k] - x).abs().max().item() for k, x in stock[1].items()}
    # a key's bias moves no probability: its gradient is rounding, of which Adam makes steps
    assert not (far := {k: x for k, x in apart.items() if x > weight and not k.endswith("k_proj.bias")}), far
    return stock


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_each_divergence(train, beta):
    check_same(train, STEPS + 1, beta=beta)


@pytest.mark.parametrize("student, teacher", [("Gemma2", "Cohere"), ("Cohere", "Gemma2"), ("Phi", "Phi")])
def test_softcaps_scales_and_biases(train, student, teacher):
    check_same(train, STEPS + 1, student=student, teacher=teacher)


def test_lora_and_gradient_accumulation(train):
    config = lora(lora_target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    _, weights = check_same(
        train, 2 * STEPS + 1, peft_config=config, gradient_accumulation_steps=2, beta=0.7, metric=2e-5
    )
    assert any("lora_B" in name and x.any() for name, x in weights.items())


def test_bf16_autocast(train):
    """TRL's products and ours are both of bf16 hidden states and weights into fp32 logits."""
    check_same(train, STEPS + 1, bf16=True, metric=3e-2, weight=4e-3)


def test_undo_leaves_no_trace(train):
    stock = train()
    with rlkernel.patch_trl(vllm=False):
        train()
    again = train()
    assert again[0] == stock[0] and all(torch.equal(again[1][k], x) for k, x in stock[1].items())


WAITS = """
import sys, rlkernel
patch = rlkernel.patch_trl(vllm=False)
assert "trl.kernels.chunked_divergence" not in sys.modules
import trl
trl.DistillationTrainer
import trl.kernels.chunked_divergence
modules = [x for name, x in sys.modules.items() if name.startswith("trl.")]
places = [x for x in modules if "ChunkedDivergenceFunction" in vars(x)]
assert len(places) == 1 + (trl.__version__ >= "1.16")
def now():
    (name,) = {repr(vars(place)["ChunkedDivergenceFunction"]) for place in places}
    return name
assert now() == "rlkernel.linear_divergence" and "ChunkedDivergenceFunction -> rlkernel" in repr(patch)
assert "trl.experimental.gkd.gkd_trainer" not in sys.modules
patch.undo()
assert "chunked_divergence" in now() and not any("Arrivals" in repr(finder) for finder in sys.meta_path)
with patch:
    assert now() == "rlkernel.linear_divergence"
import trl.experimental.gkd.gkd_trainer as gkd  # while it is off
stock = vars(gkd.GKDTrainer)["generalized_jsd_loss"]
with patch:
    assert now() == "rlkernel.linear_divergence"
    assert vars(gkd.GKDTrainer)["generalized_jsd_loss"] is not stock
assert vars(gkd.GKDTrainer)["generalized_jsd_loss"] is stock and "chunked_divergence" in now()
"""


def test_its_module_is_waited_for():
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", WAITS], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
