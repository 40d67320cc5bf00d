"""Put rlkernel under vLLM: what is replaced, in which process, and how it is asked for."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterable
from typing import Any

from rlkernel.integrations._environment import chosen
from rlkernel.integrations._patch import ABSENT, PatchError
from rlkernel.integrations.vllm import switch
from rlkernel.integrations.vllm.contract import require_version
from rlkernel.integrations.vllm.vllm_patch import VllmPatch
from rlkernel.types import VllmOp

logger = logging.getLogger("rlkernel.patch_vllm")


def patch(
    ops: Iterable[VllmOp] | None = None,
    *,
    strict: bool = False,
    return_support: int = 0,
    batch_invariant: bool = False,
) -> VllmPatch:
    """Put rlkernel under vLLM, in this process and in those that it starts, until ``undo()``.

    Call it before the engine is made.  A second call while the patch is on returns the same object.

    Args:
        ops: what to replace, of ``"sampler"``, ``"support"``, ``"prompt_logprobs"``, ``"rejection"``,
            ``"attention"`` and ``"v2"``; None: the first four.
        strict: what cannot be replaced, or a version of vLLM that has not been run, is an error, in the
            worker processes too.  Otherwise it is left to vLLM, with the reason in ``refused`` and in the
            log.
        return_support: room for the tokens that the filters kept for each sampled one, which then come with
            the outputs of every request that does not itself say how much it wants.
        batch_invariant: a request has the same bits alone and in any batch, and those of transformers under
            ``rlkernel.batch_invariant``: ``"attention"`` serves every step, layers compute as transformers
            does, and that mode is on in each process while the patch is. On a CPU, with enforce_eager; a
            model with other layers than were compared is an error when it is loaded.

    Raises:
        ValueError: ``ops`` names something else, or not what the other options need.
        ImportError: vLLM is not installed. PatchError: the patch is on with other options, or, if
            ``strict``, vLLM is not what was run. Nothing is replaced then.
    """
    if isinstance(ops, str):
        raise ValueError(f"ops must be names, got {ops!r}")
    wanted = switch.DEFAULT if ops is None else chosen(ops, switch.OPS, "ops")
    if not isinstance(strict, bool):
        raise ValueError(f"strict must be True or False, got {strict!r}")
    request = switch.Asked(
        wanted,
        strict,
        switch.checked_room(return_support, wanted, "return_support"),
        switch.checked_invariance(batch_invariant, wanted, "batch_invariant"),
    )
    if (active := VllmPatch.in_place()) is not None:
        for name in ("ops", "return_support", "batch_invariant"):
            if (mine := getattr(active, name)) != (got := getattr(request, name)):
                raise PatchError(
                    f"{name} must be what the patch in place has, {mine}, got {got}: undo it first"
                )
        return active.share()
    result = _installed(request)
    result.environment = switch.ask(request)
    if reason := switch.left_out():
        if strict:
            result.undo()
            raise PatchError(f"vLLM's worker processes will not load rlkernel: {reason}")
        warnings.warn(
            f"rlkernel.patch_vllm() reaches this process alone, not vLLM's worker processes: {reason}",
            stacklevel=3,
        )
    return result


def register() -> None:
    """vLLM's entry point, called in each of its processes: does what ``VLLM_RLKERNEL`` asks for, once."""
    global _failed
    if VllmPatch.in_place() is not None or _failed or not switch.is_on():
        return
    try:
        request = switch.asked()
        assert request is not None
        _installed(request)
    except Exception as error:
        _failed = True
        if switch.is_strict():
            raise
        logger.warning("rlkernel leaves everything to vLLM: %s: %s", type(error).__name__, error)


_failed = False


def _installed(request: switch.Asked) -> VllmPatch:
    require_version(request.strict)
    from vllm.v1.worker.worker_base import WorkerBase

    result = VllmPatch(*request)
    for op in request.ops:  # each has a module of its name, with its plan
        with result.planning(op):
            importlib.import_module(f"rlkernel.integrations.vllm.{op}").plan(result)

    if request.batch_invariant:
        with result.planning("batch_invariant"):
            importlib.import_module("rlkernel.integrations.vllm.invariant_layers").plan(result)

    def rlkernel_stats(self: Any) -> dict[str, Any]:
        return result.counts()

    result.replace(WorkerBase, "rlkernel_stats", rlkernel_stats, expected=ABSENT)
    return result.apply()
