"""Whatever is passed for an argument, the error names it: every argument of every public function."""

import contextlib
import inspect
import math
import re
import typing

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import rlkernel
from rlkernel import PrefixBatch, RolloutCorrection
from rlkernel.ops import _validate
from rlkernel.ops._validate import Range
from rlkernel.reference import paged_prefix_attention as paged

ROWS, MASK = torch.randn(2, 4), torch.ones(2, 4, dtype=torch.bool)
IDS = torch.tensor([[1, 4, 0, 2], [2, 2, 3, 3]])
BATCH = PrefixBatch.pack([[1, 2, 3]], [[[4, 5], [6, 7]]])
HEAD = {"hidden": torch.randn(8, 3), "weight": torch.randn(5, 3), "target_ids": IDS.flatten()}
PAGED = paged.make_inputs(8, 1, 2, 4, head_dim=8, block_size=4)
PAGED_TABLES = ("block_table", "seq_lens", "cu_seqlens_q")
POLICY = {"old_logprobs": ROWS, "advantages": torch.ones(2), "mask": MASK}

# a call of each function that is good, and says what an argument needs beside it
CALLS = {
    rlkernel.attention: {name: torch.randn(1, 4, 2, 8) for name in "qkv"},
    rlkernel.gae: {"rewards": ROWS, "values": ROWS},
    rlkernel.group_advantages: {"rewards": torch.randn(8), "group_size": 4},
    rlkernel.kl_shaped_rewards: {"rewards": ROWS, "logprobs": ROWS, "ref_logprobs": ROWS, "beta": 0.1},
    rlkernel.linear_logprob: HEAD,
    rlkernel.linear_logprob_statistics: HEAD,
    rlkernel.linear_policy_loss: {
        "hidden": torch.randn(2, 4, 3),
        "weight": HEAD["weight"],
        "target_ids": IDS,
        **POLICY,
    },
    rlkernel.logprob: {"logits": torch.randn(2, 4, 5), "target_ids": IDS},
    rlkernel.selective_log_softmax: {"logits": torch.randn(2, 4, 5), "index": IDS},
    rlkernel.logprobs_from_logits: {"logits": torch.randn(2, 4, 5), "labels": IDS},
    rlkernel.entropy_from_logits: {"logits": torch.randn(2, 4, 5)},
    rlkernel.divergence: {name: torch.randn(2, 4, 5) for name in ("logits", "teacher_logits")},
    rlkernel.linear_divergence: {
        "hidden": torch.randn(2, 4, 3),
        "weight": HEAD["weight"],
        "teacher_hidden": torch.randn(2, 4, 6),
        "teacher_weight": torch.randn(5, 6),
    },
    rlkernel.matmul: {"a": ROWS, "b": torch.randn(4, 3)},
    rlkernel.policy_loss: {"logprobs": ROWS, **POLICY},
    rlkernel.policy_loss_preset: {"name": "grpo"},
    rlkernel.preference_loss: {"logprobs": ROWS, "ref_logprobs": ROWS, "mask": MASK},
    rlkernel.preference_loss_preset: {"name": "dpo"},
    rlkernel.prefix_shared_attention: {
        **{name: torch.randn(6, 2, 8) for name in "qkv"},
        "batch": BATCH,
    },
    rlkernel.paged_prefix_attention: PAGED,
    rlkernel.paged_prefix_plan: {**{name: PAGED[name] for name in PAGED_TABLES}, "block_size": 4},
    rlkernel.running_normalize: {"x": ROWS, "state": torch.zeros(3, dtype=torch.float64)},
    rlkernel.layer_norm: {"x": ROWS},
    rlkernel.rms_norm: {"x": ROWS},
    rlkernel.rotary: {
        **dict.fromkeys("qk", torch.randn(4, 2, 6)),
        **dict.fromkeys(("cos", "sin"), torch.randn(4, 6)),
    },
    rlkernel.swiglu: {"gate": ROWS, "up": ROWS},
    rlkernel.value_loss: {"values": ROWS, "returns": ROWS, "mask": MASK},
    rlkernel.whiten: {"x": ROWS},
    rlkernel.use_backend: {"name": "auto"},
    rlkernel.last_backend: {"op": "gae"},
}
# what an argument needs to be looked at
BESIDE = {
    **dict.fromkeys(("cov_ratio", "clip_cov_lb", "clip_cov_ub"), {"loss_type": "clip_cov"}),
    "dro_beta": {"loss_type": "dro"},
    "loss_scale_factor": {"loss_agg_mode": "seq-mean-token-sum-norm"},
}
VALUES = {
    "nan": math.nan,
    "1.5": 1.5,
    "np.float32": np.float32(1.5),
    "True": True,
    "np.bool_": np.bool_(True),
    "3j": 3j,
    "-1": -1,
    "np.int64": np.int64(-1),
    "inf": math.inf,
    "-inf": -math.inf,
    "10**400": 10**400,
    "None": None,
    "a string": "a",
    "a list": [1.0],
    "a dict": {"a": 1},
    "an array": np.ones(3),
    "a type": int,
    "a tensor of strange shape": torch.ones(3, 1, 2),
    "an integer tensor": torch.ones(7).int(),
}
# values that are good beside those that the annotation allows: None, a flag, 1.5 for a number
GOOD = {
    **dict.fromkeys(("logit_scale", "teacher_logit_scale", "ignore_index", "seed", "entropy_coef"), {"-1"}),
    "clip_cov_lb": {"-1", "-inf"},
    "clip_cov_ub": {"inf", "10**400"},
    **dict.fromkeys(("vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"), {"-1"}),
    **dict.fromkeys(("gamma", "f_alpha_divergence_coef", "weight_offset"), {"-1"}),
    **dict.fromkeys(("label_smoothing", "loss_weights"), {"a list"}),
    "use_bias_correction_kl": {"True"},
    "group": {"None"},
    "log_sum_sq_probs": {"a tensor of strange shape", "an integer tensor"},  # not looked at unless wanted
    **dict.fromkeys(("x", "logits"), {"a tensor of strange shape"}),  # any shape is one
}
TWINS = {"np.float32": "1.5", "np.int64": "-1", "np.bool_": "True"}
NAMES_TOO = ("use_bias_correction_kl",)  # True is one of its names, not a flag


