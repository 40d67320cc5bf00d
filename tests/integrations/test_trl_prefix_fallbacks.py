"""rlkernel.patch_trl(prefix_sharing=True): what is left to TRL and why, and the options."""

import inspect
import re
import types

import pytest
import torch
import trl_prefix_cases
from trl_prefix_cases import (
    COMPLETION,
    METHOD,
    PROMPT,
    UPSTREAM,
    accelerate,
    assert_same_pass,
    make_model,
    one_pass,
    patch_trl,
    samples,
    trl,
)

import rlkernel
from rlkernel.integrations import hf
from rlkernel.integrations._patch import PatchError

nothing_left_behind, trainer = trl_prefix_cases.nothing_left_behind, trl_prefix_cases.trainer


# What is left to TRL, one reason at a time


def hole(ids, mask):
    mask = mask.clone()
    mask[0, PROMPT + 2] = 0
    return ids, mask


def empty_prompt(ids, mask):
    mask = mask.clone()
    mask[3, :PROMPT] = 0
    return ids, mask


def padded_on_the_right(ids, mask):
    mask = mask.clone()
    mask[:, PROMPT - 1] = 0
    return ids, mask


def no_completion(ids, mask):
    mask = mask.clone()
    mask[:, PROMPT:] = 0
    return ids, mask


def different_prompts(ids, mask):
    ids = ids.clone()
    ids[:, PROMPT - 1] = torch.arange(len(ids))
    return ids, torch.ones_like(mask)


@pytest.mark.parametrize(
    "change, reason",
    [
        (hole, "attention_mask has a hole"),
        (empty_prompt, "a prompt is empty, or padded on the right"),
        (padded_on_the_right, "a prompt is empty, or padded on the right"),
        (no_completion, "no completion has a token"),
        (different_prompts, "fewer than 1.1 tokens a row"),
    ],
)
def test_samples_that_are_left_to_trl(trainer, change, reason):
    model, inputs = make_model(), change(*samples())
    stock = one_pass(trainer, model, *inputs)
    with rlkernel.patch_trl():
        unpacked = one_pass(trainer, model, *inputs)
    with patch_trl() as patch:
        same = one_pass(trainer, model, *inputs)
    assert patch.fallbacks == {f"{METHOD}: {reason}": 1} and METHOD not in patch.calls
    assert_same_pass(same, stock)
    assert all(torch.equal(a, b) for a, b in zip(same[0], unpacked[0], strict=True))


def test_arguments_that_are_left_to_trl(trainer):
    model, (ids, mask) = make_model(), samples()
    with patch_trl() as patch, torch.no_grad():
        method = getattr(trl.GRPOTrainer, METHOD)
        with pytest.raises(TypeError):  # of the model, which has no use for it
            method(trainer, model, ids, mask, COMPLETION, pixel_values=torch.zeros(8, 1))
        method(trainer, model, ids, mask, COMPLETION, None, False, False, None, num_images=None)
    assert patch.fallbacks == {f"{METHOD}: pixel_values is given": 1} and patch.calls[METHOD] == 1


def with_dropout(model):
    model.model.extra = torch.nn.Dropout(0.1)
    return model.train()


def with_functional_dropout(model):
    model.model.activation_dropout = 0.1
    return model.train()


def compiled(model):
    model.compile()
    return model


def with_attention_dropout(model):
    model.config.attention_dropout = 0.1
    return model.train()


def with_convolution(model):
    model.model.extra = torch.nn.Conv1d(1, 1, 1)
    return model


def data_parallel(model):
    return torch.nn.DataParallel(model)


