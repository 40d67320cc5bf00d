"""AReaL's FSDP engine, whose lm_head scores instead of making logits, beside the same engine of AReaL."""

import contextlib
import types

import areal_engines as engines
import pytest
import torch
import transformers
from accuracy import check
from areal_cases import engine, load, nothing_left_behind, upstream
from areal_engines import VOCAB, batch, everything, scored, step
from doors import Logits

import rlkernel
from rlkernel.drivers import linear_tiles
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.integrations.areal import fused_head, scoring
from rlkernel.integrations.hf import lm_head

pytest.importorskip("peft", reason="needs PEFT, which rlkernel does not need")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

assert nothing_left_behind and upstream  # fixtures of every test here
pytestmark = pytest.mark.filterwarnings("ignore")
ENGINE = "FSDPEngine"


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    file = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return engines.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def made(saved):
    return engines.make(saved)


def exact(made, given):
    """Of the model in fp64, alone; AReaL's functions make fp32 of logits."""
    logits = load("areal.utils.functional.vocab_parallel")

    def log_softmax(x, labels, temperature=1.0):
        logs = (x.double() / temperature).log_softmax(-1)
        found = logs.gather(-1, labels[..., None])[..., 0]
        return found, -(logs.exp() * logs).sum(-1)

    patches = {
        "_gather_logprobs": lambda *x, **o: log_softmax(*x, **o)[0],
        "_gather_logprobs_entropy": log_softmax,
    }
    before = {name: vars(logits)[name] for name in patches}
    vars(logits).update(patches)
    model, path = made.model, made.config.path
    made.model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="sdpa"
    )
    try:
        return everything(made, given)
    finally:
        vars(logits).update(before)
        made.model = model


def compare(made, given, parts=("fused_head",), calls=3, truth=True):
    stock = everything(made, given)
    with rlkernel.patch_areal(parts) as patch:
        got = everything(made, given)
        assert patch.calls == {ENGINE: calls} and not patch.fallbacks, (patch.calls, patch.fallbacks)
    if not truth:
        for a, b in zip(got[0], stock[0], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
        assert got[1].keys() == stock[1].keys()
        for name, grad in got[1].items():
            torch.testing.assert_close(grad, stock[1][name], rtol=2e-4, atol=1e-6)
        return got, stock
    want = exact(made, given)
    for i, of in enumerate(zip(got[0], stock[0], want[0], strict=True)):
        assert of[0].dtype == of[1].dtype and of[0].shape == of[1].shape, i
        # a loss, a number of a few rows, has torch's error by luck: none at all, or a unit of each row
        rows = 1 if of[0].dim() else 4
        check(f"output {i}", *of, magnitude=rows * max(1.0, of[2].abs().max().item()))
    assert got[1].keys() == stock[1].keys() == want[1].keys()
    for name, grad in got[1].items():
        scale = want[1][name].abs().max().item()
        check(name, grad, stock[1][name], want[1][name], magnitude=8 * scale)
    return got, stock


@pytest.mark.parametrize("parts", [("fused_head",), None, ("logprobs", "fused_head")], ids=str)
def test_an_engine_of_areals(made, parts):
    got, _ = compare(made, batch(), parts)
    assert len(got[0]) == 2 + 2 * 4 * 2, "two micro-batches of a training and of an evaluation"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0}, {"temperature": 2}, {"gradient_checkpointing": True}, {"pad_to_maximum": True},
        {"kind": "FSDPDPOEngine", "config": "DPOEngineConfig"},
        {"kind": "FSDPLMEngine", "config": "TrainEngineConfig"},
        {"use_lora": True, "target_modules": ["q_proj", "v_proj"]},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_an_engine(saved, options):
    compare(engines.make(saved, **options), batch(rows=6), truth="use_lora" not in options)


def test_any_batches(made):
    """Drawn at random: one sample or many, of one micro-batch or several, one of which does not count."""
    for seed in range(4):
        rows = (1, 2, 7, 3)[seed]
        given = batch(seed, rows, (3, 30, 13, 8)[seed])
        if rows > 1:
            given["loss_mask"][0] = False
        compare(made, given, truth=False)


