"""linear_logprob: which products it does, which logits it keeps from forward, and what memory it takes."""

import types

import linear_logprob_cases
import pytest
import torch
from backends import of, running
from bitwise import assert_equal
from linear_logprob_cases import DTYPES, NAMES, Flops, able, check_against_fp64, run
from logprob_cases import upstream_like
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel.calls.linear_logprob import Head
from rlkernel.drivers import linear_logprob as driver
from rlkernel.drivers import linear_products
from rlkernel.drivers.linear_products import Tile
from rlkernel.reference.linear_logprob import make_inputs
from rlkernel.runtime import workspace

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("linear_logprob"))
pytestmark = pytest.mark.usefixtures("poison")
small_tiles = linear_logprob_cases.small_tiles


@ON_EVERY_BACKEND
def test_gemms_are_not_done_for_nothing(backend, device, small_tiles, monkeypatch):
    """4 GEMMs, 3 without one gradient, 2 with a frozen head, and only the rows that matter; one less when the
    workspace has kept all logits."""
    if backend == "reference":
        pytest.skip("the reference says what the op means, not how to compute it")
    n, h, v = 24, 16, 96
    inputs = make_inputs(n, h, v, device=device, ignored=0)
    able(backend, inputs)
    unit = 2 * n * h * v

    def flops(needs, live_rows=n, ignored_rows=0, **options):
        upstream = torch.zeros(n)
        upstream[:live_rows] = 1
        changed = dict(inputs, target_ids=inputs["target_ids"].clone())
        changed["target_ids"][n - ignored_rows :] = -100
        with Flops() as counter:
            run(backend, changed, [upstream.to(device), None, None], needs, **options)
        return counter.total / unit

    assert flops((True, True, False)) == 4 - 2 * (8 * 48) / (n * v)  # two tiles were kept
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: tiles)
    assert flops((True, True, False)) == 3
    assert flops((False, True, False)) == 2
    assert flops((True, True, False), live_rows=n // 2) == 1 + 3 / 2  # other rows than those kept
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: 0)
    assert flops((True, True, False)) == 4
    assert flops((False, True, False)) == 3
    assert flops((True, False, False)) == 2
    assert flops((True, True, False), live_rows=n // 2) == 1 + 3 / 2
    assert flops((True, True, False), live_rows=n // 2, ignored_rows=n // 2) == 2
    assert flops((True, True, False), live_rows=0) == 1


@DTYPES
@ON_EVERY_BACKEND
def test_kept_logits_change_no_bit(backend, device, dtype, small_tiles, monkeypatch):
    """Whether all, some or none of the logits outlive forward, and whoever takes the workspace meanwhile."""
    inputs = make_inputs(19, 32, 133, dtype=dtype, device=device, ignored=0.2)
    other = make_inputs(19, 32, 133, dtype=dtype, device=device, seed=5)
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])

    def gradients(between=lambda: None, backwards=1):
        leaves = [inputs[n].clone().requires_grad_() for n in NAMES[:2]]
        with running(backend):
            out = rlkernel.linear_logprob(*leaves, inputs["target_ids"], return_entropy=True)
            between()
            loss = sum((o * g).sum() for o, g in zip(out, upstream, strict=True))
            for _ in range(backwards):
                grads = torch.autograd.grad(loss, leaves, retain_graph=True)
        return grads

    def score():
        with torch.no_grad():
            rlkernel.linear_logprob(**other)

    def train():
        run(backend, other, upstream_like(other["target_ids"]), (True, True, False), return_entropy=True)

    some = gradients()
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: 0)
    none = gradients()
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: tiles)
    cases = {"some": some, "all": gradients(), "after a backward": gradients(backwards=2)}
    cases |= {"after scoring": gradients(score), "after training": gradients(train)}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        cases["saved elsewhere"] = gradients(score)
    for name, grads in cases.items():
        for leaf, a, b in zip(NAMES, grads, none, strict=False):
            assert_equal(f"{leaf} {name}", a, b)


