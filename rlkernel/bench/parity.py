"""Errors against the reference in fp64: of our backends, of PyTorch in the same dtype, of every peer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

import rlkernel
from rlkernel.bench.cases import Call, Case
from rlkernel.types import Backend

_CHUNK_ELEMENTS = 2**24  # of one fp64 temporary of the oracle: 128 MiB


@dataclass(frozen=True)
class Error:
    """How far a tensor is from the truth: its largest deviation, and the norm of all, relative to its own."""

    largest: float
    relative: float
    budget_unit: float  # one unit in the last place of the tensor's dtype, see ``compare``

    def within(self, torch_error: "Error") -> bool:
        """At most twice PyTorch's own error in the same dtype, plus one unit in the last place."""
        return self.largest <= 2 * torch_error.largest + self.budget_unit


def make_inputs(module: ModuleType, case: Case, device: str) -> dict[str, Any]:
    """The case's inputs, by the ``make_inputs`` that the tests use; gradients are not attached."""
    reference = __import__(f"rlkernel.reference.{case.op}", fromlist=["make_inputs"])
    make = getattr(module, "make_inputs", reference.make_inputs)
    options = {**module.INPUTS, **case.inputs}
    return make(*case.sizes.values(), dtype=case.torch_dtype, device=device, **options)


def ours(module: ModuleType, op: str, backend: str) -> Call:
    """The public function of ``op`` on ``backend``, as a call that a benchmark can run beside its peers."""
    name = getattr(module, "FUNCTION", op)

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        options = dict(case.options)
        if backend == "reference":  # it has the meaning of a call, and no ways to compute it
            options.pop("algorithm", None)
        with rlkernel.use_backend(cast(Backend, backend)):
            result = getattr(rlkernel, name)(**inputs, **options)
        outputs = {"out": result} if isinstance(result, Tensor) else result._asdict()
        return {name: value for name, value in outputs.items() if value is not None}

    return call


def upstream(module: ModuleType, case: Case, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """A fixed gradient for every differentiated output: one value per row, none of them alike; one for all
    where the op sums its rows up to a SCALAR; as many as the benchmark says where a row has several."""
    device = next(x.device for x in inputs.values() if isinstance(x, Tensor))
    generator = torch.Generator(device).manual_seed(1)
    names = case.upstream or module.OUTPUTS(case)
    shape = module.upstream_shape(case) if hasattr(module, "upstream_shape") else (case.rows,)
    scalars = getattr(module, "SCALARS", ())
    return {
        name: torch.randn(() if name in scalars else shape, generator=generator, device=device)
        for name in names
    }


def outcome(
    call: Call,
    inputs: Mapping[str, Any],
    case: Case,
    grads: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Outputs and gradients (``grad_<input>``) of one call; outputs that it does not have get no gradient."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in case.gradients}
    outputs = call({**inputs, **leaves}, case)
    names = [name for name in grads if name in outputs]
    if names:
        torch.autograd.backward([outputs[n] for n in names], [grads[n].to(outputs[n].dtype) for n in names])
    gradients = {f"grad_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {name: value.detach() for name, value in {**outputs, **gradients}.items()}


def shared(module: ModuleType, inputs: Mapping[str, Any]) -> set[str]:
    """The inputs that have no rows of their own."""
    plain = {name for name, x in inputs.items() if not isinstance(x, Tensor) or x.dim() == 0}
    return plain | {*module.SHARED}


class Slices:
    """The rows of a case a few at a time, so that no large case needs much memory."""

    def __init__(
        self, module: ModuleType, case: Case, inputs: Mapping[str, Any], grads: Mapping[str, Tensor]
    ) -> None:
        self.case, self.inputs, self.grads = case, inputs, grads
        self.rows = case.rows
        # an output of all rows has no slices
        whole = getattr(module, "WHOLE", False) or bool(getattr(module, "SCALARS", ()))
        self.step = max(1, self.rows if whole else _CHUNK_ELEMENTS // module.row_elements(case))
        self.shared = shared(module, inputs)

    def outcome(self, call: Call, differentiated: tuple[str, ...]) -> dict[str, Tensor]:
        """What ``outcome`` gives, put together from slices; gradients of shared inputs are summed."""
        if self.step >= self.rows:
            return outcome(call, self.inputs, self.case, {name: self.grads[name] for name in differentiated})
        parts: dict[str, list[Tensor]] = {}
        sums: dict[str, Tensor] = {}
        for start in range(0, self.rows, self.step):
            rows = slice(start, start + self.step)
            inputs = {k: v if k in self.shared else v[rows] for k, v in self.inputs.items()}
            grads = {name: self.grads[name][rows] for name in differentiated}
            for name, value in outcome(call, inputs, self.case, grads).items():
                if name.removeprefix("grad_") in self.shared:
                    sums[name] = sums[name].add_(value) if name in sums else value
                else:
                    parts.setdefault(name, []).append(value)
        return {name: torch.cat(values) for name, values in parts.items()} | sums


class Truth:
    """The reference in fp64 on the same inputs."""

    def __init__(
        self, module: ModuleType, case: Case, inputs: Mapping[str, Any], grads: Mapping[str, Tensor]
    ) -> None:
        exact = {
            k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()
        }
        self.module, self.grads, self.slices = module, grads, Slices(module, case, exact, grads)
        self._cache: dict[tuple[str, ...], dict[str, Tensor]] = {}

    def of(self, differentiated: tuple[str, ...]) -> dict[str, Tensor]:
        """Outputs, and gradients of a loss that reaches the ``differentiated`` outputs only."""
        if differentiated not in self._cache:
            self._cache[differentiated] = self.slices.outcome(
                ours(self.module, self.slices.case.op, "reference"), differentiated
            )
        return self._cache[differentiated]

    def errors(self, got: Mapping[str, Tensor]) -> dict[str, Error]:
        """The error of every output and gradient in ``got``."""
        if hasattr(self.module, "exact"):
            exact = self.module.exact(self.slices.inputs, self.slices.case, got)
        else:
            exact = self.of(tuple(name for name in self.grads if name in got))
        of = getattr(self.module, "magnitude", None)
        magnitude = of(self.slices.inputs, self.slices.case) if of else 0.0
        return {name: compare(value, exact[name], magnitude) for name, value in got.items() if name in exact}


def compare(got: Tensor, exact: Tensor, magnitude: float = 0.0) -> Error:
    """The error of ``got``; its unit is that of the largest value, or of numbers whose difference it is."""
    difference = got.double().sub_(exact)
    scale = exact.abs().max().item() if exact.numel() else 0.0
    largest = difference.abs().max().item() if got.numel() else 0.0
    norm = exact.norm().item()
    relative = difference.norm().item() / norm if norm else largest
    largest, relative = (math.inf if math.isnan(x) else x for x in (largest, relative))  # NaN never passes
    return Error(largest, relative, torch.finfo(got.dtype).eps * max(scale, magnitude))


def failures(errors: Mapping[str, Error], torch_errors: Mapping[str, Error]) -> list[str]:
    """What is further from fp64 than the rule allows, in words."""
    return [
        f"{name}: {error.largest:.2e} from fp64, PyTorch is {torch_errors[name].largest:.2e}"
        for name, error in errors.items()
        if not error.within(torch_errors[name])
    ]
