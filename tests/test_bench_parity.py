"""rlkernel.bench parity: wrong kernels, planted one at a time, fail it."""

import pytest
import torch

import rlkernel
from rlkernel.bench import cases, parity, run
from rlkernel.bench.cases import Case
from rlkernel.bench.progress import Progress


@pytest.fixture(autouse=True)
def not_interpreted(monkeypatch):
    """What runs here is native: its draws are counted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def rows_of(op, monkeypatch, spoil, case=None):
    """The rows of the native backend on a tiny case, with its outputs spoilt."""
    module = cases.modules([op])[op]
    case = (case or module.PRESETS["tiny"][0]).replace(op=op, gradients=module.GRADIENTS)
    ours = parity.ours

    def spoilt(module, op, backend):
        call = ours(module, op, backend)

        def changed(inputs, case):
            return spoil(call, inputs, case)

        return changed

    monkeypatch.setattr(parity, "ours", lambda *a: spoilt(*a) if a[2] == "native" else ours(*a))
    settings = run.Settings(("parity",), backends=("native",), peers=())
    with Progress(2) as progress:
        (row, *_) = run.run([case], {op: module}, settings, progress)
    return row


@pytest.mark.parametrize("times", [1.8, 3.0])
def test_the_budget_is_twice_torchs_error(times, monkeypatch):
    """A kernel that is three times as far from fp64 as PyTorch fails, one that is 1.8 times as far passes."""
    module = cases.modules(["logprob"])["logprob"]
    # bf16 logits of 4: one unit in the last place of the fp32 result is small beside PyTorch's error
    case = Case({"N": 3, "V": 1030}, "float32", module.OPTIONS).replace(op="logprob", gradients=())
    inputs = parity.make_inputs(module, case, "cpu")
    truth = parity.Truth(module, case, inputs, parity.upstream(module, case, inputs))
    exact = truth.of(())["logprobs"]
    torchs = 1e-4  # planted too, so that the test knows it
    errors = {
        name: parity.compare((exact + planted).float(), exact)
        for name, planted in (("torch", torchs), ("ours", times * torchs))
    }
    failures = parity.failures({"logprobs": errors["ours"]}, {"logprobs": errors["torch"]})
    assert bool(failures) == (times > 2)


def test_a_planted_error_of_three_times_torchs_fails_the_run(monkeypatch):
    module = cases.modules(["logprob"])["logprob"]
    torchs = module._naive

    def off(by):
        def spoil(call, inputs, case):
            out = call(inputs, case)
            return {**out, "logprobs": out["logprobs"] + by}

        return spoil

    monkeypatch.setattr(module, "_naive", lambda inputs, case: off(1e-4)(torchs, inputs, case))
    assert any("logprobs" in f for f in rows_of("logprob", monkeypatch, off(3e-4))["failures"])
    monkeypatch.undo()  # of the first plant
    monkeypatch.setattr(module, "_naive", lambda inputs, case: off(1e-4)(torchs, inputs, case))
    assert not rows_of("logprob", monkeypatch, off(1.8e-4))["failures"]


def likeliest(call, inputs, case):
    """A sampler without a draw, whose log-probabilities are all true."""
    tokens = inputs["logits"].argmax(-1)
    options = {k: v for k, v in case.options.items() if not k.startswith("return_") and k != "method"}
    scored = rlkernel.score_tokens(inputs["logits"], tokens, **options)
    return {k: v for k, v in scored._asdict().items() if v is not None} | {"token_ids": tokens}


def unseeded(call, inputs, case):
    """Right in distribution, but not the seed's token."""
    return call({**inputs, "seeds": inputs["seeds"] ^ 12345}, case)


def unfiltered(call, inputs, case):
    """Draws from the whole distribution and reports what the filter keeps."""
    case = case.replace(options={"temperature": case.options["temperature"]})
    return call(inputs, case)


def with_(name, change):
    def spoil(call, inputs, case):
        out = call(inputs, case)
        return {**out, name: change(out[name])}

    return spoil


SAMPLERS = {
    "the likeliest token": (likeliest, "token_ids"),
    "another seed": (unseeded, "token_ids"),
    "no filter": (unfiltered, "kept_count"),
    "a token too many": (with_("kept_count", lambda x: x + 1), "kept_count"),
    "too much mass": (with_("kept_mass", lambda x: x * 1.01), "kept_mass"),
    "not valid": (with_("valid", lambda x: ~x), "valid"),
    "processed is tempered": (with_("processed_logprobs", lambda x: x - 0.1), "processed_logprobs"),
    "the next token": (with_("token_ids", lambda x: (x + 1) % 40), "token_ids"),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_wrong_sampler_fails_parity(name, monkeypatch):
    spoil, seen = SAMPLERS[name]
    # rows enough that another seed does not draw the same tokens by chance
    case = Case({"B": 24, "V": 1030}, "float32", {"temperature": 0.8, "top_p": 0.5})
    failures = rows_of("sampling", monkeypatch, spoil, case)["failures"]
    assert any(failure.startswith(seen) for failure in failures), failures


@pytest.mark.parametrize("name", ["kept_mass", "processed_logprobs", "token_ids", "kept_count"])
def test_a_wrong_sample_linear_fails_parity(name, monkeypatch):
    change = {"kept_mass": lambda x: x * 1.01, "processed_logprobs": lambda x: x - 0.1}
    spoil = with_(name, change.get(name, lambda x: (x + 1) % 40))
    failures = rows_of("sample_linear", monkeypatch, spoil)["failures"]
    assert any(failure.startswith(name) for failure in failures), failures


def test_chi_square_sees_what_seeds_do_not():
    """A sampler of its own stream, which takes the likeliest token twice as often."""
    from rlkernel.benchmarks import _draws

    logits = torch.linspace(0, 2, _draws.VOCAB)
    g = torch.Generator().manual_seed(0)

    def draw(share):
        def call(seeds):
            tokens = torch.multinomial(logits.softmax(0).expand(len(seeds), -1), 1, generator=g)[:, 0]
            return torch.where(torch.rand(len(seeds), generator=g) < share, len(logits) - 1, tokens)

        return call

    assert not _draws.unlikely(draw(0.0), logits, {})
    assert "chi-square" in _draws.unlikely(draw(0.15), logits, {})[0]
    assert "outside" in _draws.unlikely(draw(0.0), logits, {"top_k": 30})[0]
