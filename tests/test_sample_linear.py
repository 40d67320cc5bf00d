"""sample_linear: ``sample`` of the product's logits, bit for bit, in tiles and in memory of a fixed size."""

import re

import pytest
import torch
from backends import EMULATED, is_slow, of, running, skip_unless_able
from bitwise import assert_equal
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel.calls.sampling import SPLIT
from rlkernel.drivers import sample_linear as sampling_driver
from rlkernel.reference.sample_linear import make_inputs
from rlkernel.runtime import workspace

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("sample_linear"))
# The kernels are those of sample, whose tests emulate them at length: here a few calls of each kind do.
ON_FAST_BACKENDS = pytest.mark.parametrize(
    ("backend", "device"), [pair for pair in of("sample_linear") if pair.values[0] not in EMULATED]
)
pytestmark = pytest.mark.usefixtures("poison")
H = 16


def exact(rows, vocab, device, dtype=torch.float32, seed=0):
    """Inputs whose product has no rounding, in whatever order it is summed: multiples of 1/8, up to 8."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-2, 3, (rows, H), generator=g) / 4
    weight = torch.randint(-4, 5, (vocab, H), generator=g) / 2
    seeds, positions = torch.arange(rows) * 2**40 - 3, torch.arange(rows) + 7
    inputs = {"hidden": hidden.to(dtype), "weight": weight.to(dtype), "seeds": seeds, "positions": positions}
    return {name: x.to(device) for name, x in inputs.items()}


def logits_of(inputs, **head):
    x = inputs["hidden"].float() @ inputs["weight"].float().T
    x = x.to(head.get("logits_dtype", torch.float32)).float()
    x = (x + head.get("bias", torch.zeros(())).float()) * head.get("logit_scale", 1.0)
    return head["softcap"] * torch.tanh(x / head["softcap"]) if "softcap" in head else x


def draw(backend, function, *arguments, **options):
    with running(backend):
        return function(*arguments, **options)


def assert_same(got, want):
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert_equal(name, a, b)


def rows_of(values, device):
    return torch.tensor(values, device=device)


ASKED = {
    "plain": lambda device: {"temperature": 0.7},
    "raw only": lambda device: {"return_logprobs": ("raw",), "return_entropy": True},
    "gumbel": lambda device: {"method": "gumbel"},
    "greedy among others": lambda device: {"temperature": rows_of([0.0, 0.9, 1.3], device)},
    "all greedy": lambda device: {"temperature": 0.0, "return_support": 2},
    "rank": lambda device: {"return_rank": True, "temperature": 1.5},
    "filtered": lambda device: {"top_k": 30, "top_p": 0.8, "return_support": 40},
    "some filtered": lambda device: {
        "top_k": rows_of([0, 20, 0], device),
        "min_p": rows_of([0.0, 0.0, 0.05], device),
        "temperature": rows_of([0.8, 0.0, 1.1], device),
        "return_support": 64,
        "return_entropy": True,
    },
    "thresholds": lambda device: {"epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "top_a": 0.1, "top_p": 0.9},
    "band": lambda device: {
        "typical_p": 0.8,
        "xtc_probability": 0.6,
        "xtc_threshold": 0.01,
        "return_support": 9,
    },
    "sigma, joint": lambda device: {"top_n_sigma": 1.5, "top_p": 0.9, "filter_order": "joint"},
    "top_logprobs": lambda device: {"top_logprobs": 5},
    "logit_bias": lambda device: {"logit_bias": {3: 2.0, 70: -torch.inf}},
    "penalties": lambda device: {
        "penalties": rlkernel.Penalties(torch.tensor([[1, 2], [3, -1], [5, 5]], device=device), frequency=0.5)
    },
    "bitmask": lambda device: {
        "token_bitmask": torch.full(
            (3, -(-(SPLIT + 104) // 32)), 0x55555555, dtype=torch.int32, device=device
        )
    },
}
HEADS = {
    "bf16 rounded": {"logits_dtype": torch.bfloat16},
    "bias, scale": {"logit_scale": 0.5, "bias": torch.arange(SPLIT + 104) % 7 - 3.0},
    "softcap, rounded": {"softcap": 4.0, "logits_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("asked", ASKED)
@ON_FAST_BACKENDS
def test_it_is_sample_of_the_logits(backend, device, asked):
    inputs, options = exact(3, SPLIT + 104, device), ASKED[asked](device)
    skip_unless_able(backend, "sample_linear", inputs["hidden"], inputs["weight"])
    key = {name: inputs[name] for name in ("seeds", "positions")}
    want = draw(backend, rlkernel.sample, logits_of(inputs), **key, **options)
    assert_same(draw(backend, rlkernel.sample_linear, **inputs, **options), want)
    assert rlkernel.last_backend("sample_linear") == backend


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.7}], ids=["whole", "filtered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head", HEADS)
@ON_FAST_BACKENDS
def test_what_stands_between_the_product_and_the_softmax(backend, device, head, dtype, filters):
    if is_slow(backend, device) and (dtype == torch.float32) == bool(filters):
        return  # half of the square says the same in half the time
    inputs = exact(3, SPLIT + 104, device, dtype)
    skip_unless_able(backend, "sample_linear", inputs["hidden"], inputs["weight"])
    options = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in HEADS[head].items()}
    key = {name: inputs[name] for name in ("seeds", "positions")}
    logits = logits_of(inputs, **options)
    if head == "bf16 rounded":  # as they lie in memory: a GPU's kernel takes powers of halves in another way
        logits = logits.bfloat16()
    want = draw(backend, rlkernel.sample, logits, **key, **filters)
    got = draw(backend, rlkernel.sample_linear, **inputs, **options, **filters)
    if head == "softcap, rounded":  # tanh of torch has its own last bits in place and in other shapes
        assert_equal("token_ids", got.token_ids, want.token_ids)
        torch.testing.assert_close(got.processed_logprobs, want.processed_logprobs, rtol=1e-6, atol=1e-6)
    else:
        assert_same(got, want)


@ON_EVERY_BACKEND
def test_tiles_change_no_bit(backend, device, monkeypatch):
    slow = is_slow(backend, device)
    vocab = SPLIT + 333 if slow else 8 * SPLIT - 333
    inputs = exact(3 if slow else 5, vocab, device, torch.bfloat16)
    skip_unless_able(backend, "sample_linear", inputs["hidden"], inputs["weight"])
    inputs["hidden"][1:3, 0] += 3  # rows whose largest logits lie in other tiles
    everything = {"return_entropy": True, "temperature": 0.9}
    key = {name: inputs[name] for name in ("seeds", "positions")}
    tilings = [(256, width, 2**28) for width in (1, 2, 4, 8)] + [(2, 1, 2**20), (2, 2, 2**20), (1, 8, 2**21)]
    for filters in ({}, {"top_p": 0.6, "return_rank": True, "return_support": 300}):
        want = draw(backend, rlkernel.sample, logits_of(inputs), **key, **everything, **filters)
        for rows, width, limit in [(256, 2, 2**28), (2, 1, 2**20)] if slow else tilings:
            for name in ("CPU_TILE", "GPU_TILE"):
                monkeypatch.setattr(sampling_driver, name, (rows, width * SPLIT))
            with workspace.limited(limit):
                assert_same(draw(backend, rlkernel.sample_linear, **inputs, **everything, **filters), want)


@pytest.mark.parametrize("limit", [2**20, 2**22, 2**28])
def test_a_plan_keeps_to_the_limit(limit):
    with workspace.limited(limit):
        for size, vocab, dtype in ((64, 5000, torch.float32), (4096, 151936, torch.bfloat16)):
            weight = torch.empty(vocab, size, dtype=dtype, device="meta")
            for head in _heads(dtype):
                plan = sampling_driver.plan(weight, head)
                assert plan.vocab % SPLIT == 0 and plan.rows >= 16 and plan.vocab >= SPLIT
                # 64 rows of a large weight, converted, may be as large as the smallest limit
                used = plan.rows * plan.vocab * 8 + plan.piece * size * 4
                assert used <= 2 * limit + 64 * size * 4


def _heads(dtype):
    from rlkernel.calls.linear_logprob import Head

    for logits_dtype in (torch.float32, torch.bfloat16):
        for softcap in (None, 3.0):
            yield Head(None, 1.0, 1.0, softcap, -100, logits_dtype, dtype)


class _Largest(TorchDispatchMode):
    """The largest tensor of floats that an operator makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and "empty" in str(function):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def test_logits_are_in_memory_only_where_a_row_may_be_filtered():
    inputs = make_inputs(64, H, 5 * SPLIT)
    with running("native"):
        skip_unless_able("native", "sample_linear", inputs["hidden"], inputs["weight"])

    def largest(limit=2**20, **options):
        with workspace.limited(limit), rlkernel.use_backend("native"), _Largest() as seen:
            rlkernel.sample_linear(**inputs, **options)
        return seen.bytes

    whole = 64 * 5 * SPLIT * 4
    for options in (
        {},
        {"top_p": 1.0, "top_k": 0},
        {"temperature": 0.0, "top_p": 0.5},
        {"return_entropy": True},
    ):
        assert largest(**options) <= 2**20, options
    for options in ({"top_p": 0.9}, {"return_rank": True}, {"top_logprobs": 2}, {"store_logits": True}):
        assert largest(**options) == whole, options
    assert largest(top_p=0.9, logits_dtype=torch.bfloat16) == whole // 2


