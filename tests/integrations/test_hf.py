"""Architectures of transformers on packed batches and on ordinary ones: every sample alone is the truth."""

import re
import sys
import types
import warnings

import pytest
import torch

import rlkernel
from rlkernel import PrefixBatch, PrefixLayout
from rlkernel.integrations import hf
from rlkernel.integrations.hf import attention as packed_attention
from rlkernel.integrations.hf import registration
from rlkernel.integrations.hf.models import behind

transformers = pytest.importorskip("transformers", reason="needs transformers, which rlkernel does not need")
models = pytest.importorskip("hf_models")
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`", "ignore:None of the inputs")
rlkernel.register_hf()

CHECKPOINTING = (None, {"use_reentrant": False}, {"use_reentrant": True})

# transformers computes RMSNorm and RoPE in fp32 whatever the model's dtype, so gradients agree to fp32;
# gemma2's own attention also its softmax.  Everything else is fp64.
LOGPROBS = {"gemma2": 3e-6}
GRADIENTS = {"gemma2": 3e-6}


def pack(**options):
    return PrefixBatch.pack(models.PROMPTS, models.COMPLETIONS, **options)


def packed_model(name, checkpointing=None, **options):
    model = models.make(name, **options)
    hf.use_packed(model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return model


@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=("plain", "checkpointing", "reentrant"))
@pytest.mark.parametrize("name", models.TEN)
def test_every_sample_as_if_alone(name, checkpointing):
    logprobs, entropy, grads = models.dense(name)
    model = packed_model(name, checkpointing)
    found = rlkernel.packed_logprobs(model, pack(), return_entropy=True)
    w = models.weights(len(logprobs))
    loss = (found.logprobs * w).sum() + (found.entropy * w.flip(0)).sum()
    pairs = (found.logprobs, logprobs), (found.entropy, entropy)
    errors = [float((a - b).detach().abs().max()) for a, b in pairs]
    worst = models.worst(models.gradients(model, loss), grads)
    print(f"logprobs {errors[0]:.1e}, entropy {errors[1]:.1e}, gradients {worst:.1e}")
    assert max(errors) <= LOGPROBS.get(name, 1e-12)
    assert worst <= GRADIENTS.get(name, 1e-6)
    assert found.logprobs.dtype == torch.float64 and found.aux_loss is None


TREE = {  # system > prompts > shared reasoning > continuations; one prompt also has a completion of its own
    "nodes": [6, 4, 3, 5, 2, 4, 3, 0, 6],
    "parents": [-1, 0, 1, 2, 2, 1, 0, 6, 6],
    "completion": [False, False, True, True, True, True, False, True, True],
}


@pytest.mark.parametrize("name", ("llama", "gpt_oss"))
def test_trees(name):
    nodes = [[(13 * i + 5 * b) % 50 + 3 for i in range(n)] for b, n in enumerate(TREE["nodes"])]
    parents, completion = TREE["parents"], TREE["completion"]
    batch = PrefixBatch.pack_tree(nodes, parents, completion)
    samples = []
    for end in [i for i in range(len(nodes)) if i not in parents]:
        path = [end]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        path.reverse()
        samples.append([[t for i in path if completion[i] == c for t in nodes[i]] for c in (False, True)])
    model = models.make(name)
    alone = torch.cat([logprobs for logprobs, _ in models.alone(model, samples)])
    w = models.weights(len(alone))
    expected = models.gradients(model, (alone * w).sum())
    hf.use_packed(model)
    unpacked = batch.unpack(rlkernel.packed_logprobs(model, batch).logprobs, fill=float("nan"))
    logprobs = unpacked[~unpacked.isnan()]
    assert logprobs.shape == alone.shape and batch.ratio > 1.5
    assert float((logprobs - alone).detach().abs().max()) <= 1e-12
    assert models.worst(models.gradients(model, (logprobs * w).sum()), expected) <= 1e-6


# what must not pass unnoticed


def wrong_positions(batch, monkeypatch):
    batch.position_ids = torch.arange(batch.total)[None]


def no_cross_pass(batch, monkeypatch):
    layout = batch.layout
    batch.layout = PrefixLayout(layout.lengths, (-1,) * len(layout.lengths), layout.completion)


def leak_between_siblings(batch, monkeypatch):
    parents = [*batch.layout.parents]
    first = next(s for s, p in enumerate(parents) if p == 0)
    parents[first + 1] = first  # the second completion of the first prompt sees the first one
    batch.layout = PrefixLayout(batch.layout.lengths, tuple(parents), batch.layout.completion)


def dropped(option):
    def mutate(batch, monkeypatch):
        real = packed_attention.prefix_shared_attention
        monkeypatch.setattr(
            packed_attention, "prefix_shared_attention", lambda *a, **k: real(*a, **k | {option: None})
        )

    mutate.__name__ = f"no_{option}"
    return mutate


MUTANTS = [
    *((name, mutant) for name in ("llama", "gemma3") for mutant in (wrong_positions, no_cross_pass)),
    *((name, leak_between_siblings) for name in ("llama", "gpt_oss")),
    *((name, dropped("window")) for name in ("mistral", "gemma3", "gpt_oss")),
    ("gemma2", dropped("softcap")),
    ("gpt_oss", dropped("sinks")),
    ("gemma3", dropped("scale")),
]


@pytest.mark.parametrize("name, mutant", MUTANTS, ids=lambda x: getattr(x, "__name__", x))
def test_mutants_show(name, mutant, monkeypatch):
    # gemma scales by 1 / sqrt(query_pre_attn_scalar), its softcap bends large logits: make both visible
    options = {"query_pre_attn_scalar": 4} if name.startswith("gemma") else {}
    options |= {"attn_logit_softcapping": 2.0} if name == "gemma2" else {}
    model = models.make(name, **options)
    with torch.no_grad():
        expected = torch.cat([logprobs for logprobs, _ in models.alone(model)])
        hf.use_packed(model)
        batch = pack()
        right = rlkernel.packed_logprobs(model, batch).logprobs
        mutant(batch, monkeypatch)
        wrong = rlkernel.packed_logprobs(model, batch).logprobs
    good, bad = (float((x - expected).abs().max()) for x in (right, wrong))
    print(f"right {good:.1e}, mutant {bad:.1e}")
    assert good <= LOGPROBS.get(name, 1e-12)
    assert bad > 1e-2


# ordinary calls


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


# refusals, each with its reason


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
