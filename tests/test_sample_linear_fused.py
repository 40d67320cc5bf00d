"""sample_linear(algorithm="fused"): the tokens and log-probabilities of ``sample`` of the same logits, by the
same random stream, and a row's bits in any batch."""

import re

import pytest
import torch
from backends import needs_interpreter, of
from bitwise import assert_equal
from test_sample_linear import exact, logits_of

import rlkernel
from rlkernel.calls.sampling import SPLIT
from rlkernel.reference.sample_linear import make_inputs

pytest.importorskip("triton", reason="Triton is not installed")
from rlkernel.triton_ops import _tiles  # noqa: E402
from rlkernel.triton_ops import sample_linear_fused as fused  # noqa: E402
from rlkernel.triton_ops import sample_linear_kernels as kernels  # noqa: E402

ON_TRITON = pytest.mark.parametrize(
    ("backend", "device"), [pair for pair in of("sample_linear") if "triton" in str(pair)]
)
pytestmark = pytest.mark.usefixtures("poison")
FIELDS = ("raw_logprobs", "tempered_logprobs", "processed_logprobs", "kept_mass", "entropy")


@pytest.fixture(params=[0, 9], ids=["pointers", "descriptors"])
def loading(request, monkeypatch, device):
    """How tiles are loaded; a GPU has a way of its own."""
    if device == "cuda" and request.param:
        pytest.skip("the GPU decides how tiles are loaded")
    if request.param:
        monkeypatch.setattr(_tiles, "generation", lambda: request.param)
    return request.param


def draw(backend, function, *arguments, **options):
    with rlkernel.use_backend(backend):
        return function(*arguments, **options)


def fused_and_not(backend, inputs, head=None, **options):
    head = head or {}
    key = {name: inputs[name] for name in ("seeds", "positions")}
    got = draw(backend, rlkernel.sample_linear, **inputs, **head, **options, algorithm="fused")
    return got, draw(backend, rlkernel.sample, logits_of(inputs, **head), **key, **options)


def assert_same_draw(got, want):
    """The same tokens; sums in another order, hence other last bits."""
    for name in ("token_ids", "valid", "kept_count", "support_ids", "support_offsets"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert_equal(name, a, b)
    for name in FIELDS:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)


ASKED = {
    "plain": {},
    "gumbel": {"method": "gumbel"},
    "greedy among others": {"temperature": [0.0, 0.7, 1.0, 1.3, 0.0], "return_support": 2},
    "gumbel, greedy, tempered": {"method": "gumbel", "temperature": [0.0, 0.7, 1.0, 1.3, 2.0]},
    "all greedy": {"temperature": 0.0, "greedy_logprobs": "softmax"},
    "hot": {"temperature": 3.0, "return_logprobs": ("processed",)},
}


@pytest.mark.parametrize("asked", ASKED)
@ON_TRITON
def test_it_draws_the_tokens_of_sample(backend, device, asked):
    options = dict(ASKED[asked], return_entropy=True)
    if isinstance(options.get("temperature"), list):
        options["temperature"] = torch.tensor(options["temperature"], device=device)
    inputs = exact(5, 300, device, torch.bfloat16)
    assert_same_draw(*fused_and_not(backend, inputs, **options))


@pytest.mark.parametrize("method", ["grouped", "gumbel"])
@ON_TRITON
def test_it_draws_them_by_descriptors_and_over_several_records(backend, device, method, loading):
    inputs = exact(2, SPLIT + 100 if loading and method == "grouped" else 200, device, torch.bfloat16)
    assert_same_draw(*fused_and_not(backend, inputs, method=method, temperature=0.8))


HEADS = {
    "bias, scale": {"logit_scale": -0.5, "bias": torch.arange(300) % 7 - 3.0},
    "softcap, rounded": {"softcap": 4.0, "logits_dtype": torch.float16},
    "a bias that forbids": {"bias": torch.where(torch.arange(300) % 3 == 1, 0.0, -torch.inf)},
    "a bias with gaps": {"bias": (torch.arange(600) % 11 - 5.0)[::2]},
}


@pytest.mark.parametrize("head", HEADS)
@ON_TRITON
def test_what_stands_between_the_product_and_the_draw(backend, device, head):
    inputs = exact(3, 300, device, torch.float16)
    head = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in HEADS[head].items()}
    got, want = fused_and_not(backend, inputs, head, temperature=0.9, return_entropy=True)
    assert_same_draw(got, want)


