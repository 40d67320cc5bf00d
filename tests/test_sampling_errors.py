"""sampling: what is off is said by name, before anything is written."""

import inspect
import math
import re
import typing

import pytest
import torch

import rlkernel
from rlkernel.ops.sampling.options import ChainOptions, SampleOptions, ScoreOptions
from rlkernel.runtime import debug

LOGITS = torch.zeros(3, 40)
SAID = torch.zeros(3, 5, dtype=torch.int64)


def some(value, dtype=torch.float32):
    return torch.full((3,), value, dtype=dtype)


# Not numbers, or none once they are fp32.
PENALTIES = {
    "repetition": [math.nan, math.inf, -math.inf, -1.5, 0.0, 1e-50, 1e39],
    "frequency": [math.nan, math.inf, -math.inf, 1e39],
    "presence": [math.nan, math.inf, -math.inf, -1e39],
}
ERRORS = {
    "temperature below 0": (
        {"temperature": -0.5},
        r"temperature must be 0 or from 1.18e-38 to 3.4e\+38, got -0.5",
    ),
    "temperature NaN": (
        {"temperature": math.nan},
        r"temperature must be 0 or from 1.18e-38 to 3.4e\+38, got nan",
    ),
    "temperature infinite": (
        {"temperature": math.inf},
        r"temperature must be 0 or from 1.18e-38 to 3.4e\+38, got inf",
    ),
    "temperatures": (
        {"temperature": torch.tensor([1.0, -1.0, 0.0])},
        r"temperature\[1\] must be 0 or from 1.18e-38 to 3.4e\+38, got -1",
    ),
    "temperature of two rows": (
        {"temperature": torch.ones(2)},
        r"temperature must be one value or have shape \(3,\), got \(2,\)",
    ),
    "temperature by name": ({"temperature": "hot"}, "temperature must be a number or a tensor, got str"),
    "temperature with a gradient": (
        {"temperature": torch.ones(3, requires_grad=True)},
        "temperature must not require a gradient",
    ),
    "temperatures of bools": (
        {"temperature": some(True, torch.bool)},
        "temperature must be numbers, got bool",
    ),
    "top_p of bools": ({"top_p": some(True, torch.bool)}, "top_p must be numbers, got bool"),
    "top_k": ({"top_k": -2}, "top_k must be an integer >= 1, or 0 or -1 for all, got -2"),
    "top_k of a float": ({"top_k": 5.0}, "top_k must be an integer >= 1, or 0 or -1 for all, got 5.0"),
    "top_k floats": ({"top_k": some(5.0)}, "top_k must be integers, got float32"),
    "top_k rows": ({"top_k": some(-3, torch.int64)}, r"top_k\[0\] must be >= 1, or 0 or -1 for all, got -3"),
    "top_p of 0": ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
    "top_p above 1": ({"top_p": 1.01}, r"top_p must be in \(0, 1\], got 1.01"),
    "top_p rows": ({"top_p": torch.tensor([0.5, 0.5, 0.0])}, r"top_p\[2\] must be in \(0, 1\], got 0"),
    "min_p below 0": ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1"),
    "min_p above 1": ({"min_p": some(1.5)}, r"min_p\[0\] must be in \[0, 1\], got 1.5"),
    "epsilon_cutoff": ({"epsilon_cutoff": 1.5}, r"epsilon_cutoff must be in \[0, 1\], got 1.5"),
    "eta_cutoff": ({"eta_cutoff": -0.1}, r"eta_cutoff must be in \[0, 1\], got -0.1"),
    "top_a": ({"top_a": some(2.0)}, r"top_a\[0\] must be in \[0, 1\], got 2.0"),
    "typical_p": ({"typical_p": 0.0}, r"typical_p must be in \(0, 1\], got 0.0"),
    "typical_p rows": ({"typical_p": some(1.5)}, r"typical_p\[0\] must be in \(0, 1\], got 1.5"),
    "xtc_probability": ({"xtc_probability": -0.5}, r"xtc_probability must be in \[0, 1\], got -0.5"),
    "xtc_threshold": ({"xtc_threshold": 0}, r"xtc_threshold must be in \(0, 1\], got 0"),
    "xtc_threshold of None": ({"xtc_threshold": None}, "xtc_threshold must be a number or a tensor, got No"),
    "top_n_sigma": ({"top_n_sigma": 0.0}, "top_n_sigma must be > 0, got 0.0"),
    "seeds' shape": ({"seeds": torch.arange(4)}, r"seeds must be one value or have shape \(3,\), got \(4,\)"),
    "seeds' dtype": ({"seeds": some(1.0)}, "seeds must be integers, got float32"),
    "seeds of a float": ({"seeds": 1.5}, "seeds must be a 64-bit integer or a tensor, got 1.5"),
    "seeds too large": ({"seeds": 2**64}, "seeds must be a 64-bit integer"),
    "positions' shape": (
        {"positions": torch.zeros(1, 3, dtype=torch.int64)},
        r"positions must be .*\(3,\), got \(1, 3\)",
    ),
    "positions' dtype": ({"positions": some(True, torch.bool)}, "positions must be integers, got bool"),
    "filter_order": (
        {"filter_order": "top_p_first"},
        "filter_order must be .*sequential.*joint.*, got 'top_p_first'",
    ),
    "method": ({"method": "multinomial"}, "method must be .*grouped.*gumbel.*, got 'multinomial'"),
    "return_logprobs": (
        {"return_logprobs": ("raw", "temperature")},
        "return_logprobs must be .*tempered.*, got 'temperature'",
    ),
    "return_logprobs of a name": (
        {"return_logprobs": "raw"},
        "return_logprobs must be a tuple of names, got 'raw'",
    ),
    "return_logprobs of a number": (
        {"return_logprobs": 3},
        "return_logprobs must be a tuple of names, got 3",
    ),
    "return_support": ({"return_support": -1}, r"return_support must be an integer in \[0, "),
    "top_logprobs": ({"top_logprobs": 41}, r"top_logprobs must be an integer in \[0, 40\], got 41"),
    "bitmask's width": (
        {"token_bitmask": torch.zeros(3, 0, dtype=torch.int32)},
        r"token_bitmask must be int32 of shape \(3, 2\), got int32 \(3, 0\)",
    ),
    "bitmask's rows": (
        {"token_bitmask": torch.zeros(2, 2, dtype=torch.int32)},
        r"token_bitmask must be int32 of shape \(3, 2\), got int32 \(2, 2\)",
    ),
    "bitmask's dtype": (
        {"token_bitmask": torch.zeros(3, 2, dtype=torch.int64)},
        "token_bitmask must be int32 .*, got int64",
    ),
    "bitmask of bools": (
        {"token_bitmask": torch.ones(3, 40, dtype=torch.bool)},
        r"must be int32 .*, got bool \(3, 40\)",
    ),
    "bias' shape": (
        {"logit_bias": torch.zeros(3)},
        r"logit_bias must have shape \(40,\) or \(3, 40\), got \(3,\)",
    ),
    "bias of no token": (
        {"logit_bias": {40: 1.0}},
        r"logit_bias must have token ids in \[0, 40\) as keys, got 40",
    ),
    "penalised ids": (
        {"penalties": rlkernel.Penalties(torch.zeros(2, 5, dtype=torch.int64))},
        r"penalties.output_token_ids must be \[3, L\], got \(2, 5\)",
    ),
    "penalised floats": (
        {"penalties": rlkernel.Penalties(torch.zeros(3, 5))},
        "penalties.output_token_ids must be an int32 or int64 tensor, got float32",
    ),
    "repetition of 0": (
        {"penalties": rlkernel.Penalties(SAID, repetition=0.0)},
        "penalties.repetition must be > 0 and finite, got 0.0",
    ),
    "penalties of a dict": (
        {"penalties": {"repetition": 1.2}},
        "penalties must be rlkernel.Penalties, got dict",
    ),
    **{
        f"{name} of {value}": (
            {"penalties": rlkernel.Penalties(SAID, **{name: value})},
            rf"penalties.{name} must be (> 0 and )?finite, got {re.escape(str(value))}$",
        )
        for name in PENALTIES
        for value in PENALTIES[name]
    },
    **{
        f"{name} rows of {value}": (
            {
                "penalties": rlkernel.Penalties(
                    SAID,
                    **{name: torch.tensor([1.0, value, 1.0], dtype=torch.float64)},
                )
            },
            rf"penalties.{name}\[1\] must be (> 0 and )?finite, got ",
        )
        for name in PENALTIES
        for value in PENALTIES[name]
    },
    **{
        f"bias of {value}": (
            {"logit_bias": {7: 1.0, 3: value}},
            rf"logit_bias\[3\] must be finite or -inf, got {re.escape(str(value))}$",
        )
        for value in (math.nan, math.inf, 1e39)
    },
    **{
        f"bias tensor of {value}": (
            {"logit_bias": torch.zeros(40, dtype=torch.float64).index_fill(0, torch.tensor(3), value)},
            r"logit_bias\[3\] must be finite or -inf, got (nan|inf)$",
        )
        for value in (math.nan, math.inf, 1e39)
    },
    "bias by name": ({"logit_bias": {3: "high"}}, r"logit_bias\[3\] must be a number, got str"),
    "bools as a penalty": (
        {"penalties": rlkernel.Penalties(SAID, presence=torch.ones(3, dtype=torch.bool))},
        "penalties.presence must be numbers, got bool",
    ),
    "a penalty with a gradient": (
        {"penalties": rlkernel.Penalties(SAID, frequency=torch.ones(3, requires_grad=True))},
        "penalties.frequency must not require a gradient",
    ),
    "presence of two rows": (
        {"penalties": rlkernel.Penalties(SAID, presence=torch.ones(2))},
        r"penalties.presence must be one value or have shape \(3,\), got \(2,\)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_off_is_named(case):
    options, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        rlkernel.sample(LOGITS, **options)
    shared = {k: v for k, v in options.items() if k not in ("seeds", "positions", "method")}
    if shared:
        with pytest.raises(ValueError, match=message):
            rlkernel.score_tokens(LOGITS, torch.zeros(3, dtype=torch.int64), **shared)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "typical_p", "xtc_probability", "seeds"])
