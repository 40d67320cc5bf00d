"""rlkernel.patch_trl(batch_invariant=True): the trainer's numbers are those of the rollout, to the bit.

With rollouts by ``generate``; in_trl_vllm has those of vLLM.
"""

import contextlib
import types

import pytest
import tiny
import torch
import transformers
import trl_prefix_cases
import trl_trainers
from trl_prefix_cases import METHOD, trl

import rlkernel
from rlkernel.integrations import _patch as patching
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.trl import head, invariant, invariant_reasons, passes, trl_patch

nothing_left_behind = trl_prefix_cases.nothing_left_behind
model_path, make_trainer = trl_trainers.model_path, trl_trainers.make_trainer
MODE = {"batch_invariant": True}


@pytest.fixture(autouse=True)
def prompts_of_several_lengths(monkeypatch):
    told = [text + " and so on" * (i % 4) for i, text in enumerate(trl_trainers.PROMPTS)]
    monkeypatch.setattr(trl_trainers, "PROMPTS", told)


def train(make_trainer, algorithm="GRPO", **options):
    """A trainer after its steps, with ``differences`` of each pass from what ``generate`` had."""
    options = {"temperature": 0.7, "max_steps": 3, "learning_rate": 3e-3} | options
    trainer = make_trainer(algorithm, base=comparing(algorithm), **options)
    generate, trainer.said = trainer.model.generate, {}

    def remember(**inputs):
        found = generate(**inputs, return_dict_in_generate=True, output_logits=True)
        tokens = found.sequences[:, inputs["input_ids"].shape[1] :]
        logits = torch.stack(found.logits, 1)
        logprobs = rlkernel.logprob(logits, tokens, temperature=options["temperature"]).logprobs
        trainer.said.clear()
        for prompt, there, row, scores in zip(*inputs_of(inputs), tokens.tolist(), logprobs, strict=True):
            for n in range(1, len(row) + 1):  # the end of the text may cut it anywhere
                trainer.said[(*prompt[there].tolist(), *row[:n])] = scores[:n]
        return found.sequences

    trainer.model.generate = remember
    trainer.train()
    assert trainer.differences
    return trainer


def inputs_of(inputs):
    return inputs["input_ids"], inputs["attention_mask"].bool()


def comparing(algorithm):
    class Comparing(getattr(trl, f"{algorithm}Trainer")):
        differences, passed = (), 0

    def compare(self, model, ids, mask, length, *args, **named):
        out = getattr(super(Comparing, self), METHOD)(model, ids, mask, length, *args, **named)
        first = self.state.global_step % self.args.steps_per_generation == 0  # of the rollout's policy
        if first or not torch.is_grad_enabled() or self.args.learning_rate == 0:
            for sample, there, scores in zip(ids, mask.bool(), out[0].detach(), strict=True):
                said = self.said[tuple(sample[there].tolist())]
                self.differences = (*self.differences, (scores[: len(said)] - said).abs())
        return out

    setattr(Comparing, METHOD, compare)
    return Comparing


def largest(trainer):
    return torch.cat(trainer.differences).max().item()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", ["GRPO", "RLOO"])
def test_rollout_and_trainer_agree_in_every_bit(make_trainer, algorithm, dtype):
    with rlkernel.patch_trl(**MODE) as patch:
        assert rlkernel.batch_invariant.is_enabled()
        trainer = train(make_trainer, algorithm, model_init_kwargs={"dtype": dtype})
        assert not patch.fallbacks
    assert not rlkernel.batch_invariant.is_enabled()
    assert largest(trainer) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_packing_matters(make_trainer, monkeypatch, dtype):
    """Old log-probabilities of other packs than those of the loss."""
    monkeypatch.setattr(passes._Call, "micro_batches", lambda self, sharing: [])
    options = {"steps_per_generation": 3, "learning_rate": 0.0, "model_init_kwargs": {"dtype": dtype}}
    with rlkernel.patch_trl(prefix_sharing="require", **MODE) as patch:
        trainer = train(make_trainer, **options)
        assert not patch.fallbacks and patch.prefix.ratio > 1.3
    assert largest(trainer) == 0


MUTANTS = {
    "padding counts": lambda here: here.setattr(invariant, "_with_positions", lambda m, a, k: (a, k)),
    "logits in fp32": lambda here: here.setattr(
        head, "linear_logprob_statistics", _in_fp32(head.linear_logprob_statistics)
    ),
}