@ON_TRITON
def test_it_has_the_published_distribution_and_fp64s_logprobs(backend, device):
    """Of one row many times: the tokens of the reference and fp64 logits, but where two nearly tie."""
    inputs = make_inputs(1, 40, 250, dtype=torch.bfloat16, device=device)
    seeds = torch.arange(48, device=device) * 7919
    rows = {"hidden": inputs["hidden"].expand(48, -1).contiguous(), "weight": inputs["weight"]}
    got = draw(backend, rlkernel.sample_linear, **rows, seeds=seeds, temperature=0.8, algorithm="fused")
    logits = rows["hidden"].double() @ rows["weight"].double().T
    want = draw("reference", rlkernel.sample, logits, seeds=seeds, temperature=0.8)
    assert (got.token_ids == want.token_ids).float().mean() > 0.95
    logp = (logits / 0.8).log_softmax(-1).gather(-1, got.token_ids[:, None])[:, 0]
    torch.testing.assert_close(got.tempered_logprobs.double(), logp, rtol=3e-6, atol=3e-6)


@ON_TRITON
def test_a_row_has_the_same_bits_in_any_batch_and_workspace(backend, device, loading, monkeypatch):
    rows = 5 if loading else 131  # of two blocks
    inputs = make_inputs(rows, 72, 130, dtype=torch.bfloat16, device=device)
    options = {"temperature": 0.7, "return_entropy": True, "algorithm": "fused"}
    whole = draw(backend, rlkernel.sample_linear, **inputs, **options)
    spread = torch.empty(rows, 73, dtype=torch.bfloat16, device=device)[:, :72].copy_(inputs["hidden"])
    mixed = torch.tensor([rows - 1, 3, 0, 2, 3], device=device)
    monkeypatch.setattr(fused, "_rows", lambda *_: 2)  # what a workspace cuts
    for picked, hidden in ((slice(rows - 1, rows), inputs["hidden"]), (mixed, spread)):
        part = {name: inputs[name][picked] for name in ("seeds", "positions")}
        again = draw(backend, rlkernel.sample_linear, hidden[picked], inputs["weight"], **part, **options)
        for name in ("token_ids", *FIELDS):
            assert_equal(name, getattr(again, name), getattr(whole, name)[picked])


@ON_TRITON
def test_edges(backend, device):
    inputs = exact(3, 200, device, torch.bfloat16)
    clean = draw(backend, rlkernel.sample_linear, **inputs, algorithm="fused")
    inputs["hidden"][1, 3] = torch.nan
    got = draw(backend, rlkernel.sample_linear, **inputs, algorithm="fused")
    assert got.valid.tolist() == [True, False, True] and got.token_ids[1] == -1
    assert got.raw_logprobs[1].isnan()
    assert_equal("row 0", got.raw_logprobs[0], clean.raw_logprobs[0])
    none = {name: x[:0] if name != "weight" else x for name, x in inputs.items()}
    assert draw(backend, rlkernel.sample_linear, **none, algorithm="fused").token_ids.shape == (0,)
    one = inputs | {"weight": inputs["weight"][:1]}
    assert draw(backend, rlkernel.sample_linear, **one, algorithm="fused").token_ids.tolist() == [0, -1, 0]


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"top_p": 0.5, "return_rank": True}, "a filter, return_rank"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"store_logits": True}, "store_logits=True"),
    ],
    ids=str,
)
def test_what_needs_logits_is_refused(options, given):
    message = f"algorithm must be 'auto' or 'tiled' with {given}, got 'fused'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        rlkernel.sample_linear(**exact(3, 40, "cpu", torch.bfloat16), **options, algorithm="fused")


def test_what_cannot_run_says_why():
    inputs = exact(3, 40, "cpu", torch.bfloat16)
    for backend in ("reference", "native"):
        refused = pytest.raises(
            NotImplementedError, match=f"{backend}: .*algorithm 'fused' is a Triton kernel"
        )
        with refused:
            draw(backend, rlkernel.sample_linear, **inputs, algorithm="fused")
    with pytest.raises(NotImplementedError, match="triton: .*algorithm 'fused' needs float16 or bfloat16"):
        draw("triton", rlkernel.sample_linear, **exact(3, 40, "cpu"), algorithm="fused")


@needs_interpreter
def test_noise_of_a_tiles_own_is_seen(monkeypatch):
    """Keyed by the place of a group in its tile, not by its tokens."""
    inputs = exact(5, 300, "cpu", torch.bfloat16)
    inputs["hidden"][:] = 0  # all tokens are as likely
    assert_same_draw(*fused_and_not("triton", inputs))
    own = kernels.group_noise
    monkeypatch.setattr(
        kernels, "group_noise", lambda seed, position, groups: own(seed, position, groups % 2)
    )
    got, want = fused_and_not("triton", inputs)
    assert not torch.equal(got.token_ids, want.token_ids)
