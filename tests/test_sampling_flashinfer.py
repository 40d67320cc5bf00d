"""``sampling`` over FlashInfer and AITER: what they are asked for, and when they are not.

Neither runs without its GPU.  Here stand-ins of their kernels keep tokens by the rule of those.  FlashInfer's
own Python calls them; AITER's signatures are compared with its source where it is installed.
"""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import types
from pathlib import Path

import flashinfer_library
import pytest
import torch
from flashinfer_library import last_kept, renormalized

import rlkernel
from rlkernel import dispatch
from rlkernel.benchmarks import sampling as benchmark
from rlkernel.calls.sampling import Sampling, SamplingCall
from rlkernel.drivers import sampling as library_sampling
from rlkernel.reference import sampling as reference

V = 40
PLAIN = Sampling(temperature=0.7, seeds=torch.arange(6), positions=torch.zeros(6, dtype=torch.int64))


# fmt: off
class Aiter:
    """``aiter.ops.sampling`` of amd-aiter 0.1.7."""

    def top_k_renorm_probs(probs, maybe_top_k_arr, top_k_val):
        return renormalized(probs, top_k_val if maybe_top_k_arr is None else maybe_top_k_arr)

    def top_k_top_p_sampling_from_probs(probs, indices, maybe_top_k_arr, top_k_val, maybe_top_p_arr,
                                        top_p_val, deterministic=False):
        assert probs.dtype == torch.float32 and probs.is_contiguous() and not probs.isnan().any()
        assert indices.tolist() == list(range(len(probs))) and indices.dtype == torch.int32
        torch.cuda.default_generators[0].seed()  # as its kernel's launcher does
        k = top_k_val if maybe_top_k_arr is None else maybe_top_k_arr
        return last_kept(probs, k, top_p_val if maybe_top_p_arr is None else maybe_top_p_arr)
# fmt: on


LIBRARIES = ("flashinfer", "aiter")
both = pytest.mark.parametrize("name", LIBRARIES)


@contextlib.contextmanager
def library(name, monkeypatch):
    """FlashInfer's own Python over stand-ins of its kernels; of AITER nothing but a stand-in."""
    if name == "aiter":
        yield Aiter
    else:
        with flashinfer_library.sampling(monkeypatch) as module:
            yield module


@pytest.fixture
def backend(name, monkeypatch):
    """The backend's module over the stand-in."""
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    with (
        library(name, monkeypatch) as found,
        flashinfer_library.over(monkeypatch, name, "sampling") as module,
    ):
        monkeypatch.setattr(library_sampling, "imported", lambda path: (found, ""))
        yield module


def on_gpu(monkeypatch, name):
    """What ``unsupported`` looks at, of logits on the library's GPU."""
    monkeypatch.setattr(torch.version, "hip", "7.0" if name == "aiter" else None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device = types.SimpleNamespace(type="cuda")
    return types.SimpleNamespace(device=device, dtype=torch.bfloat16, shape=(6, V))


def logits_of(rows=6):
    # no ties: at those the libraries keep more
    order = torch.argsort(torch.rand(rows, V, generator=torch.Generator().manual_seed(3)), -1)
    return order.float() / 9


ROWS = torch.arange(6)
FILTERS = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_k per row, some off": {"top_k": torch.tensor([1, 5, 0, -1, V, 999])},
    "top_p": {"top_p": 0.6},
    "top_p per row, some off": {"top_p": torch.tensor([0.1, 0.5, 0.9, 1.0, 0.99, 1.0])},
    "min_p": {"min_p": 0.2},
    "min_p per row, some off": {"min_p": torch.tensor([0.0, 0.1, 0.3, 0.5, 0.9, 1.0])},
    "sequential": {"top_k": 8, "top_p": 0.8},
    "joint": {"top_k": 8, "top_p": 0.8, "order": "joint"},
    "joint per row": {
        "top_k": torch.tensor([3, 8, 0, 20, 30, 8]),
        "top_p": torch.tensor([0.9, 0.8, 0.7, 1.0, 0.6, 0.5]),
        "order": "joint",
    },
}


@both
@pytest.mark.parametrize("filters", FILTERS)
def test_it_keeps_what_the_reference_keeps(name, filters, backend, monkeypatch):
    request = PLAIN._replace(**FILTERS[filters])
    if reasons := backend.unsupported(on_gpu(monkeypatch, name), sampling=request):
        assert name == "aiter" and reasons == ["aiter has no min_p"]
        return
    logits = logits_of()
    support = reference.forward(SamplingCall(logits, None, request._replace(support=V))).support
    everything = support[:, 0] < 0  # of a whole row
    kept = torch.zeros(6, V + 1, dtype=torch.bool).scatter_(
        1, torch.where(support < 0, V, support).long(), True
    )
    want = torch.where(kept[:, :V] | everything[:, None], logits, torch.inf).argmin(-1)
    got = backend.forward(SamplingCall(logits, None, request))
    assert got.token_ids.dtype == torch.int64 and got.token_ids.tolist() == want.tolist()
    assert got.valid.all() and got.tempered_logprobs is None and got.kept_count is None


