"""Put rlkernel under axolotl's trainers."""

from __future__ import annotations

from rlkernel.integrations import trl
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.axolotl import contract, scoring
from rlkernel.integrations.axolotl.axolotl_patch import AxolotlPatch
from rlkernel.integrations.trl import TrlPatch
from rlkernel.types import Dropout, Require


def patch(
    *,
    prefix_sharing: bool | Require = False,
    prefix_min_ratio: float | None = None,
    dropout: Dropout = "own",
    vllm: bool | Require = True,
    strict: bool = True,
) -> AxolotlPatch:
    """Put rlkernel under axolotl's trainers until ``undo()``, or until the end of the ``with`` block.

    axolotl's plugin calls it when models are loaded, just before the trainer is made.  axolotl replaces
    functions of TRL whenever it loads a model, so no model may be loaded between the two ends.

    A second call while the patch is on returns the same object; a ``with`` over it leaves the patch on.

    Args:
        prefix_sharing: as in ``patch_trl``; so are the next three.  The asynchronous trainer does not pack.
        prefix_min_ratio: leave a batch to TRL that has fewer padded tokens for each row of the packed batch.
        dropout: ``"own"`` or ``"shared"``.
        vllm: whether a trainer with vLLM brings ``patch_vllm()`` with it.
        strict: take only the versions of axolotl and TRL that have been run.

    Raises:
        ValueError: an option is not one of its values, or is given without ``prefix_sharing``.
        ImportError: axolotl is not installed.
        PatchError: the version of axolotl or TRL is not supported, or what is to be replaced is not what that
            version has, or the patch is on with other options.  Nothing is replaced then.
    """
    before = TrlPatch.in_place()
    if before is None and AxolotlPatch.in_place() is not None:
        raise PatchError("the patch of TRL under axolotl's must be in place, got none: undo this one first")
    asynchronous = contract.asynchronous(strict)
    under = trl.patch(
        prefix_sharing=prefix_sharing,
        prefix_min_ratio=prefix_min_ratio,
        dropout=dropout,
        vllm=vllm,
        strict=strict,
    )
    if (active := AxolotlPatch.in_place()) is not None:
        return active.share()
    result = AxolotlPatch(under, brought=before is None)
    try:
        scoring.plan(result, asynchronous)
        return result.apply()
    except BaseException:
        if before is None:
            under.undo()
        raise