@pytest.mark.parametrize(
    "change, reason",
    [
        (with_dropout, "dropout: completions would share the noise of their prompt"),
        (with_functional_dropout, "dropout: completions would share the noise of their prompt"),
        (compiled, "torch.compile would compile anew for every batch"),
        (torch.compile, "torch.compile would compile anew for every batch"),
        (with_attention_dropout, "attention dropout must be 0 in training, got 0.1"),
        (with_convolution, "Conv1d mix tokens of neighbouring rows"),
        (data_parallel, "DataParallel splits the batch by samples"),
    ],
)
def test_models_that_are_left_to_trl(trainer, change, reason, monkeypatch):
    ran = []
    monkeypatch.setattr(trl.GRPOTrainer, METHOD, stub := _stub(ran))
    monkeypatch.setitem(UPSTREAM, METHOD, stub)  # TRL's own code is not what this test is about
    model, (ids, mask) = change(make_model()), samples()
    with patch_trl() as patch:
        getattr(trl.GRPOTrainer, METHOD)(trainer, model, ids, mask, COMPLETION)
    (found,) = patch.fallbacks
    assert ran == [1] and METHOD not in patch.calls
    assert re.search(f"^{METHOD}: .*{reason}", found), found


def _stub(ran):
    def method(self, model, input_ids, *rest, **options):
        ran.append(1)
        return None, None, None

    method.__signature__ = inspect.signature(UPSTREAM[METHOD])
    return method


@pytest.mark.parametrize(
    "setting, reason",
    [
        # it raises on an attention that is not transformers' own
        ("use_transformers_continuous_batching", "continuous batching"),
        ("_is_vlm", "a vision-language model makes positions of its own"),
    ],
)
def test_trainers_that_are_left_alone(trainer, setting, reason):
    special = types.SimpleNamespace(**vars(trainer), **{setting: True})
    model, (ids, mask) = make_model(), samples()
    with patch_trl() as patch, torch.no_grad():
        getattr(trl.GRPOTrainer, METHOD)(special, model, ids, mask, COMPLETION)
        assert model.config._attn_implementation == "sdpa"
    (found,) = patch.fallbacks
    assert reason in found and METHOD not in patch.calls


def test_learned_positions_are_packed_where_nothing_is_padded(trainer):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=211, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = make_model(GPT2LMHeadModel(config))
    reason = f"{METHOD}: positions are not rotary, and TRL counts the padding of prompts"
    for prompts, fallbacks in (((9, 9), {}), ((9, 5), {reason: 1})):
        inputs = samples(prompts=prompts)
        stock = one_pass(trainer, model, *inputs)
        with patch_trl() as patch:
            assert_same_pass(one_pass(trainer, model, *inputs), stock)
        assert patch.fallbacks == fallbacks and patch.calls[METHOD] == 1 - len(fallbacks)


@pytest.mark.parametrize(
    "setting, reason",
    [
        (
            {"distributed_type": types.SimpleNamespace(value="MEGATRON_LM")},
            "accelerate runs the model through MEGATRON_LM",
        ),
        (
            {"parallelism_config": types.SimpleNamespace(cp_enabled=True)},
            "context parallelism splits the tokens of a sequence",
        ),
        (
            {"parallelism_config": types.SimpleNamespace(sp_enabled=True)},
            "context parallelism splits the tokens of a sequence",
        ),
    ],
)
def test_ways_to_run_a_model_that_are_left_to_trl(setting, reason):
    model, (ids, mask) = make_model(), samples()
    plain = accelerate.Accelerator(cpu=True)
    settings = {"distributed_type": plain.distributed_type, "is_main_process": True} | setting
    accelerator = types.SimpleNamespace(unwrap_model=lambda m: m, autocast=plain.autocast, **settings)
    with patch_trl() as patch, torch.no_grad():
        trainer = types.SimpleNamespace(accelerator=accelerator)
        getattr(trl.GRPOTrainer, METHOD)(trainer, model, ids, mask, COMPLETION)
    (found,) = patch.fallbacks
    assert reason in found and METHOD not in patch.calls


def test_attention_that_goes_another_way_is_an_error(trainer, monkeypatch):
    """A layer that never calls the registered attention would attend to the whole packed batch."""
    monkeypatch.setattr(hf, "verify", lambda model: [])  # which finds it first
    model, (ids, mask) = make_model(), samples()
    first = model.model.layers[0]
    first.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with patch_trl(), pytest.raises(ValueError, match="each of its 2 layers .* got 1 calls"):
        getattr(trl.GRPOTrainer, METHOD)(trainer, model, ids, mask, COMPLETION)