def arguments():
    for function, call in CALLS.items():
        parameters = inspect.signature(function).parameters
        for name, parameter in parameters.items():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                yield pytest.param(function, call, name, id=f"{function.__name__}-{name}")
        if function is rlkernel.linear_policy_loss:  # whose other options are those of policy_loss
            for name in inspect.signature(rlkernel.policy_loss).parameters:
                if name not in (*parameters, "logprobs", "entropy"):
                    yield pytest.param(function, call, name, id=f"{function.__name__}-{name}")


def run(function, call):
    """The error that a call ends with, or None."""
    try:
        result = function(**call)
        if function is rlkernel.use_backend:
            with result:
                pass
    except Exception as error:
        return error


def good(function, name):
    source = function if name in inspect.signature(function).parameters else rlkernel.policy_loss
    hint = typing.get_type_hints(source).get(name)
    kinds = typing.get_args(hint) or (hint,)
    by_type = {float: {"1.5"}, bool: {"True"}, type(None): {"None"}}
    return set().union(GOOD.get(name, ()), *(by_type.get(kind, ()) for kind in kinds))


@pytest.mark.parametrize(("function", "call", "name"), list(arguments()))
def test_what_is_wrong_is_named(function, call, name):
    call = call | BESIDE.get(name, {})
    allowed = good(function, name)
    for what, value in VALUES.items():
        error = run(function, call | {name: value})
        if error is None:
            assert TWINS.get(what, what) in allowed, f"{what} is accepted as {name}"
        else:
            assert isinstance(error, (TypeError, ValueError)), f"{name}, {what}: {error!r}"
            # of two shapes that do not fit, either is the wrong one
            names = (name, *(call if what == "a tensor of strange shape" else ()))
            assert any(n in str(error) for n in names), f"{name}, {what}: {error!r}"
            twin = (
                what in TWINS
                and name not in NAMES_TOO
                and run(function, call | {name: VALUES[TWINS[what]]}) is None
            )
            assert not twin, f"{name}: {what} is refused, {TWINS[what]} is not: {error}"