def test_the_head_of_a_vision_model(made):
    """Of Qwen 2.5 VL, over text: images are put into the hidden states before."""
    config = transformers.Qwen2_5_VLConfig(
        text_config=SMALL | {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        vision_config=dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=32),
        image_token_id=150, video_token_id=151, vision_start_token_id=152, vision_end_token_id=153,
    )  # fmt: skip
    torch.manual_seed(0)
    kind = transformers.Qwen2_5_VLForConditionalGeneration
    made.model, made.is_vision_model = kind._from_config(config, attn_implementation="sdpa"), True
    compare(made, batch(), truth=False)


SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options"),
    [("Gemma2", {"final_logit_softcapping": 3.0}), ("Granite", {"logits_scaling": 3.0}), ("Phi", {})],
    ids=["softcap", "scale", "bias"],
)
def test_heads_of_other_families(made, monkeypatch, family, options):
    """Whose logits are bounded, scaled or shifted, and their extremes with them."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, **options)
    made.model = getattr(transformers, f"{family}ForCausalLM")(config)
    if made.model.lm_head.bias is not None:
        torch.nn.init.normal_(made.model.lm_head.bias)
    if family != "Gemma2":  # of the mask that AReaL gives to all others newer transformers make nothing
        monkeypatch.setattr(made.model_config, "model_type", "qwen3_moe")
    compare(made, batch(), truth=False)


def test_in_bfloat16(saved):
    """The error of the logprobs, extremes too, is that of the hidden states: that of rounded logits is not
    there."""
    made = engines.make(saved, dtype="bfloat16")
    given = batch()
    stock = everything(made, given)
    with rlkernel.patch_areal(["fused_head"]):
        got = everything(made, given)
    truth = everything(engines.make(saved), given)
    for i in range(len(truth[0])):
        ours, theirs = ((x[0][i] - truth[0][i]).abs().max() for x in (got, stock))
        assert got[0][i].dtype == stock[0][i].dtype and ours <= 2 * theirs + 1e-3, (i, ours, theirs)
    for name, want in truth[1].items():
        ours, theirs = ((x[1][name] - want).abs().max() for x in (got, stock))
        assert got[1][name].dtype == stock[1][name].dtype
        assert ours <= 2 * theirs + 1e-4 * want.abs().max(), (name, ours, theirs)


def test_no_logits_are_made(saved, monkeypatch):
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(4, 32))
    made, given, rows = engines.make(saved), batch(), {}
    for side in ("stock", "ours"):
        with rlkernel.patch_areal() if side == "ours" else contextlib.nullcontext():
            everything(made, given)  # the head is looked at once
            with Logits(VOCAB) as seen:
                everything(made, given)
        rows[side] = seen.rows
    assert rows == {"stock": 256, "ours": 0}


def test_padding_costs_nothing(saved):
    """What AReaL cuts off is not scored."""
    made, given = engines.make(saved), batch()
    counted = []
    stock = lm_head.linear_logprob_statistics

    def counting(hidden, weight, ids, **options):
        counted.append((len(ids), int((ids != -100).sum())))
        return stock(hidden, weight, ids, **options)

    lm_head.linear_logprob_statistics = counting
    try:
        with rlkernel.patch_areal():
            step(made, given)
    finally:
        lm_head.linear_logprob_statistics = stock
    assert all(rows == 256 for rows, _ in counted), counted
    assert sum(scored for _, scored in counted) == 2 * int(given["attention_mask"].sum())


def test_a_loss_that_gathers_from_logits_of_its_own(made):
    """Only who comes with what the model returned is given what was scored."""
    teacher, found = torch.randn(3, 20), []
    labels = torch.tensor([1, 2, 3])

    def loss(logprobs, entropy, micro, **extremes):
        found.append(engine.gather_logprobs(teacher, labels))
        return logprobs.sum()

    with rlkernel.patch_areal(["fused_head"]) as patch:
        made.eval_batch(batch(), loss, engines.weight)
        assert patch.calls == {ENGINE: 1}
    want = teacher.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    assert found
    for got in found:
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["actor", "critic", "logits"])
def test_a_loss_that_runs_an_engine(made, saved, kind):
    """Which scores, or makes what it makes, and leaves the one around it as it was."""
    options = {"kind": "FSDPPPOCritic", "config": "PPOCriticConfig", "is_critic": True}
    other = engines.make(saved, **(options if kind == "critic" else {}))
    inner = batch(3)

    def ask():
        if kind != "logits":
            return scored(other, inner)
        found = []
        other.forward_backward_batch(
            other._prepare_mb_list(inner), lambda logits, context: found.append(logits), True
        )
        return torch.cat(found)

    def run():
        asked = []

        def loss(logprobs, entropy, micro, vocab_min_logits, vocab_max_logits):
            with torch.no_grad():
                asked.append(ask())
            return logprobs.sum() + vocab_max_logits.sum()

        return made.eval_batch(batch(), loss, engines.weight), *asked

    want = run()
    with rlkernel.patch_areal(["fused_head"]) as patch:
        got = run()
        assert patch.calls[ENGINE] == (3 if kind == "actor" else 1)
        assert patch.fallbacks.total() == (0 if kind == "actor" else 2)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    assert scoring._current.get() is None and fused_head._of_loss.get() is None


def test_an_error_behind_the_first_micro_batch(made):
    """Is one: the first has had its backward pass."""
    begin, times = scoring.Scoring.end, []

    def fails(self, logits):
        begin(self, logits)
        times.append(1)
        if len(times) > 1:
            raise lm_head.HeadError("another model")

    scoring.Scoring.end = fails
    try:
        with rlkernel.patch_areal(["fused_head"]) as patch:
            with pytest.raises(lm_head.HeadError, match="another model"):
                step(made, batch())
            assert not patch.calls and scoring._current.get() is None
    finally:
        scoring.Scoring.end = begin


def test_a_micro_batch_without_weight(made):
    """Has no loss, and gradients of 0: the other one's are all that there are."""

    def weights(micro):
        return torch.tensor(float(len(micro["loss_mask"]) > 10))

    given = batch()
    stock = step(made, given, weights=weights)
    with rlkernel.patch_areal() as patch:
        got = step(made, given, weights=weights)
        assert not patch.fallbacks
    assert len(got[0]) == len(stock[0]) == 2, "one of two in training and in evaluation"
    assert got[1].keys() == stock[1].keys()
    for name, grad in got[1].items():
        torch.testing.assert_close(grad, stock[1][name], rtol=2e-4, atol=1e-6)


