"""packed_logprobs of mixtures of experts: the auxiliary loss is that of the padded batch."""

import pytest
import torch
from packed_cases import EXACT, error, models, pack, packed_model

import rlkernel
from rlkernel import PrefixBatch
from rlkernel.integrations import hf
from rlkernel.integrations.hf import logprobs

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`", "ignore:None of the inputs")


@pytest.mark.parametrize("max_tokens", (None, 20))
@pytest.mark.parametrize("name", ("qwen3_moe", "gpt_oss", "mixtral"))
def test_the_auxiliary_loss_is_that_of_the_padded_batch(name, max_tokens):
    samples = [*models.SAMPLES, ([], [5, 9, 30]), ([], []), ([8, 4], []), ([8, 4], [])]
    batch = PrefixBatch.pack(
        [*models.PROMPTS, [], [8, 4]], [*models.COMPLETIONS, [[5, 9, 30], []], [[], []]]
    )  # an empty prompt, empty completions, a prompt without any other
    model = models.make(name)
    ids, mask = models.padded(samples)
    stock = model(ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    expected = models.gradients(model, stock)
    hf.use_packed(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = rlkernel.packed_logprobs(
        model, batch, return_entropy=True, return_aux_loss=True, max_tokens=max_tokens
    )
    plain = rlkernel.packed_logprobs(model, batch, return_entropy=True)
    print(f"aux loss {stock:.6f}, error {error(found.aux_loss, stock):.1e}")
    assert error(found.aux_loss, stock) <= 1e-6  # transformers sums it in fp32
    assert models.worst(models.gradients(model, found.aux_loss), expected) <= 1e-5
    assert error(found.logprobs, plain.logprobs) <= EXACT and error(found.entropy, plain.entropy) <= EXACT


def test_without_weights_the_auxiliary_loss_is_another(monkeypatch):
    """The mutant of the test above: every row counted once, as if no prompt were shared."""
    model = models.make("mixtral")
    ids, mask = models.padded()
    stock = model(ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    hf.use_packed(model)
    right = rlkernel.packed_logprobs(model, pack(), return_aux_loss=True).aux_loss
    monkeypatch.setattr(PrefixBatch, "token_counts", lambda batch: torch.ones(batch.total))
    wrong = rlkernel.packed_logprobs(model, pack(), return_aux_loss=True).aux_loss
    assert error(right, stock) <= 1e-6 and error(wrong, stock) > 1e-3


def test_weights_count_every_token_of_every_sample():
    tree = PrefixBatch.pack_tree(
        [[3] * 5, [4] * 2, [], [5] * 3, [6], [7] * 4],
        [-1, 0, 1, 2, 1, -1],
        [False, False, True, True, True, False],
    )
    for batch in (pack(), pack().select([0, 0, 5]), tree, PrefixBatch.pack([], [])):
        longer, keep = batch.with_last_tokens()
        assert longer.token_counts().sum() == batch.tokens_dense
        assert torch.equal(longer.labels[keep], batch.labels)


def test_reentrant_checkpointing_cuts_the_router_off():
    model = packed_model("mixtral")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="router_logits have no gradient.* {'use_reentrant': False}"):
        rlkernel.packed_logprobs(model, pack(), return_aux_loss=True)
    with torch.no_grad():
        assert rlkernel.packed_logprobs(model, pack(), return_aux_loss=True).aux_loss > 0


def test_a_config_that_asks_for_router_logits():
    model = packed_model("mixtral", output_router_logits=True)
    found = rlkernel.packed_logprobs(model, pack())
    assert found.aux_loss is None and error(found.logprobs, models.dense("mixtral")[0]) <= EXACT
    assert rlkernel.packed_logprobs(model, pack(), return_aux_loss=True).aux_loss > 0


def test_dense_models_have_no_auxiliary_loss():
    with pytest.raises(
        ValueError, match="LlamaForCausalLM: it must return router_logits for return_aux_loss"
    ):
        rlkernel.packed_logprobs(packed_model(), pack(), return_aux_loss=True)


def test_a_transformers_whose_loss_takes_no_weights(monkeypatch):
    from transformers.models.mixtral import modeling_mixtral

    def old(logits, experts, top_k, attention_mask):
        rows, length = attention_mask.shape

    logprobs._load_balancing_loss.cache_clear()
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", old)
    with pytest.raises(ValueError, match="return_aux_loss needs a transformers whose load-balancing loss"):
        rlkernel.packed_logprobs(packed_model("mixtral"), pack(), return_aux_loss=True)
    assert rlkernel.packed_logprobs(packed_model("mixtral"), pack()).aux_loss is None
