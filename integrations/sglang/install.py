"""Put rlkernel under SGLang: what is replaced, in which process, and how it is asked for."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterable

from rlkernel.integrations._parts import Asked
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.sglang import switch
from rlkernel.integrations.sglang.contract import require_version
from rlkernel.integrations.sglang.sglang_patch import SglangPatch
from rlkernel.types import SglangPart

logger = logging.getLogger("rlkernel.patch_sglang")


def patch(
    parts: Iterable[SglangPart] | None = None, *, strict: bool = True, batch_invariant: bool = False
) -> SglangPatch:
    """Put rlkernel under SGLang, in this process and in those that it starts, until ``undo()``, or until the
    end of the ``with`` block.

    Call it before the engine is made.  A second call while the patch is on returns the same object.  What is
    left to SGLang after all is counted, warned of once a reason, and summed up in the log by ``undo()``.

    Args:
        parts: what to replace, of ``"sampler"`` and ``"prompt_logprobs"``; None: both.
        strict: a version of SGLang that has not been run, a function that is not what that version has, or
            an entry point that SGLang's processes will not load, is an error.  Otherwise each such function
            is left to SGLang, with the reason in ``refused`` and in the log.
        batch_invariant: a request has the same bits alone and in any batch, and those of transformers under
            ``rlkernel.batch_invariant``: layers and attention compute as transformers does, and that mode is
            on in each process while the patch is.  On a CPU with ``attention_backend="torch_native"``; other
            options, and a model with other layers than were compared, are an error when it is loaded.

    Raises:
        ValueError: an argument is off.
        ImportError: SGLang is not installed.
        PatchError: the patch is on with other parts; or, if ``strict``, SGLang is not what was run, or will
            not load rlkernel in its processes.  Nothing is replaced then.
    """
    wanted = switch.called(parts, strict)
    invariant = switch.checked_invariance(batch_invariant, wanted.parts, "batch_invariant")
    if (active := SglangPatch.in_place()) is not None:
        if active.batch_invariant != invariant:
            mine = active.batch_invariant
            raise PatchError(
                f"batch_invariant must be what the patch in place has, {mine}, got {invariant}: undo it first"
            )
        return active.asked_again(parts, wanted)
    require_version(strict)
    result = _installed(wanted, invariant)
    if reason := switch.left_out():
        if strict:
            result.undo()
            raise PatchError(f"SGLang's processes will not load rlkernel: {reason}")
        warnings.warn(
            f"rlkernel.patch_sglang() reaches this process alone, not SGLang's others: {reason}", stacklevel=3
        )
    result.environment = switch.ask(wanted, invariant)
    return result


def register() -> None:
    """SGLang's entry point, called in each of its processes: does what ``SGLANG_RLKERNEL`` asks for, once.

    SGLang logs an error of a plugin and goes on, be it strict or not.
    """
    if SglangPatch.in_place() is not None:
        return
    try:
        if (request := switch.asked()) is None:
            return
        require_version(request.strict)
        _installed(request, switch.asked_invariant(request.parts))
    except Exception as error:
        if switch.is_strict():
            raise
        logger.warning("rlkernel leaves everything to SGLang: %s: %s", type(error).__name__, error)


def _installed(request: Asked, invariant: bool) -> SglangPatch:
    result = SglangPatch(*request, batch_invariant=invariant)
    for part in request.parts:  # each has a module of its name, with its plan
        with result.planning(part):
            importlib.import_module(f"rlkernel.integrations.sglang.{part}").plan(result)
    if invariant:
        with result.planning("batch_invariant"):
            importlib.import_module("rlkernel.integrations.sglang.invariant_layers").plan(result)
    return result.apply()
