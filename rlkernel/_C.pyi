"""The compiled kernels. Written by csrc/stub.py: do not edit.

`rlkernel.native.kernels` picks the part by device and fills in the stream.
"""

from typing import Any, Protocol

from torch import Tensor

from rlkernel.types import CovariancePick, PolicyRule, PreferenceRule

ENUMS: dict[str, tuple[str, ...]]  # the names of each enum that Python has too, in order

def built() -> dict[str, list[str]]:
    """Which parts were built, and for which instruction sets or architectures."""

class Kernels(Protocol):
    """A part: where a tensor's memory is not what a kernel asks for, it raises ValueError."""

    def __hash__(self) -> int: ...
    CHUNK: int
    MOMENTS: int
    POLICY_PARTIALS: int
    POLICY_VALUES: int
    PREFERENCE_METRICS: int
    SELECTION_COUNTS: int
    SELECTION_SUMS: int
    SEQUENCE_SUMS: int
    VALUE_METRICS: int
    VALUE_SUMS: int
    part: str
    def attention_merge(self, *arguments: Any) -> None: ...
    def gae(
        self,
        stream: int = 0,
        /,
        *,
        rewards: Tensor,
        values: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        last_values: Tensor | None,
        gamma: float,
        lam: float | Tensor,
        zero_holes: bool,
        advantages: Tensor,
        returns: Tensor,
    ) -> None: ...
    def gather_kv(self, *arguments: Any) -> None: ...
    def group_advantages(
        self,
        stream: int = 0,
        /,
        *,
        rewards: Tensor,
        mask: Tensor | None,
        reward_weights: Tensor | None,
        baselines: Tensor | None,
        lengths: Tensor | None,
        ids: Tensor | None,
        order: Tensor | None,
        ends: Tensor | None,
        offsets: Tensor | None,
        size: int,
        estimator: str,
        scale: str,
        unbiased: bool,
        reward_singletons: bool,
        eps: float,
        batch: Tensor | None,
        out: Tensor | None,
        wide: Tensor | None,
        counts: Tensor | None,
    ) -> None: ...
    def kl_shaped_rewards(
        self,
        stream: int = 0,
        /,
        *,
        rewards: Tensor,
        per_sequence: bool,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        beta: float,
        kl_input: float,
        kl_output: float,
        estimator: str,
        out: Tensor,
    ) -> None: ...
    def logprob_backward(
        self,
        stream: int = 0,
        /,
        *,
        logits: Tensor,
        vocab_start: int,
        target_ids: Tensor,
        ignore_index: int,
        temperature: float | Tensor,
        bias: Tensor | None,
        logit_scale: float,
        softcap: float,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_lse: Tensor | None,
        entropy: Tensor | None,
        row_max: Tensor,
        log_sum: Tensor,
        out: Tensor,
    ) -> None: ...
    def logprob_exp(
        self,
        stream: int = 0,
        /,
        *,
        logits: Tensor,
        vocab_start: int,
        target_ids: Tensor,
        ignore_index: int,
        temperature: float | Tensor,
        bias: Tensor | None,
        logit_scale: float,
        softcap: float,
        row_max: Tensor,
        out: Tensor,
    ) -> None: ...
    def logprob_forward(
        self,
        stream: int = 0,
        /,
        *,
        logits: Tensor,
        vocab_start: int,
        target_ids: Tensor,
        ignore_index: int,
        temperature: float | Tensor,
        bias: Tensor | None,
        logit_scale: float,
        softcap: float,
        state: Tensor | None,
        first: bool,
        last: bool,
        logprobs: Tensor,
        entropy: Tensor | None,
        lse: Tensor,
        row_max: Tensor,
        log_sum: Tensor,
    ) -> None: ...
    def logprob_support_backward(
        self,
        stream: int = 0,
        /,
        *,
        target_ids: Tensor,
        ignore_index: int,
        temperature: float | Tensor,
        ids: Tensor,
        offsets: Tensor,
        values: Tensor,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_lse: Tensor | None,
        logprobs: Tensor,
        entropy: Tensor | None,
        row_max: Tensor,
        log_sum: Tensor,
        out: Tensor,
        scattered: bool,
    ) -> None: ...
    def logprob_support_forward(
        self,
        stream: int = 0,
        /,
        *,
        target_ids: Tensor,
        ignore_index: int,
        temperature: float | Tensor,
        ids: Tensor,
        offsets: Tensor,
        logits: Tensor | None,
        values: Tensor,
        logprobs: Tensor,
        entropy: Tensor | None,
        lse: Tensor,
        row_max: Tensor,
        log_sum: Tensor,
    ) -> None: ...
    def policy_loss(
        self,
        stream: int = 0,
        /,
        *,
        logprobs: Tensor,
        old_logprobs: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        ref_logprobs: Tensor | None,
        rollout_logprobs: Tensor | None,
        entropy: Tensor | None,
        staleness: Tensor | None,
        selected: Tensor | None,
        token_counts: Tensor | None,
        cu_seqlens: Tensor | None,
        rule: PolicyRule,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
        partials: Tensor,
        values: Tensor,
    ) -> None: ...
    def policy_select(
        self,
        stream: int = 0,
        /,
        *,
        logprobs: Tensor,
        old_logprobs: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        cu_seqlens: Tensor | None,
        pick: CovariancePick,
        selected: Tensor,
        partials: Tensor,
        counts: Tensor,
    ) -> None: ...
    def preference_backward(
        self,
        stream: int = 0,
        /,
        *,
        grad_loss: Tensor,
        slopes: Tensor,
        stats: Tensor,
        mask: Tensor,
        nll_mask: Tensor | None,
        labels: Tensor | None,
        cu_seqlens: Tensor | None,
        ld_alpha: float,
        grad: Tensor,
    ) -> None: ...
    def preference_loss(
        self,
        stream: int = 0,
        /,
        *,
        stats: Tensor,
        labels: Tensor | None,
        kl: Tensor | None,
        order: Tensor | None,
        items: Tensor | None,
        nll_items: Tensor | None,
        running_delta: Tensor | None,
        rule: PreferenceRule,
        loss: Tensor,
        metrics: Tensor,
        slopes: Tensor,
        rewards: Tensor,
        logps: Tensor,
        new_delta: Tensor | None,
    ) -> None: ...
    def preference_sums(
        self,
        stream: int = 0,
        /,
        *,
        logprobs: Tensor,
        ref_logprobs: Tensor | None,
        mask: Tensor,
        nll_mask: Tensor | None,
        log_sum_sq_probs: Tensor | None,
        cu_seqlens: Tensor | None,
        paired: bool,
        ld_alpha: float,
        stats: Tensor,
    ) -> None: ...
    def sampling_finish(self, *arguments: Any) -> None: ...
    def sampling_statistics(self, *arguments: Any) -> None: ...
    def segment_reduce(self, *arguments: Any) -> None: ...
    def value_loss_backward(
        self,
        stream: int = 0,
        /,
        *,
        grad_loss: Tensor,
        slope: Tensor,
        scale: Tensor,
        cu_seqlens: Tensor | None,
        out: Tensor,
    ) -> None: ...
    def value_loss_forward(
        self,
        stream: int = 0,
        /,
        *,
        values: Tensor,
        returns: Tensor,
        old_values: Tensor | None,
        mask: Tensor,
        cu_seqlens: Tensor | None,
        cliprange: float,
        huber_delta: float,
        unit: str,
        items: float | Tensor,
        factor: float,
        slope: Tensor | None,
        partials: Tensor,
        scale: Tensor,
        loss: Tensor,
        metrics: Tensor,
    ) -> None: ...
    def whiten(
        self,
        stream: int = 0,
        /,
        *,
        x: Tensor,
        mask: Tensor | None,
        weights: Tensor | None,
        states: Tensor | None,
        update: bool,
        shift_mean: bool,
        unbiased: bool,
        eps_in_std: bool,
        eps: float,
        clip: float,
        partials: Tensor,
        out: Tensor | None,
        state: Tensor | None,
    ) -> None: ...

# where their parts were built
cpu: Kernels
cuda: Kernels
hip: Kernels
