"""The lm_head of a model while it scores labels: it makes logprobs where it would have made logits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from rlkernel.integrations._forward import forward_replaced
from rlkernel.integrations._replacing import NARROW
from rlkernel.integrations.hf.models import causal_lm, family, is_sharded
from rlkernel.ops.linear_logprob import linear_logprob, linear_logprob_statistics
from rlkernel.types import Statistic

# whose logits were found to be what the config says; the look at them waits for the GPU
_checked: WeakKeyDictionary[nn.Module, tuple[float, float | None]] = WeakKeyDictionary()
# whose callers asked for the labels that they should, which is looked at once, too
_asked: WeakSet[nn.Module] = WeakSet()

IGNORED = -100
COMPILED = "the model is compiled"
PROBE = (-40.0, -3.0, -0.5, 0.0, 0.25, 1.0, 8.0, 40.0)


class HeadError(ValueError):
    """A model does something else with its lm_head, or with what that makes, than its config says."""


class LmHead:
    """The lm_head of a model: its logprobs in place of logits, and a check of what becomes of logits."""

    def __init__(self, model: Any, temperature: float, return_entropy: bool, fp32: bool) -> None:
        self.name = family(model).__name__
        self.config = model.config.get_text_config()
        self.module = that_runs(model.get_output_embeddings())
        self.shard = self._shard()
        self.temperature, self.return_entropy, self.fp32 = temperature, return_entropy, fp32
        self.softcap = getattr(self.config, "final_logit_softcapping", None)
        self.scale = _logit_scale(self.config)
        self.dtype = torch.promote_types(self.module.weight.dtype, torch.float32)
        self.sharded = is_sharded(model)
        self._scores: Any = None
        self._entries = 1
        self.statistics: tuple[Statistic, ...] = ()
        self.found: dict[Statistic, Tensor] = {}  # the last call's statistics

    def _shard(self) -> dict[str, Any]:
        """Which part of the vocabulary the module has, as ``linear_logprob`` is told of it."""
        if not isinstance(self.module, nn.Linear) or type(self.module).forward is not nn.Linear.forward:
            kind = f"{type(self.module).__module__}.{type(self.module).__name__}"
            raise ValueError(f"{self.name}: its lm_head must be a torch.nn.Linear, got {kind}")
        return {}

    @contextlib.contextmanager
    def scoring(
        self, shape: tuple[int, int], rows: Callable[[Tensor], Tensor], labels: Tensor
    ) -> Iterator[None]:
        """Inside, a call of the module scores ``labels`` by ``rows(hidden)``; a call of the model is to make
        one, with hidden states of ``shape``.  Other threads get logits, as one of axolotl that generates."""
        module, self._scores = self.module, None
        usual, here = module.forward, threading.get_ident()

        def forward(hidden: Tensor) -> Tensor:
            if threading.get_ident() != here:
                logits: Tensor = usual(hidden)
                return logits
            if self._scores is not None:
                raise HeadError(f"{self.name}: it must call its lm_head once, got a second call")
            if hidden.dim() != 3 or hidden.shape[:2] != shape:
                want = (*shape, module.weight.shape[1])
                raise HeadError(f"{self.name}: hidden states must be {want}, got {tuple(hidden.shape)}")
            hidden = self._entered(hidden)
            self._scores = self._score(rows(hidden), labels)
            probe = hidden.new_tensor(PROBE)
            # Nothing of them, but their graph: DDP looks for unused parameters from what a model returns.
            link = zero_with_graph(self._scores.logprobs).to(probe.dtype)
            # a model may leave out some of its vocabulary, or change it, which its first call is to show
            self._entries = 1 if self._is_checked() else module.weight.shape[0]
            return self._left((probe + link)[None, :, None].repeat(1, 1, self._entries))

        with forward_replaced(module, forward):
            yield

    def _entered(self, hidden: Tensor) -> Tensor:
        return hidden

    def _left(self, logits: Tensor) -> Tensor:
        return logits

    def _score(self, hidden: Tensor, labels: Tensor) -> Any:
        kind = hidden.device.type
        off = torch.autocast(kind, enabled=False) if self.fp32 else contextlib.nullcontext()
        with off:
            hidden = hidden.float() if self.fp32 and hidden.dtype.itemsize < 4 else hidden
            options: Any = {
                "bias": self.module.bias, "temperature": self.temperature, "logit_scale": self.scale,
                "softcap": self.softcap, "return_entropy": self.return_entropy,
            }  # fmt: skip
            weight, names = self.module.weight, self.statistics
            if not names:
                return linear_logprob(hidden, weight, labels, **options, **self.shard)
            scores = linear_logprob_statistics(hidden, weight, labels, statistics=names, **options)
            self.found = {name: getattr(scores, name) for name in names}
            return scores

    def results(self, output: Any) -> tuple[Tensor, Tensor | None]:
        scores, self._scores = self._scores, None
        if scores is None:
            raise HeadError(f"{self.name}: it must call its lm_head once, got no call")
        if not self._is_checked():
            self._check_probe(output)
            _checked[self.module] = self.scale, self.softcap
        if not self.sharded:
            return scores.logprobs, scores.entropy
        # FSDP and ZeRO-3 gather what backward needs when the gradient of a module's output arrives.
        link = zero_with_graph(output.logits).to(self.dtype)
        return scores.logprobs + link, None if scores.entropy is None else scores.entropy + link

    def check_labels(self, scored: Tensor, asked: Tensor, framework: str) -> None:
        """Once for each model, as it waits for the GPU: what was scored is what the caller asks for.

        Raises:
            HeadError: it is not.
        """
        if self.module in _asked:
            return
        if asked.shape != scored.shape:
            want = tuple(scored.shape)
            raise HeadError(f"{framework}'s labels must be {want}, got {tuple(asked.shape)}")
        if not torch.all((scored == asked) | (scored == IGNORED)):
            raise HeadError(f"{framework}'s labels must be the tokens that follow, got others")
        _asked.add(self.module)

    def _is_checked(self) -> bool:
        return _checked.get(self.module) == (self.scale, self.softcap)

    def _check_probe(self, output: Any) -> None:
        logits = getattr(output, "logits", None)
        shape = 1, len(PROBE), self._entries
        if logits is None or tuple(logits.shape) != shape:
            made = None if logits is None else tuple(logits.shape)
            raise HeadError(
                f"{self.name}: its logits must be all that its lm_head makes, {shape}, got {made}"
            )
        found = logits.detach()[0].double().cpu()
        want = torch.tensor(PROBE, dtype=torch.float64, device="cpu") * self.scale
        if self.softcap:
            want = self.softcap * torch.tanh(want / self.softcap)
        rounding = 8 * torch.finfo(torch.bfloat16).eps
        if not torch.allclose(found, want[:, None], rounding, 1e-6):
            worst = (found - want[:, None]).abs().amax(0).argmax()
            values = [round(x, 4) for x in found[:, worst].tolist()]
            raise HeadError(
                f"{self.name}: its logits must be scaled by {self.scale} and capped at {self.softcap}, as "
                f"its config says, got {values} for {list(PROBE)}"
            )


def narrow_head(
    model: nn.Module, temperature: float, return_entropy: bool, kind: type[LmHead] = LmHead
) -> LmHead:
    """The lm_head inside a model's wrappers.

    Raises:
        ValueError: why it cannot score.
    """
    head = kind(causal_lm(model), float(temperature), return_entropy, False)
    if head.module.weight.dtype not in NARROW:
        raise ValueError(f"{head.name}: its lm_head is {head.module.weight.dtype}")
    return head


def as_rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1])


def that_runs(head: Any) -> Any:
    """The lm_head itself; PEFT has a copy of it for each adapter that trains it (``modules_to_save``)."""
    copies = getattr(head, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return head
    active = list(head.active_adapters)
    if head.disable_adapters or not active or not all(name in copies for name in active):
        return head.original_module
    return copies[active[0]]


def _logit_scale(config: Any) -> float:
    """The factor of the logits, under the names that the families give it."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (scale := getattr(config, name, None)) is not None:
            return float(scale)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None or config.model_type == "minicpm3":  # which scales its hidden states, before the head
        return 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1.0 / float(scaling)


def zero_with_graph(values: Tensor) -> Tensor:
    """Zero, with the graph of ``values``."""
    return values.sum().nan_to_num(0, 0, 0) * 0
