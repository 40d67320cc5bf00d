"""``rlkernel.linear_divergence`` from hidden states against PyTorch, TRL, Liger and the bare GEMMs.

Liger's is a mean over all tokens, whose gradients its forward pass computes: where ``--peers`` names it, it
is timed and weighed beside the others, and no number of it is compared, as it has none of a token.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers
from rlkernel.benchmarks import divergence as of_logits

DIMS = ("N", "H", "V")  # the teacher's size is H too, or "teacher_size" of a case's inputs
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {"beta": 0.5}
SHARED = ("weight", "teacher_weight")
GRADIENTS = ("hidden", "weight")
NAMES = of_logits.NAMES


def _case(sizes: tuple[int, int, int], dtype: str, beta: float, teacher: int = 0, **options: Any) -> Case:
    """One of these sizes, beside a teacher whose hidden states have another size, or else the student's."""
    note = NAMES[beta] + (f", K={teacher}" if teacher else "")
    made = Case(dict(zip(DIMS, sizes, strict=True)), dtype, {"beta": beta}, note, **options)
    return made.replace(inputs={"teacher_size": teacher}) if teacher else made


def _cases(*sizes: int, dtype: str = "float32") -> list[Case]:
    n, h, v = sizes
    return [_case((n, h, v), dtype, beta) for beta in NAMES]


def _frozen(*sizes: int, dtype: str = "float32") -> Case:
    n, h, v = sizes
    case = _case((n, h, v), dtype, 0.5, gradients=("hidden",))
    return case.replace(note=f"{case.note}, frozen head")


def _length(tokens: int) -> Case:
    """Heads that one workspace of 8 MiB cuts in tiles already at the smallest N."""
    case = _case((tokens, 256, 4096), "float32", 0.5, suites=("memory",), workspace=8 * 2**20)
    return case.replace(axis=("tokens", tokens))


_SMALL = 128, 256, 8192
QUICK = [
    _case(_SMALL, "float32", 0.5),
    _case(_SMALL, "float32", 1.0, teacher=384),
    _case(_SMALL, "bfloat16", 0.5),
]
PRESETS = {
    # odd sizes: more than one vector and a tail, small enough for Triton's interpreter
    "tiny": [*_cases(3, 24, 1030), _case((3, 24, 1030), "float32", 0.5, teacher=40), _frozen(3, 24, 1030)],
    "linear-divergence-cpu": [
        *_cases(512, 512, 32768),
        _case((512, 512, 32768), "float32", 0.5, teacher=1024),
        _frozen(512, 512, 32768),
    ],
    "linear-divergence-gpu": [
        *_cases(8192, 4096, 151936, dtype="bfloat16"),
        # a student of 0.6 billion parameters beside a teacher of eight
        _case((8192, 1024, 151936), "bfloat16", 0.5, teacher=4096),
        _frozen(8192, 4096, 151936, dtype="bfloat16"),
    ],
    "linear-divergence-lengths": [_length(tokens) for tokens in (1024, 4096, 16384)],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("divergence",)


def row_elements(case: Case) -> int:
    return 2 * case.sizes["V"]  # of the student's logits and of the teacher's


def bytes_moved(case: Case, backward: bool) -> int:
    # forward: read hidden states and weights of both, (N + V) (H + K) b; with gradients: write as much as
    # there is of them, N H b and V H b
    n, h, v = case.sizes.values()
    of = {"hidden": n * h, "weight": v * h}
    written = sum(of[name] for name in case.gradients) if backward else 0
    return ((n + v) * (h + _teacher_size(case)) + written) * case.itemsize


def flops(case: Case, backward: bool) -> int:
    # The logits are GEMMs of 2 N H V and 2 N K V operations, and each gradient that is wanted another one of
    # the student's. Logits that the workspace has no room to keep are computed again, which no floor counts.
    n, h, v = case.sizes.values()
    gradients = len(case.gradients) if backward else 0
    return 2 * n * v * ((1 + gradients) * h + _teacher_size(case))


def gemm(case: Case) -> tuple[int, int, int] | None:
    # the student's own product, cut where a larger one is no faster
    n, h, v = case.sizes.values()
    return min(n, 2048), min(v, 16384), h


def _teacher_size(case: Case) -> int:
    return int(case.inputs.get("teacher_size", case.sizes["H"]))


def _torch() -> Call:
    from_logits = of_logits._torch()

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        # What one writes by hand: logits in the dtype of the models, softmax in fp32.
        with torch.no_grad():
            teacher = inputs["teacher_hidden"] @ inputs["teacher_weight"].T
        logits = inputs["hidden"] @ inputs["weight"].T
        return from_logits({"logits": logits, "teacher_logits": teacher}, case)

    return call


def _trl() -> Call:
    function = _peers.module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        models = (inputs[f"{prefix}{name}"] for prefix in ("", "teacher_") for name in ("hidden", "weight"))
        hidden, weight, teacher, teacher_weight = models
        beta = float(case.options["beta"])
        divergence, _ = function.apply(hidden, weight, None, teacher, teacher_weight, None, beta)
        return {"divergence": divergence}

    return call


def _liger() -> Call:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = _peers.module("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        hidden, teacher = inputs["hidden"], inputs["teacher_hidden"]
        # inductor compiles its chunks on a GPU, which is its default; on a CPU that would take a minute
        function = loss(0.0, 1.0, beta=case.options["beta"], compiled=hidden.is_cuda)
        labels = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        mean = function(hidden, inputs["weight"], teacher, inputs["teacher_weight"], labels)
        return {"mean": mean}

    return call


def _gemms(inputs: dict[str, Any], case: Case, backward: bool) -> Callable[[], None]:
    """The GEMMs of ``flops`` and nothing else, on whole matrices that are already there."""
    hidden, weight = inputs["hidden"], inputs["weight"]
    teacher, teacher_weight = inputs["teacher_hidden"], inputs["teacher_weight"]
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
    into = {name: torch.empty_like(inputs[name]) for name in case.gradients}

    def run() -> None:
        torch.mm(teacher, teacher_weight.T, out=logits)
        torch.mm(hidden, weight.T, out=logits)
        if backward and "weight" in into:
            torch.mm(logits.T, hidden, out=into["weight"])
        if backward and "hidden" in into:
            torch.mm(logits, weight, out=into["hidden"])

    return run


_LIGER_NOTE = "a mean over all tokens, its gradients computed in forward; not compiled"

PEERS = (
    Peer("torch", _torch),
    Peer("trl", _trl, cpu_note="its torch path, which takes several fp32 tiles; its Triton path needs a GPU"),
    Peer("liger", _liger, on_request=True, cpu_note=_LIGER_NOTE),
    Peer("bare GEMMs", _torch, bare=_gemms),
)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "trl"))


def test_linear_divergence(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "linear_divergence", case, backward, name)
