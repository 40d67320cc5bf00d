"""SkyRL's models, whose lm_head scores instead of making logits, beside the same ones of SkyRL."""

import math
import types

import pytest
import tiny
import torch
from accuracy import check
from doors import Logits, random
from skyrl_cases import BACKEND, check_left_to_skyrl, load, nothing_left_behind, upstream

import rlkernel
from rlkernel.drivers import linear_tiles
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.integrations.hf import lm_head

pytest.importorskip("transformers", reason="needs transformers, which rlkernel does not need")
pytest.importorskip("peft", reason="needs PEFT, which rlkernel does not need")
model_wrapper = load(f"{BACKEND}.workers.model_wrapper")

assert nothing_left_behind and upstream  # fixtures of every test here

ROWS, LENGTH, ACTIONS, VOCAB = 3, 13, 6, 160
PACKED = {"remove_microbatch_padding": True, "use_flash_attention_2": True}


def wrapper(dtype=torch.float32, model=None, **options):
    model = tiny.make_model(vocab=VOCAB, hidden=32) if model is None else model
    made = model_wrapper.HFModelWrapper(model, **options)
    if options.get("remove_microbatch_padding"):
        made.attn_implementation = "sdpa"  # of one sequence after the other, which is what is compared
    return made.to(dtype)


def sample(side="left"):
    """Padded on the left, as SkyRL does it, so that responses end together; or the responses on the right.
    One response is empty."""
    g = torch.Generator().manual_seed(1)
    sequences = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=g)
    prompts, answers = torch.tensor([3, 7, 5])[:, None], torch.tensor([6, 2, 0])[:, None]
    begins = LENGTH - ACTIONS if side == "right" else LENGTH - answers
    place = torch.arange(LENGTH) - begins
    mask = ((place >= -prompts) & (place < answers)).long()
    return sequences, mask, ((place >= 0) & (place < answers))[:, -ACTIONS:].float()


def run(
    model, entropy=True, entropy_requires_grad=True, temperature=0.7, actions=ACTIONS, side="left", **more
):
    """Logprobs and entropies where the loss reads them, and the gradient of every parameter."""
    sequences, mask, kept = sample(side)
    logprobs, output = model(
        sequences, actions, mask, temperature=temperature, return_output=True, compute_entropy=entropy,
        entropy_requires_grad=entropy_requires_grad, **more,
    )  # fmt: skip
    loss = (logprobs.double() * kept * random(5, *kept.shape)).sum()
    found = [logprobs.detach() * kept]
    if entropy:
        entropies = output["entropy"][:, -ACTIONS - 1 : -1]
        found.append(entropies.detach() * kept)
        loss = loss + (entropies.double() * kept * random(6, *kept.shape)).sum() * entropies.requires_grad
    model.zero_grad()
    loss.backward()
    return found, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model, parts=("fused_head",), **options):
    """Patched and stock, of which fp64 is the truth."""
    dtype = next(model.parameters()).dtype
    stock = run(model, **options)
    truth = run(model.double(), **options)
    model.to(dtype)
    with rlkernel.patch_skyrl(parts) as patch:
        got = run(model, **options)
        assert patch.calls == {"HFModelWrapper": 1} and not patch.fallbacks, (patch.calls, patch.fallbacks)
    for i, of in enumerate(zip(got[0], stock[0], truth[0], strict=True)):
        assert of[0].dtype == torch.float32
        check(f"output {i}", *of)
    assert got[1].keys() == stock[1].keys() == truth[1].keys()
    for name, grad in got[1].items():
        # the products before the head are torch's own, and round alike; cancellation is theirs
        scale = truth[1][name].abs().max().item()
        check(name, grad, stock[1][name], truth[1][name], magnitude=8 * scale)


@pytest.mark.parametrize("parts", [("fused_head",), None, ("logprobs", "fused_head")], ids=str)
@pytest.mark.parametrize("options", [{}, PACKED], ids=["padded", "packed"])
def test_a_model_of_skyrls(options, parts):
    compare(wrapper(**options), parts)