def _in_fp32(original):
    return lambda *args, **named: original(*args, **named | {"logits_dtype": torch.float32})


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_piece_is_needed(make_trainer, monkeypatch, mutant):
    monkeypatch.setattr(invariant, "tried", lambda *_: "")  # which would see the second
    MUTANTS[mutant](monkeypatch)
    with rlkernel.patch_trl(**MODE):
        trainer = train(make_trainer, model_init_kwargs={"dtype": "bfloat16"}, max_steps=2)
    assert largest(trainer) > 0


def test_without_the_mode_they_differ(make_trainer):
    with rlkernel.patch_trl():
        trainer = train(make_trainer, model_init_kwargs={"dtype": "bfloat16"}, max_steps=1)
    assert largest(trainer) > 0


# what is not covered

NOT_COVERED = {
    "no dropout, got dropout of": {"model": "dropout"},
    "one dtype, got bfloat16, float32": {"model": "mixed"},
    "a model whose forward takes position_ids": {"model": "placeless"},
    "float32 under autocast to bfloat16": {"bf16": True},
    "cast_lm_head_to_fp32=False": {"cast_lm_head_to_fp32": True, "model_init_kwargs": {"dtype": "bfloat16"}},
    "use_transformers_continuous_batching=False": {"use_transformers_continuous_batching": True},
    "neftune_noise_alpha=None, got 5": {"neftune_noise_alpha": 5.0},
    "room for every kept token with top_p": {"use_vllm": True, "top_p": 0.9},
    "distribution, got min_tokens, repetition_penalty": {
        "use_vllm": True, "repetition_penalty": 1.1, "generation_kwargs": {"min_tokens": 3, "seed": 1},
    },
    "vllm_tensor_parallel_size=1, got 2": {"use_vllm": True, "vllm_tensor_parallel_size": 2},
    "without filters where vllm_mode is 'server', got top_k": {
        "use_vllm": True, "vllm_mode": "server", "top_k": 5,
    },
}  # fmt: skip


def odd(kind):
    model = tiny.make_model(vocab=len(tiny.make_tokenizer()))
    if kind == "dropout":
        model.model.dropout = torch.nn.Dropout(0.1)
    elif kind == "mixed":
        model.lm_head.to(torch.bfloat16)
    else:
        forward = model.forward
        model.forward = lambda input_ids, attention_mask=None, **rest: forward(input_ids, attention_mask)
    return model


@pytest.mark.parametrize("reason", NOT_COVERED)
def test_what_is_not_covered_is_refused_when_a_trainer_is_made(make_trainer, reason):
    options = dict(NOT_COVERED[reason])
    if "model" in options:
        options["model"] = odd(options["model"])
    with rlkernel.patch_trl(**MODE), pytest.raises(ValueError, match="the trainer must have .*" + reason):
        make_trainer(**options)


def test_adapters_are_refused_beside_vllm_and_agree_with_generate(make_trainer):
    peft_config = trl_trainers.lora(lora_dropout=0.0)
    with rlkernel.patch_trl(**MODE):
        with pytest.raises(ValueError, match="no adapter: an engine has it merged"):
            make_trainer(use_vllm=True, peft_config=peft_config)
        trainer = make_trainer(peft_config=peft_config, max_steps=1)
        trainer.train()


def test_a_model_that_mixes_rows_is_refused(make_trainer):
    def mixing(module, inputs, output):
        return output + output.mean(0, keepdim=True)

    model = tiny.make_model(vocab=len(tiny.make_tokenizer()))
    model.model.embed_tokens.register_forward_hook(mixing)
    with rlkernel.patch_trl(**MODE), pytest.raises(ValueError, match="alone and in a padded batch"):
        make_trainer(model=model)


def test_an_operation_that_the_mode_refuses_is_named(make_trainer):
    model = tiny.make_model(vocab=len(tiny.make_tokenizer()))
    model.model.norm.register_forward_hook(lambda m, i, output: torch.nn.functional.elu(output))
    with rlkernel.patch_trl(**MODE), pytest.raises(ValueError, match="RuntimeError: torch's elu must be"):
        make_trainer(model=model)