CORRECTIONS = {
    "level": (None, "a", ["token"], 1, np.ones(2)),
    "mode": (None, "a", ["mask"], True),
    "low": (None, "a", [1.0], math.nan, -1.0, math.inf),
    "high": (None, "a", [1.0], math.nan, -1.0, np.ones(2)),
    "veto": ("a", [1.0], math.nan, 0.0),
    "denominator": (None, "a", ["keep"]),
    "reject": (
        None, 1.5, ("token_k1",), (1.5,), (["a", 1.0],), ([],), (("token_k1", 1.0),), (("token_k2", "a"),),
        (("token_k1", 2.0, 1.0),), (("token_k1", None, 1.0),), ({"a": 1},), (("token_k1", 1, np.ones(2)),),
    ),
    "normalize": (None, "a", 1, [True]),
    "dppo": ("tv", ("tv", 0.2), ("tv", 0.2, "a"), (["tv"], 0.2, 0.2), ("a", 0.2, 0.2), ("tv", -0.2, 0.2), 1.5,
             {"tv": 1}),
    "off_policy_threshold": ("a", [1.0], math.nan, -math.inf),
    "two_sided": ("no", 1, None),
    "max_staleness": ("a", [1.0], math.nan, -1),
    "staleness_decay": (None, "a", [1.0], 0.0),
    "stale_only": (None, "a", 1),
}  # fmt: skip


@pytest.mark.parametrize("field", CORRECTIONS)
def test_what_is_wrong_in_a_correction_is_named(field):
    for value in CORRECTIONS[field]:
        correction = RolloutCorrection(**{field: value})
        options = {"correction": correction, "rollout_logprobs": ROWS, "staleness": torch.ones(2)}
        with pytest.raises(ValueError, match=rf"^correction\.{field}"):
            rlkernel.policy_loss(ROWS, **POLICY, **options)


@pytest.mark.parametrize("name", ["num_items_in_batch", "token_counts"])
def test_a_complex_number_is_named(name):
    value = torch.tensor(3 + 0j) if name == "num_items_in_batch" else torch.ones(2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=rf"^{name} must be .*real number.*, got complex64"):
        rlkernel.policy_loss(ROWS, **POLICY, **{name: value})


MASKED = {f: call for f, call in CALLS.items() if "mask" in inspect.signature(f).parameters}


@pytest.mark.parametrize("function", MASKED, ids=lambda f: f.__name__)
def test_what_is_no_mask_is_named(function):
    """NaN is neither 0 nor what counts; a complex number is what no peer takes for a mask."""
    names = ("mask", "nll_mask") if function is rlkernel.preference_loss else ("mask",)
    call = MASKED[function]
    shape = (8,) if function is rlkernel.group_advantages else (2, 4)
    for name in names:
        with pytest.raises(ValueError, match=rf"^{name} must be bool, integer or float, got complex64"):
            function(**call | {name: torch.ones(shape, dtype=torch.complex64)})
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            mask = torch.ones(shape, dtype=dtype)
            mask.view(-1)[-1] = math.nan
            place = [size - 1 for size in shape]
            with pytest.raises(
                ValueError, match=rf"^{name}{re.escape(str(place))} must be a number, got nan"
            ):
                function(**call | {name: mask})


def test_numbers_of_numpy_in_a_correction():
    results = []
    for high in (2.0, np.float32(2.0)):
        options = {"correction": RolloutCorrection(high=high), "rollout_logprobs": ROWS - 1.0}
        results.append(rlkernel.policy_loss(ROWS, **POLICY, **options).metrics)
    assert torch.equal(*results)


def test_a_list_is_a_tuple_in_a_correction():
    """As configuration files have it."""
    results = []
    for kind in (tuple, list):
        reject = kind([kind(["token_k1", 0.5, 2.0])])
        correction = RolloutCorrection(reject=reject, dppo=kind(["tv", 0.2, 0.2]))
        options = {"correction": correction, "rollout_logprobs": ROWS - 0.3}
        results.append(rlkernel.policy_loss(ROWS, **POLICY, **options).metrics)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages"])
def test_a_constant_that_requires_a_gradient(name):
    """is an error where there would be one, and nothing under no_grad."""
    constants = POLICY | {"ref_logprobs": ROWS, "rollout_logprobs": ROWS}
    constants |= {"correction": "token_tis", "beta": 0.1}
    want = rlkernel.policy_loss(ROWS, **constants).loss
    constants |= {name: constants[name].clone().requires_grad_()}
    with pytest.raises(ValueError, match=f"{name} must not require a gradient"):
        rlkernel.policy_loss(ROWS, **constants)
    with torch.no_grad():
        assert torch.equal(rlkernel.policy_loss(ROWS, **constants).loss, want)