@ON_FAST_BACKENDS
def test_it_matches_fp64(backend, device):
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 3e-6)):
        inputs = make_inputs(4, 96, SPLIT + 50, dtype=dtype, device=device)
        skip_unless_able(backend, "sample_linear", inputs["hidden"], inputs["weight"])
        got = draw(backend, rlkernel.sample_linear, **inputs, temperature=0.8, return_entropy=True)
        z = (inputs["hidden"].double() @ inputs["weight"].double().T) / 0.8
        logp = z.log_softmax(-1)
        want = logp.gather(-1, got.token_ids[:, None])[:, 0]
        torch.testing.assert_close(got.tempered_logprobs.double(), want, rtol=tolerance, atol=tolerance)
        entropy = -(logp.exp() * logp).sum(-1)
        torch.testing.assert_close(got.entropy.double(), entropy, rtol=tolerance, atol=tolerance)


@ON_FAST_BACKENDS
def test_the_trainers_twin_has_the_rollouts_logprobs(backend, device):
    inputs = exact(3, SPLIT + 104, device)
    skip_unless_able(backend, "sample_linear", inputs["hidden"], inputs["weight"])
    t = rows_of([0.7, 1.0, 1.3], device)
    out = draw(backend, rlkernel.sample_linear, **inputs, temperature=t, top_p=0.5, return_support=SPLIT)
    assert (out.support_offsets[1:] > out.support_offsets[:-1]).all() and not out.support_overflow.any()
    support = {"support_ids": out.support_ids, "support_offsets": out.support_offsets}
    head = inputs["hidden"], inputs["weight"], out.token_ids
    twin = draw(backend, rlkernel.linear_logprob, *head, temperature=t, **support)
    assert_equal("processed_logprobs", twin.logprobs, out.processed_logprobs)


