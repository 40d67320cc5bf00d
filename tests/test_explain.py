"""explain answers for the very call, of every public function, and says what it does not understand."""

import inspect

import pytest
import torch
from test_arguments import CALLS

import rlkernel
from rlkernel import _explain, dispatch

LOGITS, IDS = torch.randn(2, 5), torch.tensor([1, 3])
DRAFTS = {"draft_token_ids": torch.tensor([[1, 2], [3, 0]]), "target_logits": torch.randn(2, 3, 5)}
SAMPLING = {
    rlkernel.sample: {"logits": LOGITS},
    rlkernel.score_tokens: {"logits": LOGITS, "token_ids": IDS},
    rlkernel.verify_chain: DRAFTS,
    rlkernel.sample_linear: {"hidden": torch.randn(2, 4), "weight": torch.randn(5, 4)},
}
NAMES = sorted(_explain._functions())
OPS = {f.__name__: call for f, call in (CALLS | SAMPLING).items() if f.__name__ in NAMES}
OPS["sampling"] = OPS["sample"]


def test_every_public_function_of_tensors_is_known():
    computing = {
        name
        for name in rlkernel.__all__
        if inspect.isfunction(f := getattr(rlkernel, name)) and f.__module__.startswith("rlkernel.ops.")
    }
    assert computing - set(NAMES) == {"policy_loss_preset", "preference_loss_preset", "split_seeds"}
    assert set(NAMES) == set(OPS) >= set(dispatch.ops())


@pytest.fixture
def nothing_runs(monkeypatch):
    """A backend that is picked fails the test."""
    monkeypatch.setattr(dispatch._log, "debug", lambda *_: pytest.fail("a backend was picked"))
    monkeypatch.setattr(dispatch, "_last", {})


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_answered_and_not_made(name, nothing_runs):
    call = OPS[name]
    before = torch.random.get_rng_state()
    by_keyword = rlkernel.explain(name, **call)
    assert list(by_keyword) == list(dispatch.BACKENDS) and by_keyword["reference"] == []
    tensors = [x for x in call.values() if isinstance(x, torch.Tensor)]
    others = {key: x for key, x in call.items() if not isinstance(x, torch.Tensor)}
    assert rlkernel.explain(name, *tensors, **others) == by_keyword
    assert rlkernel.explain(name, *tensors)["reference"] == []
    assert torch.equal(torch.random.get_rng_state(), before)
    assert rlkernel.last_backend(name) is None and dispatch._asked.get() is None


@pytest.mark.parametrize("name", NAMES)
def test_what_it_does_not_understand_is_named(name):
    for call in (OPS[name], {}):
        with pytest.raises(ValueError, match="options must be among those of .*, got 'no_such_option'"):
            rlkernel.explain(name, **call, no_such_option=1)
    first = next(iter(OPS[name]))
    with pytest.raises(ValueError, match=f"{first} must be given once"):
        rlkernel.explain(name, OPS[name][first], **OPS[name])
    for wrong in ({}, {first: [1.0]}):
        with pytest.raises(ValueError, match=f"^{first} must be "):
            rlkernel.explain(name, **OPS[name] | wrong) if wrong else rlkernel.explain(name)
    with pytest.raises(ValueError, match="tensors must be at most"):
        rlkernel.explain(name, *[LOGITS] * 100)


def test_options_are_known_as_the_functions_have_them():
    """What is by keyword alone has no place, and what is handed on is an option of that function alone."""
    with pytest.raises(ValueError, match="tensors must be at most 2 of logprob, got 3"):
        rlkernel.explain("logprob", LOGITS, IDS, 0.5)
    handed_on = {"loss_type": "dro", "dro_beta": 0.5}
    assert rlkernel.explain("linear_policy_loss", **OPS["linear_policy_loss"], **handed_on)["reference"] == []
    with pytest.raises(ValueError, match="options must be among those of logprob .*, got 'loss_type'"):
        rlkernel.explain("logprob", **OPS["logprob"], **handed_on)


def test_the_answer_is_that_of_the_call():
    """Options decide too: what explain says, the call does."""
    wide = {x: y.double() for x, y in OPS["sample_linear"].items()}
    for name, call in (
        ("sample", {"logits": LOGITS.double()}),
        ("sample_linear", wide),
        ("linear_logprob", OPS["linear_logprob"] | {"algorithm": "fused"}),
        ("linear_policy_loss", OPS["linear_policy_loss"] | {"algorithm": "one_pass"}),
        ("policy_loss", OPS["policy_loss"] | {"loss_type": "kl_cov"}),
        ("preference_loss", {x: y.double() for x, y in OPS["preference_loss"].items()}),
    ):
        reasons = rlkernel.explain(name, **call)
        for backend, why_not in reasons.items():
            with rlkernel.use_backend(backend):
                if not why_not:
                    getattr(rlkernel, name)(**call)
                    assert rlkernel.last_backend(name) == backend
                else:
                    with pytest.raises(NotImplementedError) as caught:
                        getattr(rlkernel, name)(**call)
                    assert "; ".join(why_not) in str(caught.value)


def test_an_argument_that_is_off_is_an_error():
    with pytest.raises(ValueError, match="temperature must be"):
        rlkernel.explain("logprob", LOGITS, IDS, temperature=-1)
    assert dispatch._asked.get() is None
    rlkernel.logprob(LOGITS, IDS)
    assert rlkernel.last_backend("logprob") == rlkernel.last_backend("entropy_from_logits") is not None
