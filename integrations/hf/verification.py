"""Whether a model computes packed what its samples give alone, tried out on a tiny batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlkernel.integrations.hf.attention import every_layer
from rlkernel.integrations.hf.models import as_written, causal_lm, check_model, family, is_sharded
from rlkernel.integrations.hf.registration import on_its_own, use_packed
from rlkernel.prefix.batch import PrefixBatch
from rlkernel.runtime import invariance

LENGTHS = ((7, (3, 5, 4)), (4, (4, 3, 6)))  # of a prompt, and of its completions
MIN_TOLERANCE = 1e-4


def verify(model: nn.Module) -> list[str]:
    """Why a model's packed logits are not those of its samples alone; empty when they are.

    Runs six samples of a few tokens, each alone on the model's own attention, and then packed. So it finds
    what ``check_model`` does not know: modules that mix tokens of neighbouring rows, attention that is not
    the registered one, code that packed batches break. It sees no window and no limit longer than its
    samples, and in bf16 nothing that is small against bf16's rounding.

    The model is put into evaluation mode for it, and left as it was, on the attention that it was on. It is
    called without what wraps it (DDP, PEFT), so that ranks need not agree.

    Raises:
        ValueError: the model is sharded (FSDP, ZeRO-3), whose passes have to follow a plan of all ranks.
    """
    if reasons := check_model(model):
        return reasons
    if is_sharded(model):
        raise ValueError("model must be whole, got one that ranks hold parts of: verify it before")
    found = causal_lm(model)
    try:
        with _undisturbed(found), as_written(found), torch.no_grad():
            worst, tolerance = _worst_error(found)
    except Exception as error:  # whatever code of others makes of a packed batch
        message = str(error).partition("\n")[0]
        return [f"{family(found).__name__}: a tiny packed batch fails with {type(error).__name__}: {message}"]
    if worst <= tolerance:
        return []
    return [
        f"{family(found).__name__}: logits of a tiny packed batch differ from those of its samples alone, by "
        f"{worst:.1e} of their size where {tolerance:.1e} is rounding"
    ]


@contextlib.contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    former = use_packed(model)
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        model.set_attn_implementation(former)


def _worst_error(found: Any) -> tuple[float, float]:
    """(error, what rounding may be) of rows in the same place of their completions, the worst place."""
    prompts, completions = _samples(found.config.get_text_config().vocab_size)
    batch = PrefixBatch.pack(prompts, completions, device=found.device)
    dtypes: list[torch.dtype] = []  # of the head, whose autocast shows here: accelerate converts outputs
    hook = found.get_output_embeddings().register_forward_hook(lambda *a: dtypes.append(a[-1].dtype))
    try:
        with every_layer(found):
            packed = batch.completion_rows(_called(found, **batch.model_kwargs()).logits)
        with on_its_own(found):
            alone = [_alone(found, p, c) for p, cs in zip(prompts, completions, strict=True) for c in cs]
        again = _alone(found, prompts[0], completions[0][0])
    finally:
        hook.remove()
    errors = _error(packed, torch.cat(alone))
    lengths = [len(rows) for rows in alone]
    by_place = torch.nn.utils.rnn.pad_sequence(list(errors.split(lengths)), padding_value=float("nan"))
    # The median of each place: an expert that flips at a tie of its router concerns one row, neighbours that
    # mix concern all rows of a place, the first ones most.
    worst = max(float(by_place.nanmedian(1).values.max()), float(_error(again, alone[0]).max()))
    dtypes += {p.dtype for p in found.parameters() if p.dtype.is_floating_point and p.dtype.itemsize > 1}
    return worst, max(MIN_TOLERANCE, *(8 * torch.finfo(dtype).eps for dtype in dtypes))


def _samples(vocab: int) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Token ids from the middle of the vocabulary, as special ones stand at its ends."""

    def tokens(n: int, start: int) -> list[int]:
        return [vocab // 4 + (7 * i + start) % max(vocab // 2, 1) for i in range(n)]

    prompts = [tokens(n, 3 * b) for b, (n, _) in enumerate(LENGTHS)]
    completions = [
        [tokens(n, 11 * g + 5 * b + 1) for g, n in enumerate(group)] for b, (_, group) in enumerate(LENGTHS)
    ]
    return prompts, completions


def _alone(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """The logits of one completion: [len(completion), V]."""
    ids = torch.tensor([prompt + completion], device=model.device)
    logits = _called(model, input_ids=ids, use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1]


def _called(model: Any, **inputs: Any) -> Any:
    """The model's outputs, without the loss of its routers, which counts the tokens of a mask."""
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        inputs["output_router_logits"] = False
    return model(**inputs)


@invariance.aside()
def _error(found: Tensor, expected: Tensor) -> Tensor:
    """The error of each row against how far its logits spread: [M]; infinite where one is no number."""
    found, expected = found.double(), expected.double()
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    error = (found - expected).norm(dim=-1)
    error = torch.where(error == 0, 0.0, error / spread)
    return error.nan_to_num(float("inf"), float("inf"))
