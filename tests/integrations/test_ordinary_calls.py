"""Models of transformers with packed attention compute ordinary calls as ever; versions and names of it."""

import sys
import types
import warnings

import pytest
import torch
from packed_cases import models, pack, transformers

import rlkernel
from rlkernel.integrations import hf
from rlkernel.integrations.hf import registration
from rlkernel.integrations.hf.models import behind

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`", "ignore:None of the inputs")


def ordinary_results(model):
    """Logits with and without padding, gradients, and what generate gives with a cache, and padded."""
    ids, mask = models.padded()
    found = [
        model(ids[:1, :8], use_cache=False).logits,
        model(ids, attention_mask=mask, use_cache=False).logits,
    ]
    grads = models.gradients(model, (found[1] * mask[..., None]).square().sum())
    model.eval()
    with torch.no_grad():
        prompts = torch.tensor([[0] * 6 + models.PROMPTS[1], models.PROMPTS[0]])
        left = (prompts != 0).long()
        for batch in ({"input_ids": prompts, "attention_mask": left}, {"input_ids": prompts[1:]}):
            found.append(model.generate(**batch, max_new_tokens=6, do_sample=False))
    model.train()
    return [x.detach() for x in found] + [grads[name] for name in sorted(grads)]


@pytest.mark.parametrize(
    "name, attention",
    [(name, None) for name in ("llama", "mistral", "gemma2", "gemma3", "gpt_oss")] + [("qwen2", "eager")],
)
def test_ordinary_calls_stay_what_they_were(name, attention):
    model = models.make(name, attention=attention, dtype=torch.float32)
    before = ordinary_results(model)
    former = hf.use_packed(model)
    assert hf.is_registered(model.config._attn_implementation)
    after = ordinary_results(model)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert hf.use_packed(model) == model.config._attn_implementation  # on it already
    assert attention is None or former == attention
    model.set_attn_implementation(former)
    assert model.config._attn_implementation == former


def test_a_name_alone_gives_the_implementation_that_transformers_would_choose():
    for name in ("gemma2", "gpt_oss", "llama"):
        model = models.make(name, dtype=torch.float32)
        former = "sdpa" if type(model)._supports_sdpa else "eager"
        model.set_attn_implementation(former)
        ids, mask = models.padded()
        with torch.no_grad():
            before = model(ids, attention_mask=mask).logits
            named = models.make(name, attention="rlkernel", dtype=torch.float32)
            after = named(ids, attention_mask=mask).logits
        assert torch.equal(before, after)


@pytest.mark.parametrize("name", ("gpt_oss", "llama"))
def test_a_cache_that_is_longer_than_the_prompt(name):
    """Its plain causal mask is None, which eager code would take for no mask."""
    results = []
    for attention in (None, "rlkernel"):
        model = models.make(name, attention=attention, dtype=torch.float32).eval()
        cache = transformers.StaticCache(config=model.config, max_cache_len=24)
        ids = torch.tensor([models.PROMPTS[0]])
        with torch.no_grad():
            first = model(ids, use_cache=True, **behind(model, cache)).logits
            results.append((first, model(ids[:, :1], use_cache=True, **behind(model, cache)).logits))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_flash_attention_stays_flash_attention(monkeypatch):
    """Only the way to it: the kernels need a GPU."""
    from transformers.integrations import flash_attention, sdpa_attention

    asked = []

    def kernel(q, k, v, mask, *, attn_implementation, softmax_scale, is_causal, sliding_window, **_):
        asked.append((attn_implementation, sliding_window))
        assert mask is None and is_causal
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        module = types.SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=True)
        return sdpa_attention.sdpa_attention_forward(module, q, k, v, None, scaling=softmax_scale)[0]

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", kernel)
    ids = torch.tensor([models.PROMPTS[0]])
    model = models.make("mistral", dtype=torch.float32)
    model.config._attn_implementation = "flash_attention_2"
    before = model(ids, use_cache=False).logits
    assert hf.use_packed(model) == "flash_attention_2"
    assert model.config._attn_implementation == "rlkernel|fa2"
    after = model(ids, use_cache=False).logits
    assert torch.equal(before, after) and asked == [("flash_attention_2", 5)] * 4
    assert rlkernel.packed_logprobs(model, pack()).logprobs.isfinite().all()


def test_registering_twice_or_under_another_name():
    from transformers import AttentionInterface

    first = AttentionInterface._global_mapping["rlkernel"]
    assert rlkernel.register_hf() == "rlkernel" and AttentionInterface._global_mapping["rlkernel"] is first
    assert rlkernel.register_hf("packed") == "packed"
    model = models.make("llama")
    hf.use_packed(model, "packed")
    assert model.config._attn_implementation == "packed"
    expected = models.dense("llama")[0]
    assert float((rlkernel.packed_logprobs(model, pack()).logprobs - expected).detach().abs().max()) <= 1e-12


@pytest.mark.parametrize("name", ("sdpa", "eager", "flex_attention", "my flash", "", None))
def test_names_that_mean_something_else(name):
    with pytest.raises(ValueError, match="name must be"):
        rlkernel.register_hf(name)


@pytest.mark.parametrize("version", ("4.40.0", "5.15.3", "6.0.0", "6.0.0.dev0"))
def test_other_versions_are_refused(monkeypatch, version):
    registration._interfaces.cache_clear()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=f"version of transformers must be >=5.16,<6, got {version}"):
        rlkernel.register_hf("other")


@pytest.mark.parametrize("version", ("5.16.0", "5.24.9", "5.25.0.dev0", "5.25.0", "5.40.1"))
def test_versions_that_have_not_been_run_are_warned_of(monkeypatch, version):
    registration._interfaces.cache_clear()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert rlkernel.register_hf("newer") == rlkernel.register_hf("newer") == "newer"
    told = [w for w in seen if f"has not been run with transformers {version} yet" in str(w.message)]
    assert len(told) == (version >= "5.25") and all(w.filename == __file__ for w in told)


def test_transformers_must_be_there(monkeypatch):
    registration._interfaces.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs pip install 'transformers"):
        rlkernel.register_hf("none")
