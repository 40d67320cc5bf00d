"""What the test files of the norms share: running one on a backend, and judging it by fp64."""

import torch
from accuracy import check
from backends import running

import rlkernel


def upstream(x):
    g = torch.Generator().manual_seed(x.shape[-1])
    return torch.randn(x.shape, generator=g).to(x)


def run(op, backend, inputs, grads=upstream, **options):
    """The outputs of ``op`` by name, and the gradients of its inputs from ``grads`` of each output."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with running(backend):
        result = getattr(rlkernel, op)(**leaves, **options)
        outputs = {"normed": result} if isinstance(result, torch.Tensor) else result._asdict()
        found = torch.autograd.grad(
            list(outputs.values()), list(leaves.values()), [grads(x) for x in outputs.values()]
        )
    names = (f"grad_{name}" for name in leaves)
    return {name: x.detach() for name, x in outputs.items()} | dict(zip(names, found, strict=True))


def double(inputs):
    return {name: x.double() for name, x in inputs.items()}


def check_against_fp64(op, backend, inputs, **options):
    ours, torchs = (run(op, b, inputs, **options) for b in (backend, "reference"))
    truth = run(
        op, "reference", double(inputs), lambda x: upstream(x.to(inputs["x"].dtype)).double(), **options
    )
    for name, exact in truth.items():
        wanted = inputs[name.removeprefix("grad_")] if name.startswith("grad_") else inputs["x"]
        assert ours[name].dtype == wanted.dtype and ours[name].shape == wanted.shape, name
        check(name, ours[name], torchs[name], exact)