def mixing(model):
    """A module that mixes neighbours, and whose name does not say so."""
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output + output.roll(1, 1))
    return model


def stablelm():
    """Its files take registered attention, and its layers do not call it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.StableLmConfig(
        vocab_size=211, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, pad_token_id=0,
    )  # fmt: skip
    return make_model(transformers.StableLmForCausalLM(config))


@pytest.mark.parametrize(
    "make, reason",
    [
        (
            lambda: mixing(make_model()),
            "logits of a tiny packed batch differ from those of its samples",
        ),
        (stablelm, "a tiny packed batch fails with ValueError: .* each of its 2 layers must call"),
    ],
    ids=("mixing", "stablelm"),
)
def test_what_only_running_shows_is_left_to_trl(trainer, monkeypatch, make, reason):
    model, inputs = make(), samples()
    stock = one_pass(trainer, model, *inputs)
    verified, verify = [], hf.verify
    monkeypatch.setattr(hf, "verify", lambda model: verified.append(model) or verify(model))
    with patch_trl() as patch:
        for _ in range(2):
            assert_same_pass(one_pass(trainer, model, *inputs), stock)
    assert [re.search(reason, key) is not None for key in patch.fallbacks] == [True]
    assert not patch.calls[METHOD] and verified == [model]


# On, off, and options


def test_replaces_and_restores(trainer):
    model, (ids, mask) = make_model(), samples()
    eager = make_model()
    eager.set_attn_implementation("eager")
    with patch_trl() as patch, torch.no_grad():
        assert f"trl.trainer.grpo_trainer.GRPOTrainer.{METHOD}" in patch.replaced
        assert "packed_logps_and_entropies" in repr(patch) and "shuffle_groups" in repr(patch)
        for each in (model, eager, model):
            getattr(trl.GRPOTrainer, METHOD)(trainer, each, ids, mask, COMPLETION)
            assert hf.is_registered(each.config._attn_implementation)
    assert model.config._attn_implementation == "sdpa" and eager.config._attn_implementation == "eager"


def test_without_the_option_nothing_is_packed(trainer):
    with rlkernel.patch_trl() as patch:
        assert patch.prefix is None and vars(trl.GRPOTrainer)[METHOD] is UPSTREAM[METHOD]
        one_pass(trainer, make_model(), *samples())
    assert METHOD not in patch.calls


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prefix_sharing": 1}, "prefix_sharing must be True, False or .require., got 1"),
        ({"prefix_min_ratio": 2}, "prefix_min_ratio must be None without prefix_sharing, got 2"),
        (
            {"prefix_sharing": True, "prefix_min_ratio": 0.5},
            "prefix_min_ratio must be a number >= 1, got 0.5",
        ),
        (
            {"prefix_sharing": True, "prefix_min_ratio": True},
            "prefix_min_ratio must be a number >= 1, got True",
        ),
        (
            {"prefix_sharing": True, "prefix_min_ratio": float("nan")},
            "prefix_min_ratio must be a number >= 1, got nan",
        ),
    ],
)
def test_options_are_validated(options, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.patch_trl(**options)


def test_a_standing_patch_is_not_changed():
    with rlkernel.patch_trl(), pytest.raises(PatchError, match="prefix_sharing must be .* got True"):
        patch_trl()
    with patch_trl(prefix_min_ratio=2) as patch:
        assert rlkernel.patch_trl() is patch and patch_trl(prefix_min_ratio=2) is patch
        with pytest.raises(PatchError, match="prefix_min_ratio must be .* 2, got 3"):
            patch_trl(prefix_min_ratio=3)


def test_refuses_a_method_of_another_contract(monkeypatch):
    def other(self, model, input_ids):
        return None

    monkeypatch.setattr(trl.GRPOTrainer, METHOD, other)
    monkeypatch.setitem(UPSTREAM, METHOD, other)
    with pytest.raises(
        PatchError, match=rf"{METHOD} must take \(self, model, .*\), got \(self, model, input"
    ):
        patch_trl()
    rlkernel.patch_trl().undo()  # which does not concern it