def test_one_value_on_the_meta_device_is_none(name):
    dtype = torch.int64 if name in ("top_k", "seeds") else torch.float32
    one = torch.ones((), dtype=dtype, device="meta")
    with pytest.raises(ValueError, match=f"^{name} must be on logits's device cpu, got meta$"):
        rlkernel.sample(LOGITS, **{name: one})


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (
            torch.zeros(3, 4, dtype=torch.int64),
            "logits must be float16, bfloat16, float32 or float64, got int64",
        ),
        (torch.zeros(3, 0), r"logits must be \[..., V\] with V >= 1, got \(3, 0\)"),
        (torch.tensor(1.0), r"logits must be \[..., V\] with V >= 1, got \(\)"),
        ([[1.0, 2.0]], "logits must be a tensor, got list"),
    ],
)
def test_logits_that_are_none(logits, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.sample(logits)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        (torch.tensor([0, 40, 1]), r"token_ids\[1\] = 40 is outside \[0, 40\)"),
        (torch.tensor([0, 1, -1]), r"token_ids\[2\] = -1 is outside \[0, 40\)"),
        (torch.tensor([0, 1]), r"token_ids must have the shape \(3,\) of the rows of logits, got \(2,\)"),
        (torch.zeros(3), "token_ids must be integers, got float32"),
    ],
)
def test_forced_tokens_that_are_off(token_ids, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.score_tokens(LOGITS, token_ids)


def test_nothing_is_written_when_a_given_tensor_does_not_fit():
    out = rlkernel.sample(LOGITS, seeds=1, return_support=4)
    kept = [None if x is None else x.clone() for x in out]
    for logits, options, message in (
        (torch.zeros(4, 40), {"return_support": 4}, r"out.token_ids must be int64 \(4,\), got int64 \(3,\)"),
        (
            LOGITS.double(),
            {"return_support": 4},
            r"out.raw_logprobs must be float64 \(3,\), got float32 \(3,\)",
        ),
        (LOGITS, {"return_support": 5}, r"out.support_ids must be int32 \(15,\), got int32 \(12,\)"),
        (LOGITS, {"return_entropy": True}, r"out.entropy must be float32 \(3,\), got None"),
    ):
        with pytest.raises(ValueError, match=message):
            rlkernel.sample(logits, seeds=9, top_k=2, out=out, **options)
    for before, after in zip(kept, out, strict=True):
        assert before is after is None or torch.equal(before, after)


def test_values_of_tensors_are_not_read_where_that_would_synchronise(monkeypatch):
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)
    out = rlkernel.sample(LOGITS, temperature=torch.tensor([1.0, -1.0, 1.0]), top_p=some(2.0))
    assert out.token_ids.shape == (3,)
    with rlkernel.use_backend("reference"):
        forced = rlkernel.score_tokens(LOGITS, torch.tensor([5, 40, -7]), return_rank=True)
    assert forced.raw_logprobs.isnan().tolist() == [False, True, True] and forced.rank[1:].tolist() == [0, 0]


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_penalties_that_nobody_looked_at_leave_no_token(backend, monkeypatch):
    """As on a GPU outside of debug mode: what is no factor or no number makes its row invalid, no other."""
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)
    said = torch.tensor([[1, 2], [3, 4], [5, 6]])
    for name, values in PENALTIES.items():
        for value in values:
            if name == "repetition" or not abs(value) < math.inf:
                penalties = rlkernel.Penalties(said, **{name: torch.tensor([1.0, value, 1.0])})
                with rlkernel.use_backend(backend):
                    out = rlkernel.sample(LOGITS, seeds=3, penalties=penalties)
                assert out.valid.tolist() == [True, False, True] and out.token_ids[1] == -1, (name, value)
    for value in (math.nan, math.inf):
        bias = torch.zeros(3, 40).index_put_((torch.tensor(1), torch.tensor(9)), torch.tensor(value))
        for given in (bias, rlkernel.TokenBias(torch.tensor([[9]] * 3), bias[:, 9:10])):
            with rlkernel.use_backend(backend):
                out = rlkernel.sample(LOGITS, seeds=3, logit_bias=given)
            assert out.valid.tolist() == [True, False, True]