@both
def test_the_two_orders_differ_here(name, backend):
    logits = logits_of()
    request = PLAIN._replace(top_k=8, top_p=0.8)
    one, other = (
        backend.forward(SamplingCall(logits, None, request._replace(order=order))).token_ids
        for order in ("sequential", "joint")
    )
    assert (one != other).any()


@pytest.mark.parametrize("name", ["flashinfer"])
def test_a_few_tokens_of_a_large_vocabulary(name, backend):
    """From 65,536 on FlashInfer 0.7 draws among the ``top_k`` alone: of equal ones some, not all."""
    order = torch.argsort(torch.rand(2, 70000, generator=torch.Generator().manual_seed(5)), -1)
    logits = order.float() / 9000
    two = torch.arange(2)
    request = PLAIN._replace(seeds=two, positions=two, top_k=9, top_p=0.7)
    support = reference.forward(SamplingCall(logits, None, request._replace(support=9))).support[0]
    kept = support[support >= 0].long()
    assert 2 <= len(kept) < 9
    got = backend.forward(SamplingCall(logits, None, request))
    assert got.valid.all() and got.token_ids[0] == kept[logits[0, kept].argmin()]
    logits[1] = -torch.inf
    logits[1, [7, 70, 700, 7000]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    few = backend.forward(SamplingCall(logits, None, request._replace(top_k=2, top_p=0.99)))
    assert few.valid.all() and few.token_ids[1] in (70, 700, 7000)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_the_benchmark_calls_what_is_there(options, monkeypatch):
    """As FlashInfer's own Python has it; its softmax wants a GPU."""
    real, calls = flashinfer_library.python().sampling, []

    class Recorded:
        def __getattr__(self, name):
            def call(*args):
                given = inspect.signature(getattr(real, name)).bind(*args).arguments
                calls.append((name, {k: v for k, v in given.items() if not isinstance(v, torch.Tensor)}))
                return next(v for v in given.values() if isinstance(v, torch.Tensor))

            return call

    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 0)

    monkeypatch.setattr(benchmark._peers, "module", lambda name: Recorded())
    case = benchmark.Case({"B": 2, "V": V}, options={"temperature": 0.8} | options)
    benchmark._flashinfer()({"logits": torch.zeros(2, V).as_subclass(OnGpu)}, case)
    *first, (name, given) = calls
    assert given == options and name.endswith("_from_logits") == (len(options) != 1)
    assert first == ([("softmax", {"temperature": 0.8})] if len(options) == 1 else [])


@both
def test_rows_without_a_distribution(name, backend):
    logits = logits_of()
    logits[0, 7], logits[2, 0], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, 1:] = -torch.inf
    got = backend.forward(SamplingCall(logits, None, PLAIN._replace(top_k=3)))
    assert got.valid.tolist() == [False, True, False, False, True, True]
    assert got.token_ids[~got.valid].tolist() == [-1, -1, -1] and got.token_ids[4] == 0


BAD = {
    "top_k": torch.tensor([5, -2, -(2**40), 0, -1, 8]),
    "top_p": torch.tensor([0.5, torch.nan, 0.0, -0.5, 1.5, 1.0]),
    "min_p": torch.tensor([0.5, torch.nan, -0.5, 1.5, torch.inf, 0.0]),
}


@both
@pytest.mark.parametrize("argument", BAD)
def test_rows_of_parameters_that_nobody_looked_at(name, argument, backend, monkeypatch):
    """They are not valid and reach no kernel; what the reference says of the rows is said here."""
    request = PLAIN._replace(**{argument: BAD[argument]})
    if backend.unsupported(on_gpu(monkeypatch, name), sampling=request):
        assert (name, argument) == ("aiter", "min_p")
        return
    logits = logits_of()
    got, want = (run.forward(SamplingCall(logits, None, request)) for run in (backend, reference))
    assert torch.equal(got.valid, want.valid) and 0 < got.valid.sum() < 6
    assert (got.token_ids[~got.valid] == -1).all()
    for bound in (library_sampling.top_p, library_sampling.min_p):
        passed = bound(BAD[argument].float())
        assert not passed.isnan().any() and (passed >= 0).all()


