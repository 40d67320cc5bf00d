"""rlkernel.bench: every op has a benchmark, what it measures is right, and peers compute the same."""

import importlib
import math
import subprocess
import sys

import pytest
import torch

from rlkernel import dispatch
from rlkernel.bench import cases, cli, measure, memory, parity, render, report, run
from rlkernel.bench.cases import Case
from rlkernel.bench.progress import Progress
from rlkernel.runtime import workspace


def test_every_op_has_a_complete_benchmark():
    modules = cases.modules()
    assert list(modules) == dispatch.ops()
    names = [
        "DIMS",
        "INPUTS",
        "OPTIONS",
        "SHARED",
        "GRADIENTS",
        "OUTPUTS",
        "row_elements",
        "bytes_moved",
        "flops",
        "gemm",
    ]
    for op, module in modules.items():
        assert not [name for name in [*names, "QUICK", "PRESETS", "PEERS"] if not hasattr(module, name)]
        assert module.PEERS[0].name == "torch", f"{op}: plain PyTorch is the yardstick"
        assert "tiny" in module.PRESETS, f"{op}: Triton's interpreter needs a tiny case"


@pytest.mark.parametrize("op", dispatch.ops())
def test_bytes_and_flops_grow_with_the_rows(op):
    module = cases.modules([op])[op]
    case = module.PRESETS["tiny"][0].replace(op=op, gradients=module.GRADIENTS)
    forward, both = module.bytes_moved(case, False), module.bytes_moved(case, True)
    assert 0 < forward < both if module.GRADIENTS else 0 < forward == both
    assert module.flops(case, False) <= module.flops(case, True)


def test_linear_logprob_counts_the_least_three_gemms_or_two_with_a_frozen_head():
    """What one may compute again is not of the floor: an implementation with room for it does not."""
    module = cases.modules(["linear_logprob"])["linear_logprob"]
    case = Case({"N": 2, "H": 3, "V": 5}, gradients=("hidden", "weight"))
    assert module.flops(case, False) == 2 * 2 * 3 * 5
    assert module.flops(case, True) == 3 * module.flops(case, False)
    assert module.flops(case.replace(gradients=("hidden",)), True) == 2 * module.flops(case, False)


def test_linear_divergence_counts_a_product_of_each_model_and_two_for_gradients():
    module = cases.modules(["linear_divergence"])["linear_divergence"]
    case = Case({"N": 2, "H": 3, "V": 5}, gradients=("hidden", "weight"))
    wide, frozen = case.replace(inputs={"teacher_size": 7}), case.replace(gradients=("hidden",))
    product = 2 * 2 * 5  # operations for each element of a hidden state
    assert [module.flops(case, backward) for backward in (False, True)] == [6 * product, 12 * product]
    assert [module.flops(wide, backward) for backward in (False, True)] == [10 * product, 16 * product]
    assert module.flops(frozen, True) == 9 * product
    assert module.bytes_moved(case, False) == 4 * (2 + 5) * (3 + 3)
    assert module.bytes_moved(wide, True) == 4 * ((2 + 5) * (3 + 7) + (2 + 5) * 3)
    assert module.bytes_moved(frozen, True) == module.bytes_moved(case, False) + 4 * 2 * 3


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_ligers_distillation_is_the_mean_of_the_divergence(beta):
    """It is timed beside linear_divergence, so it must compute the same, though of no token alone."""
    pytest.importorskip("liger_kernel.chunked_loss")
    module = cases.modules(["linear_divergence"])["linear_divergence"]
    case = Case({"N": 6, "H": 8, "V": 40}, "float64", {"beta": beta}, op="linear_divergence")
    case = case.replace(inputs={"teacher_size": 5})
    inputs = parity.make_inputs(module, case, "cpu")
    peer = next(peer for peer in module.PEERS if peer.name == "liger")
    mean, own = peer.load()(inputs, case)["mean"], parity.ours(module, case.op, "reference")(inputs, case)
    torch.testing.assert_close(mean, own["divergence"].mean().to(mean.dtype))