def test_a_bias_of_minus_infinity_forbids():
    for bias in ({3: -math.inf}, torch.zeros(40).index_fill(0, torch.tensor(3), -math.inf)):
        out = rlkernel.sample(LOGITS.expand(200, 3, 40), logit_bias=bias, top_logprobs=40)
        assert (
            out.valid.all() and (out.token_ids != 3).all() and (out.top_logprobs[..., -1] == -math.inf).all()
        )


def test_results_carry_no_gradient():
    logits = torch.randn(3, 40, requires_grad=True)
    out = rlkernel.sample(logits, top_p=0.9)
    assert not any(x.requires_grad for x in out if x is not None)


def test_type_checkers_read_the_options_of_sample():
    """What mypy then finds wrong is in tests/typed_calls.py."""
    of_sample = typing.get_type_hints(rlkernel.sample)
    del of_sample["logits"], of_sample["return"]
    assert typing.get_type_hints(SampleOptions) == of_sample
    kinds = {"sample_linear": SampleOptions, "score_tokens": ScoreOptions, "verify_chain": ChainOptions}
    for name, kind in kinds.items():
        assert not kind.__required_keys__, name
        function = getattr(rlkernel, name)
        told = {p.name for p in inspect.signature(function).parameters.values() if p.name in of_sample}
        hint = typing.get_type_hints(function)["options"]
        assert typing.get_args(hint) == (kind,) and told == set(typing.get_type_hints(kind)), name
