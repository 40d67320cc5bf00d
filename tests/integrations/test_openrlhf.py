"""What stands in the place of OpenRLHF's log-probabilities and of its actor's head, beside OpenRLHF's own."""

import types

import pytest
import tiny
import torch
from accuracy import check
from doors import random
from openrlhf_actors import VOCAB, actor, exact, samples, shown, step
from openrlhf_cases import (
    MODULES,
    actors,
    check_against_openrlhf,
    check_left_to_openrlhf,
    nothing_left_behind,
    upstream,
    utils,
)
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel.integrations.openrlhf import fused_head

assert nothing_left_behind and upstream  # fixtures of every test here

packing = MODULES["models.ring_attn_utils"]
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


@pytest.fixture(autouse=True)
def eager():
    """OpenRLHF compiles its entropy."""
    with torch.compiler.set_stance("force_eager"):
        yield


# logits


@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 3, 33), (4, 5, 50)], ids=str)
@DTYPES
def test_logprobs_are_openrlhfs(dtype, shape):
    logits = random(0, *shape, scale=3.0)
    labels = torch.randint(shape[-1], shape[:-1], generator=torch.Generator().manual_seed(1))

    def call(x):
        return utils.log_probs_from_logits(x, labels)

    check_against_openrlhf(call, [logits], dtype, [random(2, *shape[:-1])], "log_probs_from_logits")


def test_logprobs_under_a_temperature():
    """OpenRLHF writes over the logits; rlkernel does not."""
    logits, labels = random(0, 2, 3, 33, scale=3.0), torch.tensor([[5, 1, 0], [32, 7, 7]])

    def call(x):
        return utils.log_probs_from_logits(x, labels=labels, temperature=0.7)

    check_against_openrlhf(call, [logits], torch.float32, [random(2, 2, 3)], "log_probs_from_logits")
    before = logits.clone()
    with rlkernel.patch_openrlhf():
        call(logits)
    assert torch.equal(before, logits)


@pytest.mark.parametrize("shape", [(1, 7), (2, 3, 33)], ids=str)
@DTYPES
def test_entropies_are_openrlhfs(dtype, shape):
    logits = random(0, *shape, scale=3.0)
    check_against_openrlhf(
        lambda x: utils.compute_entropy(x), [logits], dtype, [random(2, *shape[:-1])], "compute_entropy"
    )


def test_an_impossible_token_adds_nothing_to_an_entropy():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert utils.compute_entropy(logits).isnan()
    with rlkernel.patch_openrlhf():
        found = utils.compute_entropy(logits)
    torch.testing.assert_close(found, torch.distributions.Categorical(logits=logits[:, :2]).entropy())


@pytest.mark.parametrize(
    ("logits", "labels", "temperature", "reason"),
    [
        (torch.zeros(2, 5, dtype=torch.float64), torch.zeros(2).long(), 1.0, "logits is torch.float64"),
        (torch.zeros(5), torch.tensor(1), 1.0, "logits are not [..., V] with rows"),
        (torch.zeros(2, 5), torch.zeros(3).long(), 1.0, "labels have not the shape of the rows"),
        (torch.zeros(2, 5), None, 1.0, "labels is no tensor"),
        (torch.zeros(2, 5), torch.zeros(2).long(), 0, "the temperature is no number above 0"),
    ],
)
def test_logits_that_are_left_to_openrlhf(logits, labels, temperature, reason):
    check_left_to_openrlhf(lambda: utils.log_probs_from_logits(logits.clone(), labels, temperature), reason)


# the actor's head


