"""``rlkernel.divergence`` from logits against PyTorch and TRL's function."""

import warnings
from typing import Any

import torch
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("N", "V")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {"beta": 0.5}
SHARED: tuple[str, ...] = ()
GRADIENTS = ("logits",)
NAMES = {0.0: "forward KL", 0.5: "JSD", 1.0: "reverse KL"}


def _cases(n: int, vocab: int, dtype: str, betas: tuple[float, ...] = tuple(NAMES)) -> list[Case]:
    return [Case({"N": n, "V": vocab}, dtype, {"beta": beta}, note=NAMES[beta]) for beta in betas]


QUICK = [*_cases(128, 32768, "float32", (0.5, 1.0)), *_cases(128, 32768, "bfloat16", (0.5,))]
PRESETS = {
    # odd sizes: more than one vector and a tail, small enough for Triton's interpreter
    "tiny": _cases(3, 1030, "float32"),
    "divergence-cpu": [*_cases(1024, 32768, "float32"), *_cases(1024, 32768, "bfloat16")],
    # 2.3 GiB of logits, and as many of the teacher's
    "divergence-gpu": _cases(8192, 151936, "bfloat16"),
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("divergence",)


def row_elements(case: Case) -> int:
    return case.sizes["V"]


def bytes_moved(case: Case, backward: bool) -> int:
    # forward: read both logits once, 2 N V b; backward: read them again, write as large a gradient, 3 N V b
    return (5 if backward else 2) * case.sizes["N"] * case.sizes["V"] * case.itemsize


def flops(case: Case, backward: bool) -> int:
    return 0  # two exponentials per pair, hidden behind the reads on a GPU


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _torch() -> Call:
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        beta = case.options["beta"]
        wide = torch.promote_types(case.torch_dtype, torch.float32)
        log_p, log_q = (inputs[name].to(wide).log_softmax(-1) for name in ("logits", "teacher_logits"))
        if beta in (0, 1):
            weight, other = (log_q, log_p) if beta == 0 else (log_p, log_q)
            return {"divergence": (weight.exp() * (weight - other)).sum(-1)}
        log_m = torch.logaddexp(log_p + torch.tensor(1 - beta).log(), log_q + torch.tensor(beta).log())
        of_student, of_teacher = ((x.exp() * (x - log_m)).sum(-1) for x in (log_p, log_q))
        return {"divergence": beta * of_teacher + (1 - beta) * of_student}

    return call


def _trl() -> Call:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's, that what is experimental may change
        function = _peers.module("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        # its terms before the sum over tokens, in fp32 as its trainer's autocast has them
        wide = torch.promote_types(case.torch_dtype, torch.float32)
        student, teacher = inputs["logits"].to(wide)[None], inputs["teacher_logits"].to(wide)[None]
        terms = function(student, teacher, beta=case.options["beta"], reduction="none")
        return {"divergence": terms.sum(-1)[0]}

    return call


PEERS = (
    Peer("torch", _torch),
    Peer("trl", _trl, cpu_note="torch's operations, on every device"),
)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "trl"))


def test_divergence(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "divergence", case, backward, name)