@pytest.mark.parametrize(
    "op",
    ["linear_logprob", "linear_divergence", "linear_policy_loss", "sample_linear", "prefix_shared_attention"],
)
@pytest.mark.parametrize("best", range(4))
def test_the_floor_is_that_of_the_best_gemm(op, best, monkeypatch):
    """Of the case's own product, and of each of the three of forward and backward in a tile, in any dtype."""
    module = cases.modules([op])[op]
    case = module.PRESETS["tiny"][0].replace(op=op, gradients=module.GRADIENTS, dtype="bfloat16")
    asked = []

    def rate(m, n, k, dtype, device, threads):
        asked.append((m, n, k, dtype))
        return 2e3 if len(dict.fromkeys(x[:3] for x in asked)) == best + 1 else 1e3

    monkeypatch.setattr(measure, "gemm_rate", rate)
    monkeypatch.setattr(measure, "copy_bandwidth", lambda *_: math.inf)
    bench = run._Bench(case, module, run.Settings(("speed",), peers=()))
    floor, shapes = bench._floor(False), list(dict.fromkeys(x[:3] for x in asked))
    m, n, k = module.gemm(case)
    assert shapes == list(dict.fromkeys([(m, n, k), *((min(a, 1024), min(b, 4096), c) for a, b, c in
                                                       ((m, n, k), (m, k, n), (n, k, m)))]))  # fmt: skip
    assert {x[3] for x in asked} == {torch.float32, torch.bfloat16}
    assert floor == module.flops(case, False) / (2e3 if best < len(shapes) else 1e3)


def test_a_rate_is_that_of_the_fastest_round(monkeypatch):
    monkeypatch.setattr(
        measure, "interleave", lambda calls, *_, **__: {name: [4.0, 2.0, 3.0] for name in calls}
    )
    assert measure.gemm_rate.__wrapped__(2, 3, 5, torch.float32, "cpu", 1) == 2 * 2 * 3 * 5 / 2.0
    assert measure.copy_bandwidth.__wrapped__(64, "cpu", 1) == 2 * 64 / 2.0


def test_memory_tracker_is_exact_and_sees_what_was_freed_in_between():
    def call() -> torch.Tensor:
        first = torch.empty(3 * 2**20, dtype=torch.uint8)
        second = torch.empty(2**20, dtype=torch.uint8)
        del first
        third = torch.empty(2**20, dtype=torch.uint8)
        del second
        return third

    assert memory.peak_extra(call, "cpu") == 4 * 2**20
    # mutants: a tracker that forgets releases, or looks only at what is left, is off on this very call
    changes = memory._allocations(call)
    assert sum(change for change in changes if change > 0) == 5 * 2**20
    assert sum(changes) == 2**20


def test_memory_tracker_sees_scratch_inside_operators_and_backward():
    logits = torch.zeros(64, 1024, requires_grad=True)
    size = logits.nbytes
    peak = memory.peak_extra(lambda: torch.autograd.grad(logits.log_softmax(-1)[:, 0].sum(), logits), "cpu")
    assert 2 * size < peak < 4 * size


def test_resident_memory_agrees_with_the_tracker():
    size = 64 * 2**20
    resident = memory.peak_resident(lambda: torch.ones(size, dtype=torch.uint8))
    if resident is None:
        pytest.skip("this kernel keeps no resettable high-water mark")
    assert abs(resident - size) < 4 * 2**20


@pytest.mark.parametrize("op, shape", [("logprob", "256x16384"), ("linear_logprob", "1024x256x16384")])
def test_native_kernels_take_no_memory_behind_the_trackers_back(op, shape, tmp_path):
    path = tmp_path / "report.json"
    arguments = ["memory", "--op", op, "--shape", shape, "--dtype", "float32", "--backend", "native"]
    assert cli.main([*arguments, "--peers", "none", "--device", "cpu", "--json", str(path)]) == 0
    for row in report.load(path)["rows"]:
        if row["peak_resident_bytes"] is not None:
            assert row["peak_resident_bytes"] < row["peak_extra_bytes"] + 4 * 2**20