@both
def test_adjusted_logits_count_and_a_temperature_does_not_overflow(name, backend):
    logits = logits_of()
    top = backend.forward(SamplingCall(logits, -logits, PLAIN._replace(top_k=1, temperature=1e-38)))
    assert top.token_ids.tolist() == logits.argmin(-1).tolist() and top.valid.all()


@both
def test_no_rows(name, backend):
    got = backend.forward(SamplingCall(torch.empty(0, V), None, PLAIN))
    assert got.token_ids.shape == got.valid.shape == (0,)


@pytest.mark.parametrize("name", ["aiter"])
def test_aiter_leaves_torchs_generator_as_it_was(name, backend):
    before = torch.cuda.default_generators[0].manual_seed(5).get_state()
    backend.forward(SamplingCall(logits_of(), None, PLAIN))
    assert torch.equal(torch.cuda.default_generators[0].get_state(), before)


REFUSED = {
    "seeds": ({}, {"needs": frozenset({"seeds"})}, "returns token ids only, asked for seeds"),
    "logprobs": ({}, {"needs": frozenset({"logprobs"})}, "returns token ids only, asked for logprobs"),
    "support": ({}, {"needs": frozenset({"support"})}, "asked for support"),
    "gumbel": ({"gumbel": True}, {}, "asked for method 'gumbel'"),
    "greedy": ({"temperature": 0.0}, {}, "no rows at temperature 0"),
    "maybe greedy": ({"temperature": torch.ones(6)}, {}, "no rows at temperature 0"),
    "top_n_sigma": ({"top_n_sigma": 1.0}, {}, "has no top_n_sigma"),
    "thresholds": ({"thresholds": torch.ones(6, 3)}, {}, "has no thresholds"),
    "band": ({"band": torch.ones(6, 2)}, {}, "has no typical_p and no XTC"),
    "forced": ({"token_ids": ROWS}, {}, "has no token_ids"),
    "bitmask": ({"token_bitmask": torch.zeros(6, 2, dtype=torch.int32)}, {}, "has no token_bitmask"),
    "skip": ({"skip": ROWS > 3}, {}, "has no skip"),
    "min_p and top_p": ({"min_p": 0.1, "top_p": 0.9}, {}, "min_p"),
}


@both
@pytest.mark.parametrize("case", REFUSED)
def test_it_says_why_not(name, case, backend, monkeypatch):
    changes, options, reason = REFUSED[case]
    logits = on_gpu(monkeypatch, name)
    assert backend.unsupported(logits, sampling=PLAIN) == [] == backend.unsupported(logits)
    reasons = backend.unsupported(logits, sampling=PLAIN._replace(**changes), **options)
    assert len(reasons) == 1 and reason in reasons[0] and name in reasons[0]


@both
def test_it_says_which_tensors_it_takes(name, backend, monkeypatch):
    logits = on_gpu(monkeypatch, name)
    logits.dtype = torch.float64
    assert backend.unsupported(logits) == ["logits must be float32, float16 or bfloat16, got torch.float64"]
    vendor = "an AMD" if name == "aiter" else "an NVIDIA"
    assert backend.unsupported(torch.zeros(2, V)) == [f"logits must be on {vendor} GPU, got cpu"]


@both
def test_a_package_that_does_not_import_is_a_reason(name, backend, monkeypatch):
    why = f"{name} does not import here: no such tool"
    monkeypatch.setattr(library_sampling, "imported", lambda path: (None, why))
    reasons = backend.unsupported(on_gpu(monkeypatch, name), sampling=PLAIN)
    assert reasons == [f"{name} does not import here: no such tool"]


@both
def test_a_package_that_is_absent_is_a_reason(name):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    reasons = rlkernel.explain("sampling", torch.zeros(2, V))
    assert reasons[name] == [f"{name} is not installed"] and not dispatch.has(name, "sampling")


def test_the_stand_in_of_aiter_has_the_signatures_of_the_package():
    package = importlib.util.find_spec("aiter")
    if package is None or not package.submodule_search_locations:
        pytest.skip("aiter is not installed")
    file = Path(package.submodule_search_locations[0], "ops/sampling.py")
    real = {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
    for function, mine in vars(Aiter).items():
        if not function.startswith("_"):
            names = [x.arg for x in real[function].args.args]
            defaults = [ast.literal_eval(x) for x in real[function].args.defaults]
            parameters = inspect.signature(mine).parameters.values()
            assert [p.name for p in parameters] == names, function
            assert [p.default for p in parameters if p.default is not p.empty] == defaults, function


def test_bounds_that_are_off():
    assert library_sampling.top_k(0, 9) == library_sampling.top_k(9, 9) == 9 != library_sampling.top_k(8, 9)
    assert library_sampling.top_p(1.0) > 1 and library_sampling.top_p(0.5) == 0.5
