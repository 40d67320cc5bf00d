"""rlkernel.patch_trl(prefix_sharing=True) under the real GRPOTrainer: the same training from fewer rows."""

import inspect
import re
import types

import pytest
import tiny
import torch

import rlkernel
from rlkernel.integrations import hf
from rlkernel.integrations._patch import PatchError

trl = pytest.importorskip("trl", reason="needs TRL, which rlkernel does not depend on")
accelerate = pytest.importorskip("accelerate")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")

from rlkernel.integrations import _trl_prefix as prefix  # noqa: E402  (needs TRL)
from rlkernel.prefix_batch import PrefixBatch  # noqa: E402

METHOD, SHUFFLE = prefix.METHOD, prefix.SHUFFLE
UPSTREAM = {
    METHOD: vars(trl.GRPOTrainer)[METHOD],
    SHUFFLE: grpo_trainer.shuffle_sequence_dict,
}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    assert vars(trl.GRPOTrainer)[METHOD] is UPSTREAM[METHOD], "a test left the method patched"
    assert grpo_trainer.shuffle_sequence_dict is UPSTREAM[SHUFFLE], "a test left the shuffle patched"


def patch_trl(**options):
    return rlkernel.patch_trl(prefix_sharing=True, **options)


# One pass: the method that the trainer scores tokens with

PROMPTS, GROUP, PROMPT, COMPLETION = 2, 4, 9, 6
LENGTHS = (6, 3, 0, 1, 6, 6, 2, 5)  # of the completions; one is empty
OUTPUTS = ("log_probs", "entropy")


def make_model(model=None, temperature=0.7):
    from trl.trainer.utils import add_fused_lm_head

    model = tiny.make_model(vocab=211, hidden=32) if model is None else model
    add_fused_lm_head(model, temperature=temperature, outputs=OUTPUTS)  # as GRPOTrainer does
    return model


def make_moe(**options):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=211, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=1, norm_topk_prob=True, pad_token_id=0, **options,
    )  # fmt: skip
    return make_model(Qwen3MoeForCausalLM(config))


def samples(lengths=LENGTHS, prompts=(9, 5), seed=0):
    """TRL's tensors: prompts padded on the left, completions on the right."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 211, (PROMPTS * GROUP, PROMPT + COMPLETION), generator=g)
    mask = torch.ones_like(ids)
    for group, length in enumerate(prompts):
        rows = slice(group * GROUP, (group + 1) * GROUP)
        ids[rows, :PROMPT] = ids[group * GROUP, :PROMPT]
        mask[rows, : PROMPT - length] = 0
    for row, length in enumerate(lengths):
        mask[row, PROMPT + length :] = 0
    return ids * mask, mask


@pytest.fixture(scope="module")
def trainer():
    """What the method reads of a trainer."""
    return types.SimpleNamespace(accelerator=accelerate.Accelerator(cpu=True))


def one_pass(trainer, model, ids, mask, batch_size=None, aux_loss=False, **inputs):
    """Logprobs, entropies, aux loss and all gradients of a loss of the three."""
    model.zero_grad()
    method = getattr(trl.GRPOTrainer, METHOD)
    scores = method(
        trainer, model, ids, mask, COMPLETION, batch_size, compute_entropy=True, compute_aux_loss=aux_loss,
        **inputs,
    )  # fmt: skip
    logps, entropies, aux = scores
    row = torch.linspace(-1, 1, logps.numel()).view_as(logps)
    ((logps * row).sum() + (entropies * row.flip(0)).sum() + (100 * aux if aux_loss else 0)).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [x.detach() for x in scores if x is not None], grads


def assert_same_pass(ours, theirs, limit=5e-6):
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=limit, atol=limit)
    assert ours[1].keys() == theirs[1].keys()
    for name, other in theirs[1].items():
        apart = (ours[1][name] - other).abs().max() / other.abs().max().clamp_min(1e-3)
        assert apart <= 4 * limit, f"gradient of {name} differs by {apart:.1e}"


@pytest.mark.parametrize("batch_size", [None, 4, 3, 1], ids=["whole", "4", "3", "1"])
def test_one_pass_gives_trls_values_and_gradients(trainer, batch_size):
    model, inputs = make_model(), samples()
    stock = one_pass(trainer, model, *inputs, batch_size)
    with patch_trl(prefix_min_ratio=1) as patch:
        packed = one_pass(trainer, model, *inputs, batch_size)
    assert patch.calls[METHOD] == 1 and not patch.fallbacks
    rows = sum(length - 1 for length in (9, 5)) + sum(LENGTHS)
    assert patch.prefix.tokens == {"padded": 8 * 15, "packed": rows}
    assert_same_pass(packed, stock)


def test_rows_are_bounded_by_trls_chunk(trainer, monkeypatch):
    """TRL's chunk of 2 samples is 30 tokens: no pass has more rows, and each has as many samples as fit."""
    model, (ids, mask) = make_model(), samples()
    rows = []
    run = prefix._run
    monkeypatch.setattr(prefix, "_run", lambda call, part, s: rows.append(part.total) or run(call, part, s))
    with patch_trl(), torch.no_grad():
        getattr(trl.GRPOTrainer, METHOD)(trainer, model, ids, mask, COMPLETION, 2)
    assert len(rows) == 2 and max(rows) <= 30 and sum(rows) == 12 + sum(LENGTHS)