def check_left(made, reason, run=None):
    """To the bit what AReaL gives."""
    run = run or (lambda: scored(made, batch()))
    want = run()
    with rlkernel.patch_areal(["fused_head"]) as patch:
        got = run()
        assert f"{ENGINE}: {reason}" in str(patch.fallbacks) and not patch.calls, patch.fallbacks
    assert torch.equal(got, want)


def test_a_critic_is_left_to_areal(saved):
    made = engines.make(saved, kind="FSDPPPOCritic", config="PPOCriticConfig", is_critic=True)
    check_left(made, "a critic has no vocabulary")


def test_engines_that_are_left_to_areal(made, monkeypatch):
    for name, value, reason in (
        ("is_vision_model", True, "a vision model's tokens are shared out inside of it"),
        ("enable_tree_training", True, "the batch is a tree of tokens"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(made, name, value)
            helper = types.SimpleNamespace(sp_size=2, tp_size=1)
            assert _reason(made, helper) == reason
    assert _reason(made, types.SimpleNamespace(sp_size=1, tp_size=2)) is None
    assert _reason(made, types.SimpleNamespace(sp_size=2, tp_size=1)) is None


def _reason(made, helper):
    seen = type("Engine", (type(made),), {"__init__": lambda self: None})()
    vars(seen).update(
        config=made.config, model=made.model, parallel_helper=helper, is_vision_model=made.is_vision_model,
        enable_tree_training=made.enable_tree_training,
    )  # fmt: skip
    return fused_head._unable(seen, engine.FSDPEngine, True)


def test_an_engine_with_methods_of_its_own_is_left_to_areal(made):
    class Own(engine.FSDPPPOActor):
        def _compute_logprobs(self, logits, inputs, ulysses_pad_size=0):
            return super()._compute_logprobs(2 * logits, inputs, ulysses_pad_size)

    made.__class__ = Own
    check_left(made, "the engine has a _compute_logprobs of its own")


def test_a_temperature_that_is_left_to_areal(made):
    made.config.temperature = torch.tensor(0.5)
    check_left(made, "the temperature is no number above 0")


def test_a_compiled_model_is_left_to_areal(made):
    made.model.compile(backend="eager")
    check_left(made, "the model is compiled")


def test_who_asks_for_the_logits_has_them(made):
    """Of the engine's API: passes with a function of the caller's."""
    mb_list = made._prepare_mb_list(batch())

    def run():
        found = []
        with torch.no_grad():
            made.forward_backward_batch(mb_list, lambda logits, context: found.append(logits), True)
        return torch.cat(found)

    check_left(made, "the logits are asked for", run)
    assert run().shape[1] == VOCAB


def test_a_head_that_is_none(made):
    """A head that does something else than its config says is found out in the first micro-batch."""
    stock = made.model.lm_head.forward
    made.model.config.final_logit_softcapping = 3.0
    try:
        check_left(made, "Qwen2ForCausalLM: its logits must be scaled by 1.0 and capped at 3.0")
        check_left(made, "Qwen2ForCausalLM: its logits must be scaled by 1.0 and capped at 3.0")
    finally:
        made.model.config.final_logit_softcapping = None
    assert made.model.lm_head.forward == stock


def test_ranks_whose_head_is_none_of_theirs(made, monkeypatch):
    """A model of whose head no rank has a part, though it is said to be tensor-parallel."""
    monkeypatch.setattr(made.parallel_helper, "_ps", types.SimpleNamespace(tp_size=2, cp_size=1, dp_size=1))
    assert made.parallel_helper.tp_size == 2
    with rlkernel.patch_areal(["fused_head"]) as patch:
        found = scored(made, batch())
        assert list(patch.fallbacks) == [
            f"{ENGINE}: Qwen2ForCausalLM: its lm_head must be given all tokens, as its style gathers them"
        ]
    assert found.isfinite().all()


def test_labels_that_are_others(made, monkeypatch):
    """What is scored is what is asked for."""
    stock = torch.roll

    def other(x, shifts, dims=None):
        return stock(x, 2, dims)

    with monkeypatch.context() as changed:
        changed.setattr(engine.torch, "roll", other)
        check_left(made, "AReaL's labels must be the tokens that follow, got others")
        check_left(made, "AReaL's labels must be the tokens that follow, got others")


def test_an_error_of_the_model_leaves_it_as_it_was(made):
    def fails(*args):
        raise RuntimeError("somebody else's")

    hook = made.model.model.register_forward_hook(fails)
    with rlkernel.patch_areal(), pytest.raises(RuntimeError, match="somebody else's"):
        scored(made, batch())
    hook.remove()
    assert "forward" not in vars(made.model.lm_head) and scoring._current.get() is None


MUTANTS = {
    "no temperature": ("linear_logprob_statistics", {"temperature": 1.0}),
    "a bound": ("linear_logprob_statistics", {"softcap": 1.5}),
    "a scale": ("linear_logprob_statistics", {"logit_scale": 1.01}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_head_is_seen(made, monkeypatch, mutant):
    name, wrong = MUTANTS[mutant]
    stock = getattr(lm_head, name)
    monkeypatch.setattr(lm_head, name, lambda *x, **options: stock(*x, **options | wrong))
    with pytest.raises(AssertionError):
        compare(made, batch())


def test_wrong_extremes_are_seen(made, monkeypatch):
    stock = scoring.Scoring.extremes
    monkeypatch.setattr(scoring.Scoring, "extremes", lambda self: stock(self) / self.head.temperature)
    with pytest.raises(AssertionError):
        compare(made, batch())


def test_words_that_are_scored_in_padding_are_seen(made, monkeypatch):
    """A micro-batch whose padding is taken for longer than it is."""
    begin = scoring.Scoring.begin
    monkeypatch.setattr(scoring.Scoring, "begin", lambda self, x, padding: begin(self, x, padding + 1))
    with pytest.raises(AssertionError):
        compare(made, batch())