@ON_FAST_BACKENDS
def test_rows_without_a_distribution_and_no_rows(backend, device):
    inputs = exact(3, 200, device)
    skip_unless_able(backend, "sample_linear", inputs["hidden"], inputs["weight"])
    clean = draw(backend, rlkernel.sample_linear, **inputs)
    inputs["hidden"][1, 3] = torch.nan
    for filters in ({}, {"top_k": 5}):
        got = draw(backend, rlkernel.sample_linear, **inputs, **filters)
        assert got.valid.tolist() == [True, False, True] and got.token_ids[1] == -1
        assert got.raw_logprobs[1].isnan()
    assert_equal("row 0", draw(backend, rlkernel.sample_linear, **inputs).token_ids[0], clean.token_ids[0])
    for filters in ({}, {"top_k": 5, "return_support": 3}):
        none = {name: x[:0] if name != "weight" else x for name, x in inputs.items()}
        assert draw(backend, rlkernel.sample_linear, **none, **filters).token_ids.shape == (0,)


def test_leading_dimensions_strides_and_autocast():
    inputs = exact(6, 300, "cpu")
    flat = rlkernel.sample_linear(**inputs, top_k=4, return_rank=True)
    wide = {name: x.view(2, 3, *x.shape[1:]) if name != "weight" else x for name, x in inputs.items()}
    wide["weight"] = inputs["weight"].T.contiguous().T
    shaped = rlkernel.sample_linear(**wide, top_k=4, return_rank=True)
    assert shaped.token_ids.shape == (2, 3)
    assert_equal("token_ids", shaped.token_ids.flatten(), flat.token_ids)
    assert_equal("logprobs", shaped.processed_logprobs.flatten(), flat.processed_logprobs)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = rlkernel.sample_linear(**inputs)
    assert_equal("autocast", rounded.tempered_logprobs, rlkernel.sample_linear(**inputs).tempered_logprobs)