def mistral(window=None, **options):
    """On sdpa, whose steps behind a cache do not say where a window begins."""
    config = transformers.MistralConfig(
        **tiny_sizes(), hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=window, initializer_range=0.3, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(config)


def tiny_sizes():
    return {"vocab_size": len(tiny.make_tokenizer()), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def test_a_rollout_is_refused_what_its_trainer_would_be(make_trainer):
    """In a step of eight rows behind a cache, which neither the look at a tiny batch nor the loss has."""

    def odd_step(module, inputs, output):
        return torch.nn.functional.elu(output) if output.shape[:2] == (8, 1) else output

    model = tiny.make_model(vocab=len(tiny.make_tokenizer()))
    model.model.norm.register_forward_hook(odd_step)
    with rlkernel.patch_trl(**MODE):
        trainer = make_trainer(model=model)
        with pytest.raises(RuntimeError, match="torch's elu must be invariant"):
            trainer.train()
    assert not rlkernel.batch_invariant.is_enabled()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_model_that_rewards_another_changes_none_of_its_numbers(make_trainer):
    judge, tokenizer = mistral(40), tiny.make_tokenizer()  # a row of 40 keys is a step of the policy's too

    def reward(prompts, completions, **_):
        texts = [a + b for a, b in zip(prompts, completions, strict=True)]
        given = tokenizer(texts, return_tensors="pt", padding=True)
        with torch.no_grad():
            found = judge(given["input_ids"], attention_mask=given["attention_mask"]).logits
        return found.mean((1, 2)).tolist()

    with rlkernel.patch_trl(**MODE):
        trainer = train(make_trainer, reward=reward, model=mistral(), learning_rate=0.0)
    assert largest(trainer) == 0


def test_angles_that_follow_the_longest_row_are_refused(make_trainer, monkeypatch):
    monkeypatch.setattr(trl_trainers, "PROMPTS", [f"what is {i} plus {i + 1}?" for i in range(16, 48)])
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24} | factors
    model = mistral(rope_parameters=rope)
    with rlkernel.patch_trl(**MODE):
        trainer = train(make_trainer, model=model, max_completion_length=4)
        assert largest(trainer) == 0
        with pytest.raises(ValueError, match="samples of at most 24 tokens, got one of .* longrope"):
            make_trainer(model=model).train()


def test_a_trainer_from_before_is_looked_at_when_it_trains(make_trainer, monkeypatch):
    trainer = make_trainer(max_steps=1)
    trainer.model.model.dropout = torch.nn.Dropout(0.1)
    with rlkernel.patch_trl(**MODE), pytest.raises(ValueError, match="no dropout"):
        trainer.train()
    del trainer.model.model.dropout
    monkeypatch.setattr(trainer.args, "use_vllm", True)
    trainer.vllm_generation = types.SimpleNamespace()
    with rlkernel.patch_trl(**MODE) as patch, pytest.raises(ValueError, match="engine that was made while"):
        monkeypatch.setattr(patch.rollouts, "prepare", lambda trainer: None)
        trainer.train()


def test_engines_and_servers_say_what_they_have():
    on = types.SimpleNamespace(batch_invariant=True, ops=("sampler", "attention"), refused={})
    assert invariant_reasons.of_patch(on) == ""
    for change, reason in (
        ({"batch_invariant": False}, "got one without batch_invariant"),
        ({"ops": ("attention",)}, "leaves sampler to vLLM"),
        ({"refused": {"batch_invariant": "..."}}, "leaves batch_invariant to vLLM"),
    ):
        assert reason in invariant_reasons.of_patch(types.SimpleNamespace(**vars(on) | change))
    assert "got none" in invariant_reasons.of_patch(None)


HEADS = {"bias": torch.linspace(-1, 1, 60), "softcap": 3.0, "logit_scale": 0.3}


@pytest.mark.parametrize("name", HEADS)
def test_logits_that_a_model_rounds_again(name):
    """As transformers does, in the dtype of the model: bias, scale, softcap."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 32, generator=g).bfloat16() for n in (9, 60))
    targets = torch.randint(60, (9,), generator=g)
    options = {"bias": None, "softcap": None, "logit_scale": 1.0} | {name: HEADS[name]}
    bias = None if options["bias"] is None else options["bias"].bfloat16()
    with rlkernel.patch_trl(**MODE):
        apply = trl.trainer.utils._ChunkedLogProbFunction.apply
        found = apply(
            hidden, weight, bias, targets, 0.8, 4096, options["softcap"], options["logit_scale"],
            ("log_probs", "entropy"),
        )  # fmt: skip
        logits = torch.nn.functional.linear(hidden, weight, bias) * options["logit_scale"]
        if options["softcap"]:
            logits = torch.tanh(logits / options["softcap"]) * options["softcap"]
        want = rlkernel.logprob(logits, targets, temperature=0.8, return_entropy=True)
        also = apply(
            hidden, weight, bias, targets, 0.8, 4096, options["softcap"], options["logit_scale"],
            ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
        )  # fmt: skip
    for scores in (found, also):  # as GRPO and as the policy of DPO asks
        assert torch.equal(scores[0], want.logprobs) and torch.equal(scores[1], want.entropy)
    assert found[2:] == (None, None, None)
    z = logits.double() / 0.8
    logged = (2 * z.log_softmax(-1)).logsumexp(-1), z.mean(-1), z.argmax(-1) == targets
    for mine, other in zip(also[2:4], logged[:2], strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-6)
    assert torch.equal(also[4], logged[2])


def test_first_rewards_are_zero_where_logits_are_rounded_again(tmp_path):
    """The policy of DPO logs statistics, its reference none: their log-probabilities are the same numbers."""
    import datasets

    config = transformers.Gemma2Config(
        vocab_size=len(tiny.make_tokenizer()), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, final_logit_softcapping=3.0,
        pad_token_id=tiny.PAD, bos_token_id=tiny.BOS, eos_token_id=tiny.EOS, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(config).bfloat16()
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(tmp_path / "model")
    data = {"prompt": trl_trainers.PROMPTS, "chosen": [" it is 3."] * 32, "rejected": [" no."] * 32}
    settings = {
        **tiny.TRAINING,
        "output_dir": str(tmp_path),
        "max_steps": 1,
        "gradient_checkpointing": False,
    }
    with rlkernel.patch_trl(**MODE) as patch:
        trainer = trl.DPOTrainer(
            str(tmp_path / "model"), args=trl.DPOConfig(**settings, model_init_kwargs={"dtype": "bfloat16"}),
            train_dataset=datasets.Dataset.from_dict(data), processing_class=tiny.make_tokenizer(),
        )  # fmt: skip
        trainer.train()
    assert patch.calls and not patch.fallbacks
    first = trainer.state.log_history[0]
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0


# on and off


def test_options_and_undo():
    for value in (1, "on", None):
        with pytest.raises(ValueError, match="batch_invariant must be True or False"):
            rlkernel.patch_trl(batch_invariant=value)
    with pytest.raises(ValueError, match="batch_invariant must be False with vllm=False"):
        rlkernel.patch_trl(vllm=False, **MODE)
    with (
        rlkernel.patch_trl(),
        pytest.raises(PatchError, match="batch_invariant must be what the patch in place has"),
    ):
        rlkernel.patch_trl(**MODE)
    with contextlib.suppress(ZeroDivisionError), rlkernel.patch_trl(**MODE) as patch:
        assert rlkernel.patch_trl(**MODE) is patch and rlkernel.batch_invariant.is_enabled()
        raise ZeroDivisionError
    assert not rlkernel.batch_invariant.is_enabled()
    patch = rlkernel.patch_trl(**MODE)
    patch.undo()
    patch.undo()
    assert not rlkernel.batch_invariant.is_enabled()
    patch.apply()  # again
    assert rlkernel.batch_invariant.is_enabled()
    patch.undo()
    assert not rlkernel.batch_invariant.is_enabled()


def test_neither_the_patch_nor_the_mode_stays_without_the_other(monkeypatch):
    """Else the next call would find a patch in place that says it has the mode."""

    def refuses(**_):
        raise RuntimeError("no mode here")

    for owner, name in ((rlkernel, "batch_invariant"), (patching.Patch, "apply")):
        with monkeypatch.context() as here:
            here.setattr(owner, name, lambda *args, **options: refuses())
            with pytest.raises(RuntimeError, match="no mode here"):
                rlkernel.patch_trl(**MODE)
        assert trl_patch.TrlPatch.in_place() is None and not rlkernel.batch_invariant.is_enabled()
