"""Steps of SGLang's own sampler on batches of its own, without a server."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams


@contextmanager
def arguments(**fields):
    """Of a server: meanwhile they are these."""
    published = get_context().override_server_args(**{"sampling_backend": "pytorch"} | fields)
    published.install()
    try:
        yield
    finally:
        published.restore()


def sampler(kind=Sampler):
    with get_parallel().override(tp_group=SimpleNamespace(device_group=None)):  # of one rank
        return kind()


class Batch:
    """What SGLang makes the sampling information of."""

    device = "cpu"

    def __init__(self, reqs):
        self.reqs = reqs


def info(requests, vocab, mask=False):
    """Of requests, as SGLang makes it: each the arguments of its ``SamplingParams``."""
    reqs = []
    for given in requests:
        params = SamplingParams(**given)
        params.normalize(None)
        params.verify(vocab)
        reqs.append(
            SimpleNamespace(
                sampling_params=params,
                custom_logit_processor=None,
                return_sampling_mask=mask,
                sampling_logprobs_mode=None,
            )
        )
    return SamplingBatchInfo.from_schedule_batch(Batch(reqs), vocab)


def step(logits, requests, tops=None, given=None, logprobs=True, positions=None, own=None, sampling=None):
    """Tokens, and what is written about them."""
    n = len(logits)
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    tokens = (own or sampler())(
        output,
        info(requests, logits.shape[1]) if sampling is None else sampling,
        logprobs,
        tops or [0] * n,
        given or [None] * n,
        torch.arange(n) if positions is None else positions,
    )
    return tokens, output
