"""Every family of transformers on "rlkernel": ordinary calls have the bits of the model's own attention."""

import pytest
import torch

import rlkernel
from rlkernel.integrations import hf
from rlkernel.integrations.deepspeed import score
from rlkernel.integrations.hf import ordinary

transformers = pytest.importorskip("transformers", reason="needs transformers, which rlkernel does not need")
families = pytest.importorskip("hf_families")
pytestmark = pytest.mark.filterwarnings("ignore")
rlkernel.register_hf()

IDS = torch.arange(24).view(2, 12) * 7 % (families.VOCAB - 3) + 3
LEFT, RIGHT = torch.ones_like(IDS), torch.ones_like(IDS)
LEFT[0, :4] = 0
RIGHT[0, 9:] = 0


def generated(model, mask, **options):
    found = model.generate(
        IDS, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True, disable_compile=True, **options,
    )  # fmt: skip
    return torch.stack(found.logits)


CALLS = {
    "plain": lambda model: model(IDS).logits,
    "padded": lambda model: model(IDS, attention_mask=RIGHT, use_cache=False).logits,
    "the last ones": lambda model: model(IDS, attention_mask=LEFT, logits_to_keep=2).logits,
    "packed positions": lambda model: (
        model(
            IDS[:1], position_ids=torch.cat([torch.arange(5), torch.arange(7)])[None], use_cache=False
        ).logits
    ),
    "generate": lambda model: generated(model, LEFT),
    "static cache": lambda model: generated(model, torch.ones_like(IDS), cache_implementation="static"),
}


@torch.no_grad()
def answers(model):
    """What each call gives: its logits, or its error."""
    found = {}
    for name, call in CALLS.items():
        try:
            found[name] = call(model)
        except Exception as error:  # a family without a static cache, say
            found[name] = type(error)
    return found


def assert_same(model, tolerance=None):
    own = answers(model)
    assert any(isinstance(logits, torch.Tensor) for logits in own.values())
    before = {config._attn_implementation for config in configs(model)}
    assert before <= {"sdpa", "eager"}
    model.set_attn_implementation("rlkernel")
    assert model.config._attn_implementation == "rlkernel"
    for name, found in answers(model).items():
        want = own[name]
        if isinstance(want, type) or isinstance(found, type):
            assert found is want, f"{name}: {found}, not {want}"
        else:
            error = float((found - want).abs().nan_to_num(0).max())
            assert torch.equal(found.isnan(), want.isnan()), name
            assert error <= (tolerance or {}).get(name, 0.0), f"{name}: {error:.1e}"


def configs(model):
    return {id(m.config): m.config for m in model.modules() if hasattr(m, "set_attn_implementation")}.values()


def test_files_of_several_models_say_what_each_runs_on():
    """Gemma 4's holds sounds, which sdpa cannot run: its texts and images are on sdpa nevertheless."""
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    parts = gemma4.Gemma4TextConfig, gemma4.Gemma4VisionConfig, gemma4.Gemma4AudioConfig
    assert [ordinary.default_attention(config) for config in parts] == ["sdpa", "sdpa", "eager"]
    heirs = [type("Mine", (config,), {}) for config in (*parts, transformers.PreTrainedConfig)]
    assert [ordinary.default_attention(config) for config in heirs] == ["sdpa", "sdpa", "eager", "eager"]


def test_families_that_are_not_here_are_known():
    assert families.NOT_MADE.keys() <= set(families.families())
    assert len(families.families()) - len(families.NOT_MADE) >= 140


@pytest.mark.parametrize("kind", [kind for kind in families.families() if kind not in families.NOT_MADE])
def test_ordinary_calls_have_the_bits_of_the_models_own_attention(kind):
    assert_same(families.make(kind))


def test_keys_that_layers_share():
    """Gemma 4 then runs its last layers for the rows whose logits are wanted, or for all where it sees "sdpa"
    and a mask that is None: the same values from products of other shapes."""
    model = families.make("gemma4_text", **families.SHARED_KV)
    assert model.model.layers[2].self_attn.is_kv_shared_layer
    ids = IDS[:1]
    with torch.no_grad():
        own = model(ids, logits_to_keep=3).logits
        model.set_attn_implementation("rlkernel")
        found = model(ids, logits_to_keep=3).logits
        assert float((found - own).abs().max()) <= 1e-5
        model.set_attn_implementation("sdpa")
    assert_same(model, {"static cache": 1e-5})


@pytest.mark.parametrize("kind", ("llama", "gpt_oss", "deepseek_v32"))
def test_compiled_ordinary_calls_are_one_graph(kind, monkeypatch):
    """So is what a configuration runs on, which is found out while the graph is made."""
    monkeypatch.setattr(ordinary, "_defaults", {})
    model = families.make(kind, attention="rlkernel")
    model.config.__class__ = type("Mine", (type(model.config),), {})  # transformers has no table for it
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)


def test_a_vocabulary_with_padding_that_the_model_cuts_off():
    """The lm_head's softmax would be over the padding too, which the logits do not have."""
    model = families.make("inkling_text", unpadded_vocab_size=families.VOCAB - 11)
    assert model(IDS).logits.shape[-1] < model.lm_head.weight.shape[0]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"all that its lm_head makes, \(1, 8, 61\), got \(1, 8, 50\)"):
            score(model, IDS)


# What check_model lets pass and running shows: BERT's self-attention is not causal, Bart's decoders count
# rows as positions, Dory runs layers several times, the others go past the registered attention or make
# masks of their own.
FOUND_BY_RUNNING = {
    "bart", "bert", "bert-generation", "bigbird_pegasus", "blenderbot", "blenderbot-small",
    "camembert", "data2vec-text", "diffllama", "doge", "dory", "electra", "ernie", "git", "marian", "mbart",
    "moshi", "nemotron", "pegasus", "plbart", "roberta", "roberta-prelayernorm", "roc_bert",
    "stablelm", "xlm-roberta", "xlm-roberta-xl",
}  # fmt: skip


def test_families_run_packed_exactly_or_are_found_not_to():
    made = [kind for kind in families.families() if kind not in families.NOT_MADE]
    models = {kind: model for kind in made if not hf.check_model(model := families.make(kind))}
    refused = {kind for kind, model in models.items() if hf.verify(model)}
    print(f"{len(models) - len(refused)} families of {len(made)} run packed")
    assert refused == FOUND_BY_RUNNING & models.keys() and len(models) - len(refused) >= 90
