"""rlkernel.patch_trl(prefix_sharing=True), one pass: TRL's values and gradients from fewer rows."""

import pytest
import torch
import trl_prefix_cases
from trl_prefix_cases import (
    COMPLETION,
    LENGTHS,
    METHOD,
    assert_same_pass,
    make_model,
    one_pass,
    patch_trl,
    samples,
    trl,
)

from rlkernel.integrations import hf
from rlkernel.integrations.trl import head, passes
from rlkernel.prefix.batch import PrefixBatch

nothing_left_behind, trainer = trl_prefix_cases.nothing_left_behind, trl_prefix_cases.trainer


def make_moe(vocab=211, **options):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=1, norm_topk_prob=True, pad_token_id=0, **options,
    )  # fmt: skip
    return make_model(Qwen3MoeForCausalLM(config))


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
    run = passes._run
    monkeypatch.setattr(passes, "_run", lambda call, part, s: rows.append(part.total) or run(call, part, s))
    with patch_trl(), torch.no_grad():
        getattr(trl.GRPOTrainer, METHOD)(trainer, model, ids, mask, COMPLETION, 2)
    assert len(rows) == 2 and max(rows) <= 30 and sum(rows) == 12 + sum(LENGTHS)


def test_head_scores_labelled_rows_only(trainer, monkeypatch):
    scored = []
    statistics = head.linear_logprob_statistics

    def counting(hidden, *rest, **options):
        scored.append(len(hidden))
        return statistics(hidden, *rest, **options)

    monkeypatch.setattr(head, "linear_logprob_statistics", counting)
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
    monkeypatch.setattr(hf, "verify", lambda model: [])  # it would find the fault
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