@pytest.mark.parametrize(
    "options",
    [
        {"entropy": False},
        {"entropy_requires_grad": False},
        {"temperature": 1.0},
        {"temperature": 2},
        {"actions": [ACTIONS]},
        {"side": "right"},
    ],
    ids=str,
)
def test_each_option_alone(options):
    compare(wrapper(), **options)


@pytest.mark.parametrize("options", [{}, PACKED], ids=["padded", "packed"])
def test_bf16(options):
    compare(wrapper(torch.bfloat16, **options))


def test_only_logprobs_are_returned():
    model, (sequences, mask, kept) = wrapper(), sample()
    with torch.no_grad():
        want = model(sequences, ACTIONS, mask, temperature=0.7)
        with rlkernel.patch_skyrl(["fused_head"]):
            got = model(sequences, ACTIONS, attention_mask=mask, temperature=0.7)
    assert not got.requires_grad and got.shape == want.shape
    torch.testing.assert_close(got * kept, want * kept, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, PACKED], ids=["padded", "packed"])
def test_no_logits_are_made(monkeypatch, options):
    """Of what the vocabulary is the last dimension there is the head's weight, transposed: 16 rows."""
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(4, 32))
    model = wrapper(model=tiny.make_model(vocab=VOCAB, hidden=16), **options)
    with rlkernel.patch_skyrl():
        run(model)  # the first call looks at what the model makes of its lm_head's answer
        with Logits(VOCAB) as seen:
            run(model)
    assert seen.rows <= 16
    with Logits(VOCAB) as stock:
        run(model)
    assert stock.rows == (int(sample()[1].sum()) if options else ROWS * LENGTH)


def test_what_is_not_read_is_not_scored(monkeypatch):
    """Of a prompt, what lies before the longest response; and padding."""
    found, original = [], lm_head.linear_logprob

    def counted(hidden, weight, target_ids, **options):
        found.append(int((target_ids != -100).sum()))
        return original(hidden, weight, target_ids, **options)

    monkeypatch.setattr(lm_head, "linear_logprob", counted)
    with rlkernel.patch_skyrl():
        for side in ("left", "right"):
            run(wrapper(), side=side)
            run(wrapper(**PACKED), side=side)
    # of as many tokens as the longest response has: 6 of both rows that are so long, and 4 of a prompt
    assert found == [16, 16, 8, 8]


# heads


def lora(**options):
    import peft

    settings = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False} | options
    torch.manual_seed(3)
    return peft.get_peft_model(
        tiny.make_model(vocab=VOCAB, hidden=32), peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    )


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_lora(options):
    """The head is frozen, or PEFT's copy of it is trained."""
    compare(wrapper(model=lora(**options)))


def tied():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, final_logit_softcapping=3.0,
            attn_logit_softcapping=None,
        )
    )  # fmt: skip


def test_a_tied_head_with_a_softcap():
    """Whose attention has NaN in fp64 where there is padding."""
    model = wrapper(model=tied())
    want = run(model)
    with rlkernel.patch_skyrl() as patch:
        got = run(model)
        assert patch.calls == {"HFModelWrapper": 1} and not patch.fallbacks, patch.fallbacks
    agree(got, want)


def agree(got, want):
    assert got[1].keys() == want[1].keys() and any(x.abs().sum() > 0 for x in got[0])
    for mine, theirs in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for name, grad in got[1].items():
        torch.testing.assert_close(grad, want[1][name], rtol=1e-4, atol=1e-5)


def test_a_scaled_head():
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, logit_scale=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    compare(wrapper(model=CohereForCausalLM(config)))


def vision():
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(0)
    text = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    images = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=images, **ids))


