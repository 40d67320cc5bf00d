"""Two programs, one number: what vLLM reports of every token of every step is what TRL computes."""

import pytest
import runs
import tiny
import torch
import transformers
from trl import GRPOTrainer, RLOOTrainer
from vllm import LLM

import rlkernel

# of several lengths, so that TRL pads on the left
PROMPTS = [f"what is {i} plus {i + 1}?" + " and so on" * (i % 4) for i in range(32)]
SETTINGS = {"per_device_train_batch_size": 8, "num_generations": 4, "learning_rate": 1e-3}
FAMILIES = {"Qwen2": {}, "Qwen3": {"head_dim": 64, "tie_word_embeddings": True}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    def save(family, dtype):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(
            vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, max_position_embeddings=256,
            **FAMILIES[family],
        )  # fmt: skip
        path = tmp_path_factory.mktemp(family)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        model.to(dtype).save_pretrained(path)
        tiny.make_tokenizer().save_pretrained(path)
        return str(path)

    return save


def train(path, out, dtype, **options):
    settings = SETTINGS | {"model_init_kwargs": {"dtype": dtype}, "prompts": PROMPTS} | options
    return runs.train(path, out, own_sync=True, **settings)  # the patch gives the engine its dtype


def differences(run, steps=runs.STEPS, scores=2):
    """Of all tokens, in the ``scores`` of each sample: the old log-probabilities, and those of the loss."""
    assert len(run.log) == steps
    assert len(run.differences) == scores * 8 * steps
    return torch.cat(run.differences)


@pytest.mark.parametrize(
    ("family", "dtype", "base", "patch"),
    [
        ("Qwen2", torch.float32, GRPOTrainer, {}),
        ("Qwen3", torch.bfloat16, GRPOTrainer, {"prefix_sharing": "require"}),
    ],
    ids=["Qwen2 fp32", "Qwen3 bf16, packed"],
)
def test_ten_steps_differ_by_exactly_zero(saved, tmp_path, family, dtype, base, patch):
    with rlkernel.patch_trl(batch_invariant=True, vllm="require", **patch) as patched:
        assert rlkernel.batch_invariant.is_enabled()
        run = train(saved(family, dtype), tmp_path, dtype, base=base, temperature=0.8)
        assert not patched.fallbacks and not patched.vllm.fallbacks
    assert not rlkernel.batch_invariant.is_enabled()
    found = differences(run)
    assert found.max() == 0, f"{int((found > 0).sum())} of {len(found)} differ"
    assert run.column(f"{runs.DIFFERENCE}/max") == [0.0] * runs.STEPS  # and TRL says so
    assert run.column(f"{runs.RATIO}/mean") == [1.0] * runs.STEPS
    still = run.column("frac_reward_zero_std")  # groups of which all samples have the same reward
    assert [norm > 0 for norm in run.column("grad_norm")] == [share < 1 for share in still]
    assert still[0] < 1
    rewards = run.column("reward")
    assert len(set(rewards)) > 5  # the policy moves


def test_tokens_are_scored_among_those_that_top_p_kept(saved, tmp_path):
    dtype, options = torch.bfloat16, {"max_steps": 3, "top_p": 0.9, "temperature": 0.9}
    with rlkernel.patch_trl(batch_invariant=True, support=512) as patched:
        run = train(saved("Qwen2", dtype), tmp_path, dtype, base=RLOOTrainer, **options)
        assert not patched.fallbacks
    assert differences(run, 3).max() == 0


def test_without_the_mode_they_differ(saved, tmp_path):
    """bf16: the attentions of both programs sum in other orders on every processor."""
    settings = SETTINGS | {"model_init_kwargs": {"dtype": torch.bfloat16}, "prompts": PROMPTS, "max_steps": 2}
    with rlkernel.patch_trl():
        run = runs.train(saved("Qwen2", torch.bfloat16), tmp_path, dtype="bfloat16", **settings)
    found = differences(run, 2)
    assert found.max() > 1e-3 and (found > 0).float().mean() > 0.5


def test_a_prefix_cache_that_is_left_full_is_seen(saved, tmp_path, monkeypatch):
    """A mutant: keys of the former weights, of which nothing else would tell."""
    monkeypatch.setattr(LLM, "reset_prefix_cache", lambda self, *_: True)
    with rlkernel.patch_trl(batch_invariant=True):
        run = train(
            saved("Qwen2", torch.float32), tmp_path, torch.float32, max_steps=2, prompts=[PROMPTS[3]] * 2
        )
    first, second = (torch.cat(run.differences[16 * i : 16 * (i + 1)]) for i in range(2))
    assert first.max() == 0 and second.max() > 1e-3


def test_a_prefix_cache_that_cannot_be_emptied_is_an_error(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(LLM, "reset_prefix_cache", lambda self, *_: False)
    with (
        rlkernel.patch_trl(batch_invariant=True),
        pytest.raises(RuntimeError, match="forget the prefixes of former weights"),
    ):
        train(saved("Qwen2", torch.float32), tmp_path, torch.float32, max_steps=1)
