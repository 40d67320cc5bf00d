"""Routes from what rollout engines give with their tokens.

Both engines count every hidden layer, those without a router as well (zeros there), and give no row for the
last token: it was drawn, and never ran.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel.routing_replay.routes import Routes


def from_vllm(
    routed_experts: Any, num_experts: int, *, layers: Sequence[int] | None = None, tokens: int | None = None
) -> Routes:
    """Of ``CompletionOutput.routed_experts`` of an engine with ``enable_return_routed_experts=True``.

    Args:
        routed_experts: ``[prompt + completion - 1, hidden layers, top_k]``, a NumPy array; or the text in
            its place in the answers of vLLM's server.
        num_experts: of the model.
        layers: which of the hidden layers have a router (``moe_layers(model)``); all of them unless given.
        tokens: those of the prompt and the completion; a last one without a record is then added.

    Raises:
        ValueError: there is no record, it has another shape, or ids that are no expert's.

    Examples:
        >>> answer = np.zeros((4, 2, 1), dtype=np.int32)
        >>> routes = rlkernel.routing_replay.from_vllm(answer, 8, tokens=5)
        >>> routes.experts.shape, routes.known
        (torch.Size([2, 5, 1]), tensor([ True,  True,  True,  True, False]))
    """
    if routed_experts is None:
        raise ValueError(
            "routed_experts must be there, got None: the engine needs enable_return_routed_experts=True, and "
            "gives them when the completion is finished"
        )
    if isinstance(routed_experts, str):
        import numpy  # vLLM's server writes NumPy's own format

        routed_experts = numpy.load(io.BytesIO(base64.b64decode(routed_experts)), allow_pickle=False)
    if not isinstance(routed_experts, Tensor):
        routed_experts = torch.as_tensor(routed_experts, device="cpu")
    return _of_engine(routed_experts, num_experts, layers, tokens)


def from_sglang(
    answer: Mapping[str, Any] | str,
    num_experts: int,
    *,
    hidden_layers: int,
    top_k: int,
    layers: Sequence[int] | None = None,
    tokens: int | None = None,
) -> Routes:
    """Of ``meta_info["routed_experts"]`` of a request with ``return_routed_experts=True``.

    Args:
        answer: the whole answer, its ``meta_info``, or the text itself: base64 of int32.
        num_experts: of the model.
        hidden_layers: ``config.num_hidden_layers``, those without a router as well.
        top_k: ``config.num_experts_per_tok``.
        layers, tokens: as of ``from_vllm``.

    Raises:
        ValueError: there is no record, its length does not fit, or ids that are no expert's.

    Examples:
        >>> text = base64.b64encode(np.zeros((4, 2, 1), dtype=np.int32).tobytes()).decode()
        >>> rlkernel.routing_replay.from_sglang(text, 8, hidden_layers=2, top_k=1, tokens=5).experts.shape
        torch.Size([2, 5, 1])
    """
    found: Any = answer
    if isinstance(found, Mapping):
        found = found.get("meta_info", found).get("routed_experts")
    if found is None:
        raise ValueError(
            "routed_experts must be there, got None: the server needs --enable-return-routed-experts, and "
            "the request return_routed_experts"
        )
    data = bytearray(base64.b64decode(found))
    row = 4 * hidden_layers * top_k
    if not data or len(data) % row:
        raise ValueError(
            f"routed_experts must be int32 of {hidden_layers} layers and {top_k} experts a token, {row} "
            f"bytes, got {len(data)} bytes"
        )
    ids = torch.frombuffer(data, dtype=torch.int32).reshape(-1, hidden_layers, top_k)
    return _of_engine(ids, num_experts, layers, tokens)


def _of_engine(ids: Tensor, num_experts: int, layers: Sequence[int] | None, tokens: int | None) -> Routes:
    if ids.dim() != 3:
        raise ValueError(f"routed_experts must be [tokens, layers, top_k], got {tuple(ids.shape)}")
    if layers is not None:
        wrong = [layer for layer in layers if not 0 <= layer < ids.shape[1]]
        if wrong:
            raise ValueError(f"layers must be in [0, {ids.shape[1]}), the engine's, got {wrong[0]}")
        ids = ids.long()[:, list(layers)]
    routes = Routes.of(ids.long().transpose(0, 1), num_experts)
    if tokens is None:
        return routes
    missing = tokens - routes.tokens
    if missing not in (0, 1):
        raise ValueError(
            f"routed_experts must have tokens = {tokens} rows, or all but the last, got {routes.tokens}"
        )
    return routes.padded(right=missing)