def test_kept_workspace_counts_as_the_calls_own():
    def lease():
        with workspace.lease(2**20, torch.device("cpu")):
            pass

    with workspace.limited(2**20):
        lease()
        assert memory.peak_extra(lease, "cpu") == 2**20


def test_prediction_of_an_affine_peak_is_exact():
    assert memory.predict(lambda rows: 1000 + 7 * rows, 4096) == 1000 + 7 * 4096
    assert memory.predict(lambda rows: 1000, 4096) == 1000


def test_calls_take_turns_forwards_and_backwards(monkeypatch):
    monkeypatch.setattr(measure, "_MAX_ROUNDS", 4)
    seen = []
    calls = {name: lambda name=name: seen.append(name) for name in "AB"}
    times = measure.interleave(calls, "cpu", seconds=10)
    assert "".join(seen) == "AB" + "ABBAABBA"  # warm-up, then the rounds
    assert [len(t) for t in times.values()] == [4, 4]


def test_a_call_that_takes_too_long_is_timed_once():
    import time

    calls = {"slow": lambda: time.sleep(0.02), "quick": lambda: None}
    times = measure.interleave(calls, "cpu", seconds=0.01, rounds=3)
    assert len(times["slow"]) == 1 and len(times["quick"]) >= 3


def test_time_limit_interrupts_and_restores():
    import time

    with pytest.raises(TimeoutError, match="longer than 0.05 s"), measure.time_limit(0.05):
        time.sleep(2)
    with measure.time_limit(5):
        pass


@pytest.mark.parametrize("op", dispatch.ops())
def test_truth_does_not_depend_on_its_slices(op, monkeypatch):
    module = cases.modules([op])[op]
    case = module.PRESETS["tiny"][0].replace(op=op, gradients=module.GRADIENTS)
    inputs = parity.make_inputs(module, case, "cpu")
    grads = parity.upstream(module, case, inputs)
    whole_op = getattr(module, "WHOLE", False) or hasattr(module, "SCALARS")
    differentiated = module.OUTPUTS(case)[:1]
    whole = parity.Truth(module, case, inputs, grads).of(differentiated)
    monkeypatch.setattr(parity, "_CHUNK_ELEMENTS", 1)
    sliced = parity.Truth(module, case, inputs, grads)
    assert sliced.slices.step == (sliced.slices.rows if whole_op else 1)
    for name, value in sliced.of(differentiated).items():
        torch.testing.assert_close(value, whole[name], rtol=2e-14, atol=1e-15)
        assert value.dtype == torch.float64 or not value.is_floating_point()


def test_nan_is_an_infinite_error_and_never_passes():
    exact = torch.ones(3, dtype=torch.float64)
    error = parity.compare(torch.tensor([1.0, math.nan, 1.0]), exact)
    assert error.largest == math.inf
    assert not error.within(parity.compare(exact.float(), exact))


PEERS = [
    pytest.param(op, peer, id=f"{op}-{peer.name}")
    for op, module in cases.modules().items()
    for peer in module.PEERS
    if not peer.on_request and peer.bare is None
]


@pytest.mark.parametrize("op, peer", PEERS)
def test_real_peers_agree_with_the_truth(op, peer):
    module = cases.modules([op])[op]
    case = module.PRESETS["tiny"][0].replace(op=op, gradients=module.GRADIENTS)
    if "temperature" in case.options:  # logprobs alone, which every peer has
        case = case.replace(options={"temperature": 0.8})
    inputs = parity.make_inputs(module, case, "cpu")
    grads = parity.upstream(module, case, inputs)
    try:
        got = parity.outcome(peer.load(), inputs, case, grads)
    except (ImportError, NotImplementedError) as error:
        pytest.skip(f"{peer.name}: {error}")
    errors = parity.Truth(module, case, inputs, grads).errors(got)
    assert {*module.OUTPUTS(case)[:1], *(f"grad_{name}" for name in module.GRADIENTS)} <= set(errors)
    assert max((error.relative for error in errors.values()), default=0) < 1e-5