def test_workspace_is_all_the_memory_there_is(monkeypatch):
    """What forward and backward make, beside gradients and per-row numbers, lies in the workspace."""
    monkeypatch.setattr(linear_products, "CPU_TILE", Tile(64, 128))
    n, h, v = 512, 32, 1000
    inputs = make_inputs(n, h, v, ignored=0)
    able("native", inputs)

    class Storages(TorchDispatchMode):
        seen: dict[int, int] = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor):
                    self.seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return out

    hidden, weight = (inputs[k].clone().requires_grad_() for k in ("hidden", "weight"))
    with rlkernel.use_backend("native"):
        rlkernel.linear_logprob(
            hidden, weight, inputs["target_ids"]
        ).logprobs.sum().backward()  # takes the workspace
        buffers = {b.memory.untyped_storage().data_ptr() for b in workspace._buffers.values()}
        with Storages() as storages:
            out = rlkernel.linear_logprob(hidden, weight, inputs["target_ids"], return_entropy=True)
            out.logprobs.sum().backward()
    assert buffers == {b.memory.untyped_storage().data_ptr() for b in workspace._buffers.values()}
    known = buffers | {x.untyped_storage().data_ptr() for x in (hidden, weight)}
    sizes = {size for address, size in storages.seen.items() if address not in known and size > 4 * 4 * n}
    assert sizes == {4 * n * h, 4 * v * h}, f"made tensors of {sorted(sizes)} bytes beside the two gradients"


def test_workspace_does_not_depend_on_the_number_of_tokens():
    """It grows to the limit, where logits are kept, and never beyond."""
    sizes = []
    with workspace.limited(2**21):
        for n in (4000, 16000):
            workspace.release()
            inputs = make_inputs(n, 8, 300, ignored=0)
            able("native", inputs)
            run("native", inputs, [torch.ones(n), None, None], (True, True, False))
            sizes.append(sum(b.memory.numel() for b in workspace._buffers.values()))
    assert sizes[0] == sizes[1] <= 2**21


@ON_EVERY_BACKEND
def test_backward_in_larger_tiles_than_forward(backend, device, small_tiles, monkeypatch):
    """As a GPU has it where the logits are not there any more."""
    inputs = make_inputs(19, 16, 133, device=device, ignored=0.2)
    able(backend, inputs)
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: 0)
    monkeypatch.setattr(driver, "backward_plan", lambda *_: Tile(64, 40))
    check_against_fp64(backend, inputs, upstream_like(inputs["target_ids"]), return_entropy=True)


def test_backward_on_a_gpu_takes_all_rows_that_leave_a_wide_slice():
    head = Head(None, 1.0, 1.0, None, -100, torch.float32, torch.bfloat16)

    def plan(n, limit, device="cuda"):
        weight = types.SimpleNamespace(
            device=torch.device(device), shape=(151936, 4096), dtype=torch.bfloat16
        )
        with workspace.limited(limit):
            return linear_products.tile_plan(weight, head), linear_products.backward_plan(weight, head, n)

    forward, backward = plan(8192, workspace.GPU_LIMIT)
    assert forward == Tile(1536, 16896) and backward == Tile(8192, 16896)
    assert plan(8000, workspace.GPU_LIMIT)[1] == Tile(8192, 16896)
    assert plan(1500, workspace.GPU_LIMIT)[1] == forward
    for n in (20_000, 30_000, 10**6):
        _, (tokens, wide) = plan(n, workspace.GPU_LIMIT)
        sums = 0 if tokens >= n else 4 * 4096 * wide
        assert tokens >= forward.tokens and tokens * (6 * wide + 6 * 4096) + sums <= workspace.GPU_LIMIT, n
    forward, backward = plan(8192, workspace.DEFAULT_LIMIT, "cpu")
    assert forward == backward


def test_rocm_is_asked_whether_its_library_writes_fp32(monkeypatch):
    """Here the library of a CPU stands for it, which does not, and then a stand-in that does."""
    asked = linear_products.writes_fp32.__wrapped__
    assert asked(torch.bfloat16, torch.device("cpu")), "CUDA is not asked"
    monkeypatch.setattr(torch.version, "hip", "7")
    assert not asked(torch.bfloat16, torch.device("cpu"))
    for product in (torch.ops.aten.mm, torch.ops.aten.addmm):
        monkeypatch.setattr(product, "dtype_out", lambda *arguments, out: out)
    assert asked(torch.bfloat16, torch.device("cpu"))
