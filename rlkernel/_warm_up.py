"""What a CUDA graph must not do while it is captured, done before: load modules, compile kernels, probe."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.runtime import gpu


def warm_up(
    *what: str | Callable[[], object],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **sizes: int,
) -> dict[str, str]:
    """Run ops once outside of a CUDA graph, so that what they load lazily is there when one is captured.

    A name is an op, which is called with a few rows of random numbers, backward too; none given means every
    op that can run on the device.  Kernels are compiled for dtypes and for the length of a row: ``sizes`` are
    those of ``benchmarks/<op>.py`` by its letters, as ``V=151936`` or ``H=4096``, and reach the ops that have
    them.  A function is called as it is: the step that will be captured warms up itself best.  It runs three
    times, as PyTorch asks for where a graph holds a backward pass, on a stream of its own.

    Args:
        device: Of the calls by name; cuda where there is one, else cpu.
        dtype: Of the calls by name; bf16 on a GPU and fp32 on a CPU, where none is given.

    Returns:
        The backend of every op that ran.

    Raises:
        ValueError: a name is no op, or no op that is called has such a size.
        NotImplementedError: no backend can run an op that is named; without names it is left out.
        RuntimeError: a CUDA graph is being captured.

    Examples:
        >>> sorted(rlkernel.warm_up("gae", "whiten"))
        ['gae', 'whiten']
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if gpu.capturing(chosen):
        raise RuntimeError("warm_up must be called before a CUDA graph is captured, got a capture under way")
    calls = _calls(what, chosen, dtype, sizes)
    with dispatch.watching() as ran, _side_stream(chosen):
        for call, required in calls:
            try:
                call()
            except NotImplementedError:
                if required:
                    raise
    return ran


def _calls(
    what: tuple[str | Callable[[], object], ...],
    device: torch.device,
    dtype: torch.dtype | None,
    sizes: dict[str, int],
) -> list[tuple[Callable[[], None], bool]]:
    """What to call, and whether it has to run."""
    from rlkernel.bench import cases  # which asks for nothing but torch, and takes a while

    names = [x for x in what if isinstance(x, str)]
    known = cases.modules()
    for x in what:
        if x not in known if isinstance(x, str) else not callable(x):
            raise ValueError(f"what must be functions, or ops of {', '.join(known)}, got {x!r}")
    modules = {op: known[op] for op in (names if what else known)}
    letters = sorted({letter for module in modules.values() for letter in module.DIMS})
    for letter, size in sizes.items():
        if letter not in letters:
            raise ValueError(
                f"sizes must be among {', '.join(letters) or 'none'} of these ops, got {letter}={size}"
            )
        if size < 1:
            raise ValueError(f"{letter} must be >= 1, got {size}")
    wanted = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    named = {op: _small_call(op, module, device, wanted, sizes) for op, module in modules.items()}
    if not what:
        return [(call, False) for call in named.values()]
    return [(named[x] if isinstance(x, str) else _thrice(x), True) for x in what]


def _small_call(
    op: str, module: Any, device: torch.device, dtype: torch.dtype, sizes: dict[str, int]
) -> Callable[[], None]:
    """The first tiny case of an op's benchmark, whose rows are few, with some sizes of the caller's."""
    from rlkernel.bench import parity

    case = module.PRESETS["tiny"][0]
    own = {letter: sizes.get(letter, size) for letter, size in case.sizes.items()}
    name = str(dtype).removeprefix("torch.")
    case = case.replace(sizes=own, dtype=name, op=op, gradients=case.gradients or module.GRADIENTS)

    def call() -> None:
        on = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=on), torch.inference_mode(False), torch.enable_grad():
            inputs = parity.make_inputs(module, case, str(device))
            upstream = parity.upstream(module, case, inputs)
            parity.outcome(_public(op, module), inputs, case, upstream)

    return call


def _public(op: str, module: Any) -> Callable[[dict[str, Any], Any], dict[str, Tensor]]:
    """The public function on the backend that is chosen, or forced, where it is called."""
    import rlkernel

    function = getattr(rlkernel, getattr(module, "FUNCTION", op))

    def call(inputs: dict[str, Any], case: Any) -> dict[str, Tensor]:
        result = function(**inputs, **case.options)
        outputs = {"out": result} if isinstance(result, Tensor) else result._asdict()
        return {name: value for name, value in outputs.items() if value is not None}

    return call


def _thrice(step: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        for _ in range(3):
            step()

    return call


@contextlib.contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """On a GPU: a stream of its own between what was queued before and what comes after."""
    if device.type != "cuda":
        yield
        return
    current = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)