def test_what_is_left_to_do_stands_beside_the_times(tmp_path):
    path = tmp_path / "report.json"
    arguments = ["speed", "--op", "prefix_shared_attention", "--preset", "tiny", "--backend", "reference"]
    arguments += ["--peers", "torch", "--seconds", "0.01", "--device", "cpu", "--json", str(path)]
    assert cli.main(arguments) == 0
    (table,) = render.tables(report.load(path)["rows"])
    # P=9, L=3, G=3: 3 * 11 rows repeated, 8 + 3 * 3 packed; a row sees itself and what is above it
    seen = {"fewer tokens": 33 / 17, "fewer FLOPs": 3 * 66 / (36 + 3 * (3 * 8 + 6))}
    for name, ratio in seen.items():
        assert [cells[table.columns.index(name)] for cells in table.rows] == [f"{ratio:.2f}x"] * 2


def test_a_whole_model_repeated_and_packed(tmp_path, capsys):
    model = importlib.import_module("rlkernel.benchmarks.prefix_shared_attention_model")
    path, threads = tmp_path / "report.json", torch.get_num_threads()
    try:
        arguments = ["--shape", "9", "3", "3", "--seconds", "0.01", "--threads", "1", "--json", str(path)]
        assert model.main(arguments) == 0
    finally:
        torch.set_num_threads(threads)
    (row,) = report.load(path)["rows"]
    assert row["ratio"]["tokens"] == 36 / 17 and row["logprob_error"] < 1e-5 and row["gradient_error"] < 1e-4
    assert 1 < row["ratio"]["flops"] < 36 / 17 and all(x > 0 for x in row["ratio"].values())
    assert "2.12x" in capsys.readouterr().out


def test_scaled_cases_shrink_the_peers_tiles_and_restore_them():
    chunked = pytest.importorskip("trl.kernels.chunked_logprob")
    module = cases.modules(["linear_logprob"])["linear_logprob"]
    full = chunked.TOKEN_CHUNK_SIZE
    trl = next(peer for peer in module.PEERS if peer.name == "trl")
    with pytest.raises(KeyError), trl.shrink(8):
        assert full == 8 * chunked.TOKEN_CHUNK_SIZE
        raise KeyError
    assert full == chunked.TOKEN_CHUNK_SIZE


def test_out_of_memory_is_foreseen_not_met(monkeypatch):
    module = cases.modules(["logprob"])["logprob"]
    case = Case({"N": 512, "V": 128}, suites=("memory",), op="logprob", gradients=("logits",))
    torch_peer = run._peer(module.PEERS[0])
    real = memory.peak_extra(torch_peer.step(*_inputs(case), backward=True), "cpu")
    monkeypatch.setattr(memory, "available", lambda device: real)
    settings = run.Settings(("memory",), backends=("reference",), peers=("torch",))
    with Progress(2) as progress:
        rows = run.run([case], {"logprob": module}, settings, progress)
    peer = rows[-1]["peers"]["torch"]
    assert peer["skipped"].startswith("out of memory: needs")
    assert abs(real - peer["peak_extra_bytes"]) < 0.1 * real


def _inputs(case):
    module = cases.modules([case.op])[case.op]
    inputs = parity.make_inputs(module, case, "cpu")
    return inputs, case, parity.upstream(module, case, inputs)


def test_benchmark_files_need_no_pytest():
    """`python -m rlkernel.bench` works where pytest is not installed."""
    code = (
        "import sys; sys.modules['pytest'] = None; from rlkernel.bench import cases; print(*cases.modules())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == dispatch.ops(), done.stderr
    assert importlib.util.find_spec("rlkernel.benchmarks._peers")
