"""What packed attention refuses, each with its reason."""

import re

import pytest
import torch
from packed_cases import models, pack, packed_model, transformers

import rlkernel
from rlkernel import PrefixBatch
from rlkernel.integrations import hf
from rlkernel.integrations.hf.models import behind

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`", "ignore:None of the inputs")


def calls(**changed):
    return lambda model, batch: model(**batch.model_kwargs() | changed)


def with_module(**attributes):
    def call(model, batch):
        for name, value in attributes.items():
            setattr(model.model.layers[1].self_attn, name, value)
        return model(**batch.model_kwargs())

    return call


def mask_of_its_own(model, batch):
    return model(**batch.model_kwargs() | {"attention_mask": torch.ones(1, 1, batch.total, batch.total)})


def with_a_cache(model, batch):
    cache = transformers.DynamicCache(config=model.config)
    model.eval()
    model(input_ids=batch.input_ids[:, :4], use_cache=True, **behind(model, cache))
    return model(**batch.model_kwargs(), **behind(model, cache))


def two_rows(model, batch):
    inputs = batch.model_kwargs()
    two = {name: inputs[name].repeat(2, 1) for name in ("input_ids", "position_ids")}
    return model(**inputs | two)


def one_token_more(model, batch):
    inputs = batch.model_kwargs()
    longer = {n: torch.nn.functional.pad(inputs[n], (0, 1)) for n in ("input_ids", "position_ids")}
    return model(**inputs | longer)


def layer_types(*types):
    def call(model, batch):
        model.config.layer_types = list(types)
        return model(**batch.model_kwargs())

    return call


REFUSED = {
    "dropout": (
        with_module(attention_dropout=0.1),
        r"LlamaAttention of layer 1: attention dropout must be 0",
    ),
    "causal": (with_module(is_causal=False), "attention must be causal, got is_causal=False"),
    "causal argument": (calls(is_causal=False), "attention must be causal, got is_causal=False"),
    "batch": (calls(prefix_batch=3), "layer 0: prefix_batch must be a PrefixBatch, got int"),
    "cache": (calls(use_cache=True), "use_cache must be False for a packed batch, got True"),
    "filled cache": (with_a_cache, "keys must be the batch's own .* rows, got .*: there is no cache"),
    "two rows": (two_rows, r"input_ids must be the batch's, of shape \(1, \d+\), got 2 rows"),
    "other T": (one_token_more, r"input_ids must have the batch's \d+ tokens, got"),
    "positions": (
        lambda model, batch: model(**batch.model_kwargs() | {"position_ids": batch.position_ids + 1}),
        "position_ids must be the batch's, got others",
    ),
    "mask": (mask_of_its_own, "attention_mask must be the batch's stand-in, got one of shape"),
    "unknown argument": (calls(position_bias=torch.zeros(1)), "position_bias must be None, got Tensor"),
    "chunked layers": (
        layer_types("full_attention", "chunked_attention"),
        "layer_types must be full_attention or sliding_attention, got chunked_attention",
    ),
    "window not handed on": (
        layer_types("full_attention", "sliding_attention"),
        "layer 1: sliding_window must be given to sliding_attention only, got None",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_attention_refuses(what):
    call, reason = REFUSED[what]
    model = packed_model("llama", dtype=torch.float32)
    with pytest.raises(ValueError, match=reason):
        call(model, pack())


def test_output_attentions_are_refused():
    model = models.make("llama", dtype=torch.float32)
    hf.use_packed(model)
    module, x = model.model.layers[0].self_attn, torch.zeros(1, 4, pack().total, 8)
    with pytest.raises(ValueError, match="output_attentions must be False"):
        attention = transformers.AttentionInterface._global_mapping["rlkernel"]
        attention(module, x, x, x, None, prefix_batch=pack(), output_attentions=True)


def test_equal_positions_in_another_tensor_are_compared_once(monkeypatch):
    model, batch = packed_model("llama", dtype=torch.float32), pack()
    inputs = batch.model_kwargs()
    inputs["position_ids"] = inputs["position_ids"].clone()
    compared = []
    real = torch.Tensor.__eq__
    monkeypatch.setattr(torch.Tensor, "__eq__", lambda a, b: compared.append(1) or real(a, b))
    model(**inputs)
    monkeypatch.undo()
    assert len(compared) <= 1
    assert model(**inputs).logits.isfinite().all()


@pytest.mark.parametrize("change", ("another tensor", "in place"))
def test_other_positions_after_a_good_call(change):
    """What was compared once is not compared again, but for what it was."""
    model, batch = packed_model("llama", dtype=torch.float32), pack()
    inputs = batch.model_kwargs()
    inputs["position_ids"] = positions = inputs["position_ids"].clone()
    good = model(**inputs).logits
    assert torch.equal(model(**inputs).logits, good)
    if change == "in place":
        positions += 1
    else:
        inputs["position_ids"] = positions + 1
    with pytest.raises(ValueError, match="position_ids must be the batch's, got others"):
        model(**inputs)
    inputs["position_ids"] = batch.position_ids.clone()
    assert torch.equal(model(**inputs).logits, good)


def refused_models():
    def small(kind, **options):
        config = getattr(transformers, kind)(**models.COMMON | options)
        return transformers.AutoModelForCausalLM.from_config(config)

    yield "recurrent", "layer_types must be .* got linear_attention", lambda: small(
        "Qwen3NextConfig", layer_types=["linear_attention", "full_attention"], head_dim=16, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        linear_num_value_heads=2, linear_num_key_heads=2,
    )  # fmt: skip
    yield "ssm", "MambaForCausalLM: .*Mamba.* mix tokens of neighbouring rows", lambda: small("MambaConfig")
    yield "alibi", "does not go through transformers' AttentionInterface", lambda: small("BloomConfig")
    yield (
        "encoder-decoder",
        "encoder-decoder",
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
    )
    yield (
        "dropout",
        "attention dropout must be 0 in training, got 0.1",
        lambda: small("LlamaConfig", attention_dropout=0.1).train(),
    )
    yield (
        "llama4",
        "chunked_attention",
        lambda: small("Llama4TextConfig", intermediate_size_mlp=32, num_local_experts=2, head_dim=8),
    )

    def compiled():
        model = models.make("llama")
        model.gradient_checkpointing_enable()
        model.model.layers[1].compile()
        return model

    yield "compiled", "its layers are compiled, as which gradient checkpointing would run them", compiled
    yield (
        "no model",
        "a transformers model, alone or in DDP, FSDP, DeepSpeed or PEFT, got Linear",
        lambda: torch.nn.Linear(2, 2),
    )


@pytest.mark.parametrize("what, reason, make", [pytest.param(*x, id=x[0]) for x in refused_models()])
def test_models_that_cannot(what, reason, make):
    model = make()
    reasons = hf.check_model(model)
    assert any(re.search(reason, found) for found in reasons), reasons
    with pytest.raises(ValueError, match="model must"):
        rlkernel.packed_logprobs(model, pack())


def test_models_that_can():
    for name in models.TEN:
        assert hf.check_model(models.make(name, dtype=torch.float32)) == []
    training = models.make("llama", attention_dropout=0.1)
    assert hf.check_model(training) and hf.check_model(training.eval()) == []


def test_positions_whose_rotation_depends_on_the_longest_sequence():
    for kind in ("dynamic", "longrope"):
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
        model = models.make("llama", rope_parameters=rope, max_position_embeddings=16)
        short = PrefixBatch.pack([[3] * 8], [[[4] * 8, [5] * 3]])
        assert hf.check_model(model, short) == []
        reasons = hf.check_model(model, pack())
        assert reasons == [
            f"LlamaForCausalLM: {kind} RoPE changes beyond its limit with the longest sequence of a call"
        ]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_their_limit_is_of_a_whole_sequence(kind):
    """Of which a packed batch leaves out the last token, and all that follows the last label."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    model = models.make("llama", rope_parameters=rope, max_position_embeddings=16)
    ids = list(range(3, 27))
    for length, labels, refused in ((16, 16, False), (17, 17, True), (24, 10, True)):
        mask = [int(4 <= t < labels) for t in range(length)]
        batch = PrefixBatch.from_sequences([ids[:length], ids], [mask, [0] * 24])  # the second one is not run
        assert bool(hf.check_model(model, batch)) == refused, (length, labels)
    assert not hf.check_model(model, PrefixBatch.pack([ids[:10]], [[ids[10:16]]]))
    padded = torch.tensor([ids[:10]]), torch.ones(1, 10), torch.tensor([ids[10:17]]), torch.ones(1, 7)
    assert hf.check_model(model, PrefixBatch.from_padded(*padded))


def test_attention_that_goes_past_the_interface(monkeypatch):
    model, batch = packed_model("llama", dtype=torch.float32), pack()
    layer = model.model.layers[1].self_attn
    monkeypatch.setattr(layer, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(
        ValueError, match="each of its 2 layers must call the registered attention once, got 1"
    ):
        rlkernel.packed_logprobs(model, batch)
