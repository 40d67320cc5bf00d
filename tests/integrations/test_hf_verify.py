"""hf.verify finds what only running shows; images are refused; what use_packed leaves alone."""

import copy
import io

import pytest
import torch

import rlkernel
from rlkernel import PrefixBatch
from rlkernel.integrations import hf
from rlkernel.integrations.hf import ordinary, verification

transformers = pytest.importorskip("transformers", reason="needs transformers, which rlkernel does not need")
families = pytest.importorskip("hf_families")
pytestmark = pytest.mark.filterwarnings("ignore")
rlkernel.register_hf()


def tiny():
    return PrefixBatch.pack([[5, 6, 7, 8, 9, 10]], [[[9, 10], [11, 12, 13]]])


def neighbours(module, inputs, output):
    """What a convolution of two tokens does, under a name that says nothing of it."""
    return output + output.roll(1, 1)


def state(model):
    configs = [m.config for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    return [c._attn_implementation for c in configs], [m.training for m in model.modules()]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("kind", ("llama", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3", "gpt2"))
def test_models_that_can(kind, dtype):
    options = {"attn_pdrop": 0.0} if kind == "gpt2" else {}
    model = families.make(kind, **options).to(dtype).train()
    before = state(model)
    assert hf.verify(model) == [] == hf.check_model(model)
    assert state(model) == before
    hf.use_packed(model)
    on_it = state(model)
    assert hf.verify(model) == [] and state(model) == on_it != before


@pytest.mark.parametrize("asked", (False, True))
def test_the_loss_of_routers_is_no_reason(asked):
    """A config may ask for it in every call, as TRL has it for the aux loss."""
    model = families.make("qwen3_moe", output_router_logits=asked).float()
    assert model.config.output_router_logits is asked
    assert hf.verify(model) == []


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_unknown_modules_that_mix_tokens(dtype):
    model = families.make("llama").to(dtype)
    model.model.layers[0].mlp.register_forward_hook(neighbours)
    assert hf.check_model(model) == []
    assert "logits of a tiny packed batch differ from those of its samples alone, by" in hf.verify(model)[0]


def test_positions_that_a_model_makes_itself():
    model = families.make("llama")
    make = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: make(x, torch.arange(x.shape[1])[None])
    assert "differ from those of its samples alone" in hf.verify(model)[0]


def test_ordinary_calls_that_are_not_the_models_own(monkeypatch):
    model = families.make("llama")
    real = ordinary._as_for_a_known_name

    def dense(module, query, key, mask, kwargs):
        mask = real(module, query, key, mask, kwargs)
        return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool) if mask is None else mask

    monkeypatch.setattr(ordinary, "_as_for_a_known_name", dense)
    assert "differ from those of its samples alone" in hf.verify(model)[0]


@pytest.mark.parametrize(
    "kind, reason",
    [
        (
            "stablelm",
            "fails with ValueError: StableLmForCausalLM: each of its 2 layers must call the registered",
        ),
        (
            "doge",
            "fails with ValueError: DogeAttention of layer 0: attention_mask must be the batch's stand-in",
        ),
        ("mbart", "logits of a tiny packed batch differ"),
        ("deepseek_v32", "layer_types must be full_attention or sliding_attention, got indexed_attention"),
    ],
)
def test_families_that_cannot(kind, reason):
    model = families.make(kind)
    before = state(model)
    assert reason in hf.verify(model)[0]
    assert state(model) == before


@pytest.mark.parametrize("thing", [None, 3, torch.nn.Linear(2, 2)], ids=lambda thing: type(thing).__name__)
def test_what_is_no_model_is_told_so(thing):
    (reason,) = hf.verify(thing)
    assert reason.endswith(f"alone or in DDP, FSDP, DeepSpeed or PEFT, got {type(thing).__name__}")
    with pytest.raises(ValueError, match="^model must be a transformers model"):
        rlkernel.packed_logprobs(thing, tiny())


def test_an_error_without_a_measure_is_infinite():
    """Not the largest number that a double has; of equal rows it is 0, whatever they are."""
    expected = torch.tensor([[2.0, 2.0], [2.0, 2.0], [1.0, 3.0]])
    found = torch.tensor([[2.5, 2.5], [2.0, 2.0], [1.0, float("nan")]])
    assert verification._error(found, expected).tolist() == [float("inf"), 0.0, float("inf")]


def test_sharded_models_are_not_run(monkeypatch):
    monkeypatch.setattr(verification, "is_sharded", lambda model: True)
    with pytest.raises(ValueError, match="model must be whole, got one that ranks hold parts of"):
        hf.verify(families.make("llama"))


@pytest.mark.parametrize("rows, found", ((1, False), (4, True)))
def test_a_tie_of_one_router_is_no_reason(rows, found, monkeypatch):
    """One row of the six at a place may differ, and is no number here: not most of them."""
    real = verification._error

    def error(a, b):
        result = real(a, b)
        if len(result) == 30:
            result[::5][:rows] = float("inf")
        return result

    monkeypatch.setattr(verification, "_error", error)
    monkeypatch.setattr(verification, "LENGTHS", ((7, (5, 5, 5)), (4, (5, 5, 5))))
    assert bool(hf.verify(families.make("llama"))) == found


# images


@pytest.mark.parametrize("name", ("pixel_values", "token_type_ids"))
def test_images_are_refused(name):
    """Their mask lets the tokens of an image see each other, and a packed batch's has no such tokens."""
    model, batch = families.make("gemma3"), tiny()
    model.set_attn_implementation("rlkernel")
    batch.input_ids[0, :4] = model.config.image_token_id
    types = (batch.input_ids == model.config.image_token_id).long()
    given = {"pixel_values": torch.zeros(1, 3, 8, 8)} if name == "pixel_values" else {"token_type_ids": types}
    with torch.no_grad():
        model(**batch.model_kwargs(), token_type_ids=torch.zeros_like(types))
        with pytest.raises(ValueError, match=f"layer 0: {name} must be None for a packed batch"):
            model(**batch.model_kwargs(), **given)


# what use_packed leaves alone


def test_towers_stay_on_what_they_are_on():
    model = families.make("gemma3", attention={"vision_config": "eager", "text_config": "sdpa"})
    before = state(model)
    former = hf.use_packed(model)
    assert model.config.text_config._attn_implementation == "rlkernel"
    assert model.config.vision_config._attn_implementation == "eager"
    with hf.every_layer(model):
        model(**tiny().model_kwargs())
    assert hf.use_packed(model) == {"text_config": "rlkernel"}
    model.set_attn_implementation(former)
    assert state(model) == before and former == {"text_config": "sdpa"}


@pytest.mark.parametrize("kind", ("llama", "gemma3"))
def test_copies_of_a_model_on_packed_attention_are_on_what_it_was_on(kind):
    """Nobody would take them back: undo() of a patch knows the model, and another process no "rlkernel"."""
    model = families.make(kind)
    before = state(model)
    hf.use_packed(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    saved = file.getvalue()
    assert b"rlkernel" not in saved
    for other in (copy.deepcopy(model), torch.load(io.BytesIO(saved), weights_only=False)):
        assert state(other) == before
        assert {type(each) for each in state(other)[0]} == {str}
        assert hf.use_packed(other) in ("sdpa", {"text_config": "sdpa"})