ROW = torch.randn(2, 5)
# calls by the constant that they are about: a function, what it needs, and the constant itself
CONSTANTS = {
    "baselines": (
        rlkernel.group_advantages,
        {"rewards": torch.randn(4), "estimator": "remax"},
        torch.ones(4),
    ),
    "lengths": (
        rlkernel.group_advantages,
        {"rewards": torch.randn(4), "group_size": 4, "estimator": "opo"},
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
    ),
    "staleness": (
        rlkernel.policy_loss,
        {"logprobs": ROWS, **POLICY, "rollout_logprobs": ROWS - 0.1, "correction": "token_tis"},
        torch.zeros(2),
    ),
    "token_counts": (
        rlkernel.policy_loss,
        {"logprobs": ROWS, **POLICY, "loss_agg_mode": "seq-mean-token-mean", "num_items_in_batch": 2},
        torch.full((2,), 4.0),
    ),
    **{
        f"num_items_in_batch of {function.__name__}": (function, CALLS[function], torch.tensor(3.0))
        for function in (
            rlkernel.policy_loss,
            rlkernel.linear_policy_loss,
            rlkernel.value_loss,
            rlkernel.preference_loss,
        )
    },
    "num_tokens_in_batch": (
        rlkernel.preference_loss,
        CALLS[rlkernel.preference_loss] | {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]},
        torch.tensor(3.0),
    ),
    "kl": (
        rlkernel.preference_loss,
        CALLS[rlkernel.preference_loss] | {"loss_type": "kto", "labels": torch.tensor([True, False])},
        torch.tensor(0.5),
    ),
    "running_delta": (
        rlkernel.preference_loss,
        CALLS[rlkernel.preference_loss] | {"loss_type": "bco_pair"},
        torch.tensor([0.5, 3.0]),
    ),
    "state": (rlkernel.running_normalize, {"x": ROWS}, torch.tensor([4.0, 0.0, 2.0], dtype=torch.float64)),
    "logit_bias of sample": (rlkernel.sample, {"logits": ROW, "seeds": 3}, torch.zeros(5)),
    "logit_bias of score_tokens": (
        rlkernel.score_tokens,
        {"logits": ROW, "token_ids": IDS[0, :2]},
        torch.zeros(2, 5),
    ),
    "logit_bias of sample_linear": (
        rlkernel.sample_linear,
        {"hidden": torch.randn(2, 3), "weight": HEAD["weight"], "seeds": 3},
        torch.zeros(5),
    ),
    "temperature of sample": (rlkernel.sample, {"logits": ROW, "seeds": 3}, torch.ones(2)),
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_any_constant_that_requires_a_gradient(case):
    """is an error where there would be one, and nothing under no_grad."""
    function, call, constant = CONSTANTS[case]
    name = case.split(" of ")[0]
    want = function(**call | {name: constant})
    trained = call | {name: constant.clone().requires_grad_()}
    with pytest.raises(ValueError, match=f"^{name} must not require a gradient"):
        function(**trained)
    with torch.no_grad():
        got = function(**trained)
    for x, y in zip(*((out,) if isinstance(out, torch.Tensor) else out for out in (got, want)), strict=True):
        assert x is y or torch.equal(x, y)


def test_a_bias_of_few_tokens_that_requires_a_gradient():
    bias = rlkernel.TokenBias(IDS[:, :2], torch.zeros(2, 2, requires_grad=True))
    with pytest.raises(ValueError, match=r"^logit_bias.values must not require a gradient"):
        rlkernel.sample(ROW, logit_bias=bias, seeds=3)
    with torch.no_grad():
        got = rlkernel.sample(ROW, logit_bias=bias, seeds=3).token_ids
    assert torch.equal(got, rlkernel.sample(ROW, seeds=3).token_ids)


STRIDED = [f for f, call in CALLS.items() if any(isinstance(x, torch.Tensor) for x in call.values())]


@pytest.mark.parametrize("op", STRIDED, ids=lambda op: op.__name__)
def test_tensors_of_any_strides(op):
    """give the bits of dense ones, and are taken where they are empty."""
    call = CALLS[op]
    spread = {k: torch.stack([x, x], -1)[..., 0] for k, x in call.items() if isinstance(x, torch.Tensor)}
    want, got = op(**call), op(**call | spread)
    for x, y in zip(*((out,) if isinstance(out, torch.Tensor) else out for out in (want, got)), strict=True):
        assert x is y or torch.equal(x, y)
    # whose rows the batch counts, or a table of starts that has one more
    if op not in (
        rlkernel.prefix_shared_attention,
        rlkernel.paged_prefix_attention,
        rlkernel.paged_prefix_plan,
    ):
        whole = ("weight", "teacher_weight", "state", "b")
        op(**call | {k: x if k in whole else x[:0] for k, x in spread.items()})


