"""Results of the public functions."""

from typing import NamedTuple

from torch import Tensor


class LogprobOutput(NamedTuple):
    """Per-token statistics of a softmax over the vocabulary, in nats; fp32 (fp64 for fp64 input).

    ``logprobs`` of the target token, ``entropy`` of the whole distribution (None unless asked for) and
    ``lse``, the log-sum-exp of the logits after temperature.  All have the shape of the target ids, are
    differentiable, and are 0 on ignored rows.
    """

    logprobs: Tensor
    entropy: Tensor | None
    lse: Tensor