def test_images():
    model = wrapper(model=vision())
    model.is_vlm = True
    sequences, mask, kept = sample()
    sequences[sequences < 9] = 9
    sequences[0, 5:7] = torch.tensor([7, 5])
    images = {"pixel_values": random(4, 4, 2 * 3 * 4 * 4), "image_grid_thw": torch.tensor([[1, 2, 2]])}

    def one():
        logprobs = model(sequences, ACTIONS, mask, temperature=0.7, **images)
        model.zero_grad()
        (logprobs * kept).sum().backward()
        return logprobs.detach() * kept, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want = one()
    with rlkernel.patch_skyrl() as patch:
        got = one()
        assert patch.calls == {"HFModelWrapper": 1} and not patch.fallbacks, patch.fallbacks
    for mine, theirs in zip([got[0], *got[1]], [want[0], *want[1]], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


# sequence parallelism


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("options", [{}, PACKED], ids=["padded", "packed"])
def test_sequence_parallelism(monkeypatch, options, rank):
    """A rank's part of the sequences, cut as SkyRL's own cuts it; it is not put together again here."""
    utils = load(f"{BACKEND}.distributed.ulysses.utils")
    monkeypatch.setattr(utils, "get_ulysses_sequence_parallel_group", lambda: "of both ranks")
    ranks = types.SimpleNamespace(get_rank=lambda group: rank, get_world_size=lambda group: 2)
    monkeypatch.setattr(utils, "dist", ranks)
    gathered = []

    def gather(x, gather_dim, unpad_dim, padding_size):
        gathered.append(x)
        whole = [x if i == rank else torch.zeros_like(x) for i in range(2)]
        joined = torch.cat(whole, gather_dim)
        return joined[:, : joined.shape[1] - padding_size]

    monkeypatch.setattr(model_wrapper, "gather_outputs_and_unpad", gather)
    model = wrapper(**options, sequence_parallel_size=2)
    for layer in model.model.model.layers:  # no rank sees the tokens of another one
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    stock = run(model)
    with rlkernel.patch_skyrl(["fused_head"]) as patch:
        got = run(model)
        assert patch.calls == {"HFModelWrapper": 1} and not patch.fallbacks, patch.fallbacks
    assert len(gathered) == 4
    agree(got, stock)


# what is left to SkyRL


def quantised(model):
    class Linear4bit(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)

    head = Linear4bit(32, VOCAB, bias=False)
    model.lm_head = head
    return model


HEADS = {
    "its lm_head must be a torch.nn.Linear, got peft.tuners.lora.layer.Linear": lambda: lora(
        target_modules=["lm_head"]
    ),
    "its lm_head must be a torch.nn.Linear, got test_skyrl_models.": lambda: quantised(
        tiny.make_model(vocab=VOCAB, hidden=32)
    ),
    "model must be a transformers model": lambda: torch.nn.Sequential(),
    "its lm_head is torch.float64": lambda: tiny.make_model(vocab=VOCAB, hidden=32).double(),
    "the model is compiled": lambda: torch.compile(tiny.make_model(vocab=VOCAB, hidden=32), backend="eager"),
}


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
@pytest.mark.parametrize("reason", HEADS)
def test_heads_that_are_left_to_skyrl(reason):
    model = HEADS[reason]()
    model = wrapper(dtype=next(model.parameters(), torch.zeros(())).dtype, model=model)
    check_left_to_skyrl(lambda: run(model), reason, ["fused_head"])


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention_mask": None}, "attention_mask is no tensor"),
        ({"num_actions": [2, 3, 4]}, "num_actions is no number"),
        ({"temperature": torch.tensor(0.7)}, "the temperature is no number above 0"),
        ({"temperature": -1.0}, "the temperature is no number above 0"),
        ({"attention_mask": torch.ones(ROWS, 2)}, "are not [B, L]"),
    ],
    ids=str,
)
def test_calls_that_are_left_to_skyrl(change, reason):
    sequences, mask, _ = sample()
    given = {"sequences": sequences, "attention_mask": mask, "num_actions": ACTIONS} | change
    model = wrapper()
    check_left_to_skyrl(lambda: model(**given).detach(), reason, ["fused_head"])


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
def test_a_model_that_does_something_else_to_its_logits():
    """Is found out by its first call, and left to SkyRL then and later."""
    model = tiny.make_model(vocab=VOCAB, hidden=32)
    forward, calls = model.forward, []

    def shifted(*args, **kwargs):
        calls.append(1)
        output = forward(*args, **kwargs)
        output["logits"] = output["logits"] * 1.5
        return output

    model.forward = shifted
    model, name = wrapper(model=model), "lm_head"
    want = run(model)
    calls.clear()
    with rlkernel.patch_skyrl(["fused_head"]) as patch:
        for count in (1, 2):
            got = run(model)
            assert all(map(torch.equal, got[0], want[0]))
            assert torch.equal(got[1][f"model.{name}.weight"], want[1][f"model.{name}.weight"])
            assert patch.fallbacks.total() == count and "its logits must be scaled by 1.0" in str(
                patch.fallbacks
            )
        assert not patch.calls and len(calls) == 3, "it is tried once"
    assert "forward" not in vars(model.model.lm_head)


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
@pytest.mark.parametrize("times", [0, 2])
def test_a_model_that_calls_its_head_otherwise(times):
    model = tiny.make_model(vocab=VOCAB, hidden=32)

    def forward(input_ids, attention_mask, position_ids):
        hidden = model.model(input_ids, attention_mask, position_ids)[0]
        logits = hidden @ model.lm_head.weight.T
        for _ in range(times):
            logits = model.lm_head(hidden)
        return {"logits": logits}

    model.forward = forward
    check_left_to_skyrl(lambda: run(wrapper(model=model)), "it must call its lm_head once", ["fused_head"])


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
def test_other_labels_than_the_tokens_that_follow(monkeypatch):
    """As of another SkyRL, whose forward asks for something else."""
    roll = torch.roll
    monkeypatch.setattr(torch, "roll", lambda x, shifts, dims: roll(x, 2 * shifts, dims))
    reason = "SkyRL's labels must be the tokens that follow"
    check_left_to_skyrl(lambda: run(wrapper()), reason, ["fused_head"])


