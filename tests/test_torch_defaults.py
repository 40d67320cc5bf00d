"""A default device or dtype of torch, which programs set while a model loads, changes no bit of a result."""

import contextlib

import pytest
import torch
from backends import INTERPRETED, LIBRARIES
from bitwise import assert_equal

import rlkernel
from rlkernel import dispatch, routing_replay
from rlkernel.bench import cases, parity
from rlkernel.consistency import vendor
from rlkernel.consistency.fingerprints import Room, fingerprint
from rlkernel.drivers import prefix_shared_attention
from rlkernel.integrations.hf import invariant as invariant_calls
from rlkernel.integrations.sglang import given_ids
from rlkernel.integrations.trl import order
from rlkernel.integrations.vllm import rollout
from rlkernel.prefix.layout import PrefixLayout

DEFAULTS = {"meta": ("meta", torch.float32), "bf16": ("cpu", torch.bfloat16), "fp64": ("cpu", torch.float64)}
MODULES = cases.modules()
CALLS = [
    pytest.param(op, backend, id=f"{op}-{backend}")
    for op in MODULES
    for backend in dispatch.BACKENDS
    if dispatch.has(backend, op) and backend not in LIBRARIES and (backend != "triton" or INTERPRETED)
]


@contextlib.contextmanager
def default(name):
    device, dtype = DEFAULTS[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def check_same(name, got, want):
    """Of tensors and what holds them, to the bit; everything else by ``==``."""
    if isinstance(want, torch.Tensor):
        assert got.device == want.device, f"{name} must be on {want.device}, got {got.device}"
        assert_equal(name, got, want)
    elif isinstance(want, dict):
        check_same(name, list(got.values()), list(want.values()))
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            check_same(f"{name}[{i}]", one, other)
    else:
        assert got == want, name


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("op, backend", CALLS)
def test_an_op_has_the_same_bits(op, backend, name):
    module = MODULES[op]
    case = module.PRESETS["tiny"][0]
    dtype = "bfloat16" if backend == "triton" else case.dtype
    case = case.replace(op=op, dtype=dtype, gradients=case.gradients or module.GRADIENTS)
    inputs = parity.make_inputs(module, case, "cpu")
    grads, call = parity.upstream(module, case, inputs), parity.ours(module, op, backend)

    def run():
        copies = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}
        return parity.outcome(call, copies, case, grads)

    with default(name):  # first: what is kept of it serves the other call, too
        got = run()
    check_same(op, got, run())


X = torch.randn(12, 40, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[1, 2, 0, 1, 2], [3, 3, 3, 1, 3]])


def routes():
    one = routing_replay.from_vllm([[[0, 1]], [[2, 3]], [[1, 0]]], 4, tokens=4)
    packed, offsets = routing_replay.pack([one, one])
    parts = packed, *packed.split([3, 5]), routing_replay.pad([one, one[:2]])
    return [[r.experts, r.known] for r in parts], offsets


def stored(path):
    routing_replay.save(path, [routing_replay.from_vllm([[[0, 1]], [[2, 3]]], 4)] * 2)
    return [[r.experts, r.known] for r in routing_replay.load(path)]


def layout():
    return PrefixLayout((8, 5, 3), (-1, 0, 0), (False, True, True))


def repeated():
    penalties = rlkernel.Penalties(IDS, dry=rlkernel.Dry(multiplier=0.7, base=1.3))
    return list(rlkernel.sample(X[:2], temperature=0.7, seeds=3, penalties=penalties))


def invariant():
    q = X[:, :32].view(1, 2, 6, 32)
    mask = torch.ones((6, 6), dtype=torch.bool, device="cpu").tril()
    with rlkernel.batch_invariant():
        return [
            torch.softmax(X, -1), X @ X.T, X.mean(-1), X.norm(dim=-1), torch.log_softmax(X, -1),
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True),
            torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask),
        ]  # fmt: skip


def compared():
    report = rlkernel.consistency.compare(X, X + 0.125, mask=torch.ones_like(X, dtype=torch.bool))
    return str(report)


def searched():
    rlkernel.consistency.assert_invariant(lambda x: x * 2, (X,), rows=4)
    return list(vendor._telling(X, X.T, 1)), list(fingerprint(X, Room(100)))[:1]


def doors():
    """What adapters make on the host, of those that load without their framework."""
    first, last = torch.zeros(6, dtype=torch.int32, device="cpu"), torch.tensor([0, 1, 2] * 2, device="cpu")
    rows = invariant_calls._rows.__wrapped__(
        invariant_calls._bytes(first), invariant_calls._bytes(last), None, 3, 3, 0
    )
    kept = [[[1, 2], [3]], [[4]]]  # of each token of two samples
    return [
        order.by_groups(torch.tensor([2, 0, 3, 1], device="cpu"), IDS[:1].T[:4]),
        list(rollout.support_of(kept)),
        given_ids.table([[1, 2], None, [3]], torch.device("cpu")),
        list(rows),
    ]


HELPERS = {
    "doors": doors,
    "routes": routes,
    "repetitions": repeated,
    "batch_invariant": invariant,
    "compare": compared,
    "searches": searched,
    "seeds": lambda: rlkernel.split_seeds(7, 4),
    "a bias by a number": lambda: list(rlkernel.sample(X, temperature=0.9, seeds=1, logit_bias={3: 0.3})),
    "plan": lambda: list(prefix_shared_attention.cascade(layout()))[:4],
}


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("helper", HELPERS)
def test_what_is_made_on_the_host_is_the_same(helper, name):
    with default(name):
        got = HELPERS[helper]()
    check_same(helper, got, HELPERS[helper]())


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_file_of_routes_is_the_same(name, tmp_path):
    with default(name):
        got = stored(tmp_path / "a")
    check_same("routes", got, stored(tmp_path / "b"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