def _shown(found):
    """Of each result its shape, dtype, strides and whether a gradient follows it."""
    found = (found,) if isinstance(found, torch.Tensor) else found
    return [x if x is None else (x.shape, x.dtype, x.stride(), x.requires_grad) for x in found]


@pytest.mark.parametrize("device", ["meta", "fake"])
@pytest.mark.parametrize("op", STRIDED, ids=lambda op: op.__name__)
def test_tensors_without_values_give_results_of_the_same_shapes(op, device):
    call = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in CALLS[op].items()}
    for name in {*call} & {"hidden", "logits", "logprobs", "values", "q", "a", "x", "gate"}:
        if op in (rlkernel.sample, rlkernel.sample_linear, rlkernel.score_tokens, rlkernel.verify_chain):
            continue
        if op not in (rlkernel.gae, rlkernel.kl_shaped_rewards, rlkernel.running_normalize, rlkernel.whiten):
            call[name].requires_grad_()
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # a batch's tables have their values
    empty = mode.from_tensor if device == "fake" else lambda x: x.detach().to("meta")
    bare = {
        k: empty(x).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for k, x in call.items()
    }
    with mode if device == "fake" else contextlib.nullcontext():
        if op in (rlkernel.paged_prefix_attention, rlkernel.paged_prefix_plan):
            with pytest.raises(ValueError, match="^block_table must hold values, which are read, got a"):
                op(**bare)
            return
        found = op(**bare)
        assert _shown(found) == _shown(op(**call))
        for x in (found,) if isinstance(found, torch.Tensor) else found:
            if x is not None and x.requires_grad:
                x.sum().backward(retain_graph=True)
    for name, x in bare.items():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            assert x.grad.shape == x.shape and x.grad.dtype == x.dtype, name


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_options_whose_values_a_backend_reads_have_shapes_too(device):
    mode = FakeTensorMode()
    empty = mode.from_tensor if device == "fake" else lambda x: x.to("meta")
    rewards, ids, ends = (empty(x) for x in (torch.randn(8), torch.zeros(8).long(), torch.tensor([0, 3, 8])))
    logits, offsets = empty(torch.randn(8, 5)), empty(torch.zeros(9).long())
    q = empty(torch.randn(8, 2, 4))
    with mode if device == "fake" else contextlib.nullcontext():
        given = rlkernel.group_advantages(rewards, group_ids=ids)
        packed = rlkernel.gae(rewards, rewards, cu_seqlens=ends, lam=empty(torch.ones(2)))
        kept = rlkernel.logprob(logits, ids, support_ids=ids, support_offsets=offsets)
        for x in (given, packed.advantages, packed.returns, kept.logprobs):
            assert x.shape == (8,) and x.dtype == torch.float32
        with pytest.raises(ValueError, match="^cu_seqlens_q must hold values, .*: give a batch, which has"):
            rlkernel.attention(q, q, q, cu_seqlens_q=ends)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_head_on_the_meta_device(autocast):
    call = {name: x.to("meta") for name, x in HEAD.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), rlkernel.use_backend("reference"):
        out = rlkernel.linear_logprob(**call)
        assert out.logprobs.device.type == "meta" and out.logprobs.shape == (8,)
        with pytest.raises(ValueError, match="^weight must be on hidden's device"):
            rlkernel.linear_logprob(**call | {"weight": HEAD["weight"]})


RANGES = {
    "any": Range(),
    "share": Range(0.0, 1.0),
    "scale": Range(0.0, above=True),
    "bound": Range(1.0, absent=9.0),
}


@pytest.mark.parametrize(
    "wrong, want",
    [
        ({"any": math.inf}, "any must be finite, got inf"),
        ({"share": 1.5}, r"share must be in \[0, 1\], got 1.5"),
        ({"scale": 0}, "scale must be > 0 and finite, got 0"),
        ({"bound": math.nan}, "bound must be >= 1 and finite, got nan"),
        ({"share": None}, "share must be a number, got NoneType"),
        ({"any": True}, "any must be a number, got bool"),
    ],
)
def test_options_out_of_their_declared_ranges(wrong, want):
    good = {"any": -3, "share": 1, "scale": 1e-9, "bound": None}
    found = _validate.numbers(RANGES, good)
    assert found == good | {"bound": 9.0} and set(map(type, found.values())) == {float}
    with pytest.raises(ValueError, match=want):
        _validate.numbers(RANGES, good | wrong)