def test_an_error_of_the_model_is_its_own():
    model = wrapper()
    sequences, mask, _ = sample()
    sequences[0, 0] = 10 * VOCAB
    with rlkernel.patch_skyrl() as patch:
        with pytest.raises(IndexError):
            model(sequences, ACTIONS, mask)
        assert not patch.calls and not patch.fallbacks
        assert "forward" not in vars(model.model.lm_head)
        sequences[0, 0] = 5
        model(sequences, ACTIONS, mask)
        assert patch.calls == {"HFModelWrapper": 1}


def test_what_is_not_a_number_stays_so():
    model = wrapper()
    with torch.no_grad():
        model.model.lm_head.weight[7, 0] = math.nan
        with rlkernel.patch_skyrl():
            sequences, mask, kept = sample()
            got = model(sequences, ACTIONS, mask)
    assert got[kept > 0].isnan().all()


def test_gradient_checkpointing():
    model = wrapper()
    model.train()
    want = run(model)
    model.gradient_checkpointing_enable()
    with rlkernel.patch_skyrl() as patch:
        got = run(model)
        assert patch.calls == {"HFModelWrapper": 1}
    agree(got, want)


def test_a_compiled_entropy_is_not_asked():
    model = wrapper(use_torch_compile=True)
    compiled = model.chunked_entropy_from_logits_fn
    with rlkernel.patch_skyrl() as patch:
        run(model)
        assert patch.calls == {"HFModelWrapper": 1}
    assert model.chunked_entropy_from_logits_fn is compiled and isinstance(compiled, types.FunctionType)