def test_it_has_no_gradient_and_keeps_out():
    inputs = exact(3, 300, "cpu")
    inputs["hidden"].requires_grad_(), inputs["weight"].requires_grad_()
    first = rlkernel.sample_linear(**inputs)
    assert not first.raw_logprobs.requires_grad
    again = rlkernel.sample_linear(**inputs, out=first)
    assert again.token_ids is first.token_ids


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.8, "return_support": 9}, {"logit_bias": {1: 1.0}}], ids=str
)
def test_it_compiles_in_one_graph(options):
    inputs = exact(4, 300, "cpu")
    compiled = torch.compile(rlkernel.sample_linear, fullgraph=True, backend="aot_eager")
    for head in ({}, {"softcap": 3.0}):
        assert_same(
            compiled(**inputs, **options, **head), rlkernel.sample_linear(**inputs, **options, **head)
        )


WRONG = {
    "store": (
        {"store_logits": False, "top_p": 0.5, "return_rank": True},
        "store_logits must be True or 'auto' with a filter, return_rank, got False",
    ),
    "store name": ({"store_logits": "never"}, "store_logits must be True, False or 'auto', got 'never'"),
    "temperature": ({"temperature": -0.5}, "temperature must be 0 or from 1.18e-38 to 3.4e+38, got -0.5"),
    "top_logprobs": ({"top_logprobs": 41}, "top_logprobs must be an integer in [0, 40], got 41"),
    "softcap": ({"softcap": 0.0}, "softcap must be > 0 and finite, or None, got 0.0"),
    "softcap in words": ({"softcap": "30"}, "softcap must be a number, got str"),
    "dtype": ({"logits_dtype": torch.int8}, "logits_dtype must be float16, bfloat16 or float32, got "),
    "bias": ({"bias": torch.zeros(3)}, "bias must be [40], got (3,)"),
    "seeds": (
        {"seeds": torch.zeros(2, dtype=torch.int64)},
        "seeds must be one value or have shape (3,), got (2,)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
    options, message = WRONG[case]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        rlkernel.sample_linear(**{**exact(3, 40, "cpu"), **options})


def test_errors_of_the_tensors():
    inputs = exact(3, 40, "cpu")
    with pytest.raises(ValueError, match=r"weight must be \[V, 16\] with V >= 1, got \(40, 5\)"):
        rlkernel.sample_linear(inputs["hidden"], inputs["weight"][:, :5])
    with pytest.raises(ValueError, match="hidden must be a tensor, got list"):
        rlkernel.sample_linear([1.0], inputs["weight"])