def test_head_scores_labelled_rows_only(trainer, monkeypatch):
    from rlkernel.integrations import trl as integration

    scored = []
    statistics = integration.linear_logprob_statistics

    def counting(hidden, *rest, **options):
        scored.append(len(hidden))
        return statistics(hidden, *rest, **options)

    monkeypatch.setattr(integration, "linear_logprob_statistics", counting)
    with patch_trl():
        one_pass(trainer, make_model(), *samples())
    assert scored == [sum(LENGTHS)]


def test_all_samples_of_one_part_may_be_empty(trainer):
    model, inputs = make_model(), samples((6, 3, 5, 1, 0, 0, 0, 0))
    stock = one_pass(trainer, model, *inputs)
    for batch_size in (None, 1):  # 15 tokens: each prompt's samples by themselves
        with patch_trl() as patch:
            assert_same_pass(one_pass(trainer, model, *inputs, batch_size), stock)
        assert not patch.fallbacks


@pytest.mark.parametrize("length", [COMPLETION, 4], ids=["full", "padded"])
def test_aux_loss_is_that_of_the_samples_alone(trainer, length):
    model, inputs = make_moe(), samples((length, 3, 0, 1, length, length, 2, 5))
    stock = one_pass(trainer, model, *inputs, aux_loss=True)
    with patch_trl() as patch:
        packed = one_pass(trainer, model, *inputs, aux_loss=True)
    assert patch.calls[METHOD] == 1 and not patch.fallbacks
    assert_same_pass(packed, stock)


@pytest.mark.parametrize("weights", [lambda batch: torch.ones(batch.total)], ids=["each row once"])
def test_aux_loss_without_weights_fails(trainer, monkeypatch, weights):
    model, inputs = make_moe(), samples()
    stock = one_pass(trainer, model, *inputs, aux_loss=True)
    monkeypatch.setattr(PrefixBatch, "token_counts", weights)
    with patch_trl(), pytest.raises(AssertionError):
        assert_same_pass(one_pass(trainer, model, *inputs, aux_loss=True), stock, 1e-3)


def test_a_router_that_logs_without_aux_loss(trainer):
    """The config asks for router logits, TRL does not: transformers would average them over the stand-in."""
    model, inputs = make_moe(output_router_logits=True), samples()
    stock = one_pass(trainer, model, *inputs)
    with patch_trl():
        assert_same_pass(one_pass(trainer, model, *inputs), stock)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(trainer, reentrant):
    model, inputs = make_model(), samples()
    stock = one_pass(trainer, model, *inputs)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with patch_trl() as patch:
        assert_same_pass(one_pass(trainer, model, *inputs), stock)
    assert not patch.fallbacks


def test_through_ddp(trainer):
    """The batch travels through the wrapper, and its gradient hooks fire."""
    dist = torch.distributed
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("needs torch.distributed, not in use")
    model, inputs = make_model(), samples()
    stock = one_pass(trainer, model, *inputs)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        reduced = []
        wrapped.register_comm_hook(None, lambda _, bucket: reduced.append(1) or _future(bucket.buffer()))
        with patch_trl() as patch:
            values, grads = one_pass(trainer, wrapped, *inputs)
        assert reduced and patch.calls[METHOD] == 1 and not patch.fallbacks
        assert_same_pass((values, {k.removeprefix("module."): g for k, g in grads.items()}), stock)
    finally:
        dist.destroy_process_group()