def check_actor(made, given, temperature=1.0, of=None, **options):
    """The fused head beside OpenRLHF's, and both beside the truth; the log-probabilities and entropy."""
    want = exact(of or made, given, temperature, options.get("return_entropy", False))
    stock = step(made, given, **options)
    with rlkernel.patch_openrlhf() as patch:
        got = step(made, given, **options)
        assert patch.calls == {"Actor.forward": 1} and not patch.fallbacks, (patch.calls, patch.fallbacks)
    there = given["attention_mask"][:, 1:] if "action_mask" not in given else given["action_mask"]
    for name, found, theirs, truth in zip(("logprobs", "entropy"), got, stock, want, strict=False):
        assert (found is None) == (theirs is None)
        if found is not None:
            where = there if name == "logprobs" else shown(given)
            assert found.shape == theirs.shape and found.dtype == theirs.dtype == torch.float32
            check(name, *(x * where for x in (found, theirs, truth)))
    for name, grad in got[2].items():
        check(f"gradient of {name}", grad, stock[2][name], want[2][name])
    return got


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("return_entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_actions_are_openrlhfs(dtype, return_entropy, temperature, packed):
    made, alone = actor(temperature, packed), None
    made.model.to(dtype)
    given = samples()
    if packed:  # a model that attends to its own sample alone; flash-attn's does so by the positions
        alone = actor(temperature)
        alone.model = made.model
        given["attention_mask"] = torch.ones_like(given["attention_mask"])
        given = {name: x[:1] for name, x in given.items()}
    got = check_actor(
        made, given, temperature, alone, return_entropy=return_entropy, return_output=return_entropy
    )
    assert not got[0][~given["action_mask"]].any()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_all_tokens_are_openrlhfs(packed):
    """As DPO and SFT ask for them, of samples whose padding is scored as well, or gives 0."""
    made, given = actor(0.9, packed), samples(2)
    del given["action_mask"]
    options = {"return_logprobs": True, "return_output": True}
    stock = step(made, given, **options)
    with rlkernel.patch_openrlhf() as patch:
        got = step(made, given, **options)
        assert patch.calls == {"Actor.forward": 1}
    torch.testing.assert_close(got, stock, rtol=1e-5, atol=2e-6)
    assert packed == (got[0][given["attention_mask"][:, :-1] == 0] == 0).all()


def test_samples_that_are_packed_are_openrlhfs():
    for options in ({}, {"return_entropy": True, "return_output": True}):
        made, given = actor(0.8, packed=True), samples(3)
        stock = step(made, given, **options)
        with rlkernel.patch_openrlhf() as patch:
            got = step(made, given, **options)
            assert patch.calls == {"Actor.forward": 1} and not patch.fallbacks
        torch.testing.assert_close(got, stock, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_a_ring(monkeypatch, rank):
    """Each scores its own rows; the last ones are padding."""
    monkeypatch.setattr(packing.dist, "get_rank", lambda group=None: rank)
    monkeypatch.setattr(packing.dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(packing, "update_ring_attn_params", lambda cu_seqlens: None)
    # the other rank, which would have its own rows, says 0 of all of them
    zeros = torch.zeros_like
    monkeypatch.setattr(
        packing, "all_gather", lambda x, group: torch.cat([zeros(x), x] if rank else [x, zeros(x)])
    )
    for options in ({}, {"return_entropy": True, "return_output": True}):
        made, given = actor(0.8, packed=True), samples(4)
        assert given["attention_mask"].sum() % 2 == 1
        stock = step(made, given, ring_attn_group="ring", **options)
        with rlkernel.patch_openrlhf() as patch:
            got = step(made, given, ring_attn_group="ring", **options)
            assert patch.calls == {"Actor.forward": 1} and not patch.fallbacks
        torch.testing.assert_close(got, stock, rtol=1e-5, atol=2e-6)


FORMS = (
    {},
    {"return_output": True},
    {"return_logprobs": True},
    {"action_mask": None, "return_logprobs": True},
    {"action_mask": None, "return_logprobs": True, "return_output": True},
    {"return_entropy": True, "return_output": True, "allgather_logits": True, "packed_seq_lens": [3]},
)


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_results_are_in_openrlhfs_form(options):
    made, given = actor(), samples() | options
    with torch.no_grad():
        want = made(**given)
        with rlkernel.patch_openrlhf() as patch:
            got = made(given.pop("sequences"), given.pop("action_mask"), **given)
            assert patch.calls == {"Actor.forward": 1}
    assert type(got) is type(want)
    if isinstance(want, tuple):
        (got, output), (want, theirs) = got, want
        assert type(output) is type(theirs) and output.logits is None and "aux_loss" not in output
        assert hasattr(output, "entropy") == hasattr(theirs, "entropy")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        for x in torch.utils._pytree.tree_leaves(found):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // 4)
        return found


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_there_are_no_logits(packed):
    vocab, limit = 5000, 2**20
    made, given = actor(0.7, packed, vocab=vocab, hidden=32), samples(5, rows=16, tokens=40, actions=38)
    logits, options = given["attention_mask"].sum() * vocab, {"return_entropy": True, "return_output": True}
    with Largest() as watched:
        step(made, given, **options)
    assert watched.elements >= logits
    with rlkernel.workspace.limited(limit), rlkernel.patch_openrlhf(), Largest() as watched:
        step(made, given, **options)  # the first call looks at what the model does to logits
        step(made, given, **options)
    assert watched.elements <= max(limit // 4, vocab * 32) < logits / 5


def test_rows_that_are_no_actions_are_not_scored(monkeypatch):
    seen = []
    linear_logprob = fused_head.EngineHead._score

    def score(self, hidden, labels):
        seen.append(int((labels != fused_head.IGNORED).sum()))
        return linear_logprob(self, hidden, labels)

    monkeypatch.setattr(fused_head.EngineHead, "_score", score)
    given = samples()
    with rlkernel.patch_openrlhf(), torch.no_grad():
        for packed in (False, True):
            made = actor(packed=packed)
            made(**given)
            made(**given, return_entropy=True, return_output=True)
    places, there = given["sequences"][:, 1:].numel(), given["attention_mask"][:, :-1].sum()
    assert seen == [given["action_mask"].sum(), places, given["action_mask"].sum(), there]


def test_a_mixture_of_experts_keeps_its_balancing_loss():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2, output_router_logits=True)
    made, given = actor(model=Qwen3MoeForCausalLM(config)), samples()

    def run():
        made.zero_grad()
        logprobs, output = made(**given, return_output=True)
        (logprobs.sum() + output.aux_loss).backward()
        return logprobs.detach(), output.aux_loss.detach(), [p.grad.clone() for p in made.parameters()]

    want = run()
    with rlkernel.patch_openrlhf() as patch:
        torch.testing.assert_close(run(), want, rtol=1e-4, atol=1e-5)
        assert patch.calls == {"Actor.forward": 1}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    made, given = actor(0.8), samples()
    made.gradient_checkpointing_enable({"use_reentrant": reentrant})
    made.train()
    check_actor(made, given, 0.8, return_entropy=True, return_output=True)


def test_a_head_that_scales_and_bounds_its_logits():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, final_logit_softcapping=2.0))
    check_actor(actor(0.7, model=model), samples(), 0.7)


def test_adapters():
    """Beside the head; on the head itself OpenRLHF's own is called."""
    from peft import LoraConfig, get_peft_model

    def made(*targets):
        lora = LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
        return actor(0.8, model=get_peft_model(tiny.make_model(vocab=VOCAB, hidden=32), lora))

    trained, given = made("q_proj"), samples()
    frozen = {name for name, p in trained.named_parameters() if not p.requires_grad}

    def run():
        trained.zero_grad()
        trained(**given).sum().backward()
        return {name: p.grad for name, p in trained.named_parameters() if name not in frozen}

    want = run()
    with rlkernel.patch_openrlhf() as patch:
        torch.testing.assert_close(run(), want, rtol=1e-4, atol=1e-6)
        assert patch.calls == {"Actor.forward": 1} and frozen
    other = made("lm_head")
    with torch.no_grad():
        want = other(**given)
        with rlkernel.patch_openrlhf() as patch, pytest.warns(UserWarning, match="must be a torch.nn.Linear"):
            torch.testing.assert_close(other(**given), want, rtol=1e-5, atol=2e-6)
        assert patch.calls == {"log_probs_from_logits": 1}, "of the logits that it makes then"


def test_images():
    """What a model with a vision tower is called with: no positions, and the kinds of tokens."""
    seen = []

    class Model(type(tiny.make_model(vocab=VOCAB, hidden=32))):
        def forward(self, input_ids, position_ids=None, pixels=None, image_grid_thw=None, **kinds):
            seen.append((position_ids, pixels, image_grid_thw, kinds))
            mask = kinds.pop("attention_mask")
            kinds = {name: x.tolist() for name, x in kinds.items()}
            seen[-1] = (*seen[-1][:3], kinds)
            return super().forward(input_ids, attention_mask=mask)

    model = tiny.make_model(vocab=VOCAB, hidden=32)
    model.__class__ = Model
    made, given = actor(model=model), samples()
    made.is_vlm = True
    made._vlm_config = types.SimpleNamespace(image_token_id=7, video_token_id=9)
    given["sequences"][:, 1], given["sequences"][:, 2] = 7, 9
    with torch.no_grad():
        for more in ({}, {"pixels": 1, "image_grid_thw": 2}, {"pixels": 3}):
            want = made(**given, **more)
            with rlkernel.patch_openrlhf() as patch:
                torch.testing.assert_close(made(**given, **more), want, rtol=1e-5, atol=2e-6)
                assert patch.calls == {"Actor.forward": 1}
    assert seen[0] == seen[1] == (None, None, None, {}) and seen[2] == seen[3] and seen[4] == seen[5]
    assert seen[2][3]["mm_token_type_ids"][0][:4] == [0, 1, 2, 0] and "token_type_ids" in seen[4][3]


def test_logits_are_there_where_they_are_asked_for():
    made, given = actor(0.7), samples()
    del given["action_mask"]
    want = made(**given, return_output=True, return_entropy=True)
    with rlkernel.patch_openrlhf() as patch:
        got = made(**given, return_output=True, return_entropy=True)
        assert patch.fallbacks == {"Actor.forward: the logits are asked for": 1}
        assert patch.calls == {"compute_entropy": 1}
    assert torch.equal(got.logits, want.logits)
    torch.testing.assert_close(got.entropy, want.entropy, rtol=1e-5, atol=2e-6)


def test_a_model_that_does_more_to_its_logits_than_its_config_says():
    """Its first call shows it; from then on OpenRLHF's own is called at once."""
    calls = []

    class Doubled(type(tiny.make_model(vocab=VOCAB, hidden=32))):
        def forward(self, *args, **kwargs):
            calls.append(1)
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    model = tiny.make_model(vocab=VOCAB, hidden=32)
    model.__class__ = Doubled
    made, given = actor(model=model), samples()
    with torch.no_grad():
        want = made(**given)
        with rlkernel.patch_openrlhf(["fused_head"]) as patch:
            with pytest.warns(UserWarning, match="its logits must be scaled by 1.0"):
                assert torch.equal(made(**given), want)
            assert len(calls) == 3 and torch.equal(made(**given), want) and len(calls) == 4
            assert sum(patch.fallbacks.values()) == 2 and not patch.calls


GIVEN = samples()
LEFT = {
    "sequences are not [B, T] with T >= 2": {"sequences": GIVEN["sequences"][:, :1]},
    "there is no attention_mask": {"attention_mask": None},
    "an entropy is asked for, and no output": {"return_entropy": True},
    "action_mask is not [B, A] with A < T": {"action_mask": torch.ones(5, 13)},
    "action_mask is no tensor": {"action_mask": [1]},
}


@pytest.mark.parametrize("reason", LEFT)
def test_calls_that_are_left_to_openrlhf(reason):
    made = actor()
    with torch.no_grad():
        check_left_to_openrlhf(lambda: made(**GIVEN | LEFT[reason]), reason, ["fused_head"])


def test_actors_that_are_left_to_openrlhf():
    class Table(torch.nn.Module):
        def forward(self, ids, **_):
            return {"logits": random(0, *ids.shape, VOCAB)}

    for made, reason in (
        (actor(model=Table()), "model must be a transformers model"),
        (actor(temperature=torch.tensor(0.5)), "the temperature is no number above 0"),
    ):
        with torch.no_grad():
            want = made(**GIVEN)
            with rlkernel.patch_openrlhf(["fused_head"]) as patch:
                assert torch.equal(made(**GIVEN), want) and reason in str(patch.fallbacks)
    assert isinstance(made, actors.Actor)