def _future(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def test_peft_adapter_and_its_base(trainer):
    peft = pytest.importorskip("peft", reason="needs PEFT, which rlkernel does not depend on")
    model = peft.get_peft_model(make_model(), peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM"))
    inputs = samples()
    stock = one_pass(trainer, model, *inputs)
    with patch_trl() as patch:
        assert_same_pass(one_pass(trainer, model, *inputs), stock)
    assert patch.calls[METHOD] == 1 and not patch.fallbacks
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    virtual = peft.get_peft_model(make_model(), config)
    with patch_trl() as patch, torch.no_grad():
        getattr(trl.GRPOTrainer, METHOD)(trainer, virtual, *inputs, COMPLETION)
    assert patch.fallbacks == {f"{METHOD}: PEFT puts virtual tokens in front of each prompt": 1}


# Mutants: what must not pass


def rolled(batch, per_token, fill=0.0, unpack=PrefixBatch.unpack):
    return unpack(batch, per_token, fill).roll(1, 0)


def shifted(batch, hidden, rows=PrefixBatch.completion_rows):
    return rows(batch, hidden).roll(1, 0)


@pytest.mark.parametrize("name, mutant", [("unpack", rolled), ("completion_rows", shifted)])
def test_a_wrong_order_fails(trainer, monkeypatch, name, mutant):
    model, inputs = make_model(), samples()
    stock = one_pass(trainer, model, *inputs)
    monkeypatch.setattr(PrefixBatch, name, mutant)
    with patch_trl(), pytest.raises(AssertionError):
        assert_same_pass(one_pass(trainer, model, *inputs), stock, 1e-2)


def test_parts_in_the_wrong_order_fail(trainer, monkeypatch):
    model, inputs = make_model(), samples()
    stock = one_pass(trainer, model, *inputs)
    split = PrefixBatch.split

    def renumbered(batch, max_tokens):
        parts = split(batch, max_tokens)
        for part in parts:
            part.samples = len(batch) - 1 - part.samples
        return parts

    monkeypatch.setattr(PrefixBatch, "split", renumbered)
    with patch_trl(), pytest.raises(AssertionError):
        assert_same_pass(one_pass(trainer, model, *inputs, 1), stock, 1e-2)


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
    def method(self, model, input_ids, *rest):
        ran.append(1)

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


@pytest.mark.parametrize("kind", ["FSDP", "MEGATRON_LM"])
def test_sharded_models_are_left_to_trl(kind):
    model, (ids, mask) = make_model(), samples()
    accelerator = accelerate.Accelerator(cpu=True)
    sharded = types.SimpleNamespace(
        distributed_type=types.SimpleNamespace(value=kind),
        unwrap_model=lambda m: m, autocast=accelerator.autocast, is_main_process=True,
    )  # fmt: skip
    with patch_trl() as patch, torch.no_grad():
        getattr(trl.GRPOTrainer, METHOD)(
            types.SimpleNamespace(accelerator=sharded), model, ids, mask, COMPLETION
        )
    reason = "the model is sharded, and ranks would differ in the number of passes"
    assert patch.fallbacks == {f"{METHOD}: {reason}": 1} and METHOD not in patch.calls


def test_attention_that_goes_another_way_is_an_error(trainer):
    """A layer that never calls the registered attention would attend to the whole packed batch."""
    model, (ids, mask) = make_model(), samples()
    first = model.model.layers[0]
    first.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with patch_trl(), pytest.raises(ValueError, match="each of its 2 layers .* got 1 calls"):
        getattr(trl.GRPOTrainer, METHOD)(trainer, model, ids, mask, COMPLETION)


# The shuffle


def generation_batch(groups=(4, 4, 4, 4)):
    prompt = torch.arange(len(groups)).repeat_interleave(torch.tensor(groups))
    n = len(prompt)
    return {
        "prompt_ids": torch.stack([prompt, prompt * 7], 1),
        "advantages": torch.arange(n).float(),
        "names": [f"sample {i}" for i in range(n)],
        "num_items_in_batch": torch.tensor(99),
        "missing": None,
    }


@pytest.mark.parametrize("groups", [(4, 4, 4, 4), (1, 1, 1), (3, 5, 1, 2), (6,)])
def test_shuffle_moves_groups_as_a_whole(groups):
    batch = generation_batch(groups)
    orders = set()
    with patch_trl() as patch:
        for seed in range(40):
            torch.manual_seed(seed)
            out = grpo_trainer.shuffle_sequence_dict(batch)
            rows = out["advantages"].long().tolist()
            assert sorted(rows) == list(range(sum(groups))) and out.keys() == batch.keys()
            assert out["names"] == [f"sample {i}" for i in rows]
            assert torch.equal(out["prompt_ids"], batch["prompt_ids"][rows])
            assert out["num_items_in_batch"] == 99 and out["missing"] is None
            order = out["prompt_ids"][:, 0].unique_consecutive().tolist()
            assert len(order) == len(groups), f"groups are apart: {out['prompt_ids'][:, 0].tolist()}"
            orders.add(tuple(order))
    assert patch.calls[SHUFFLE] == 40 and not patch.fallbacks
    assert len(orders) > len(groups) - 1


def test_shuffle_orders_groups_evenly():
    batch, first = generation_batch((4, 4, 4, 4)), torch.zeros(4)
    with patch_trl():
        for _ in range(800):
            first[grpo_trainer.shuffle_sequence_dict(batch)["prompt_ids"][0, 0]] += 1
    assert (first - 200).abs().max() < 60  # five standard deviations


def test_shuffle_draws_what_trl_draws():
    batch = generation_batch()
    torch.manual_seed(3)
    UPSTREAM[SHUFFLE](batch)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with patch_trl():
        grpo_trainer.shuffle_sequence_dict(batch)
    assert torch.equal(torch.get_rng_state(), after)


def test_shuffle_without_prompts_is_trls():
    torch.manual_seed(3)
    stock = UPSTREAM[SHUFFLE]({"x": torch.arange(6)})
    torch.manual_seed(3)
    with patch_trl() as patch:
        assert torch.equal(grpo_trainer.shuffle_sequence_dict({"x": torch.arange(6)})["x"], stock["x"])
    assert patch.fallbacks == {f"{SHUFFLE}: no prompt_ids": 1}


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
        ({"prefix_sharing": 1}, "prefix_sharing must be True or False, got 1"),
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
