"""Steps of SGLang's sampler: SGLang by itself, and after rlkernel.patch_sglang().

    python examples/sglang_sampler.py                                  # half a minute
    python examples/sglang_sampler.py --vocabulary 151936 --requests 64
    python examples/sglang_sampler.py --json result.json               # every figure, step by step

The sampler and what it is told of a batch are SGLang's, on a CPU; the logits are random and the same in
both runs, each of which has a process of its own.  A step draws a token of each request with top-p, and
reports its log-probability, and that of one given token, which both runs have the same.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import apart

NEEDED = ("sglang",)
MODES = ("stock", "patched")


class Batch:
    """What SGLang makes the sampling information of."""

    device = "cpu"

    def __init__(self, params: Any, requests: int) -> None:
        self.reqs = [
            SimpleNamespace(
                sampling_params=params, custom_logit_processor=None, return_sampling_mask=False,
                sampling_logprobs_mode=None,
            )
            for _ in range(requests)
        ]  # fmt: skip


def sample(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps in this process. Returns what it measured, step by step."""
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams

    import rlkernel

    torch.set_num_threads(args.threads)
    if mode == "patched":
        rlkernel.patch_sglang(["sampler"], strict=False)
    get_context().override_server_args(sampling_backend="pytorch").install()  # without a server
    with get_parallel().override(tp_group=SimpleNamespace(device_group=None)):  # of one rank
        sampler = Sampler()
    params = SamplingParams(temperature=0.8, top_p=0.95)
    params.normalize(None)
    info = SamplingBatchInfo.from_schedule_batch(Batch(params, args.requests), args.vocabulary)
    places, tops = torch.arange(args.requests), [0] * args.requests
    g = torch.Generator().manual_seed(1)
    steps = apart.Steps()
    for _ in range(args.steps + 1):
        logits = 3 * torch.randn(args.requests, args.vocabulary, generator=g)
        output = LogitsProcessorOutput(next_token_logits=logits)
        given = torch.randint(args.vocabulary, (args.requests, 1), generator=g).tolist()
        with steps.measured():
            sampler(output, info, True, tops, given, places)
        steps.scored(torch.cat(output.next_token_token_ids_logprobs_val))
    return steps.found


def main() -> None:
    parser = apart.documented(__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after one that is not")
    apart.main(sample, parser, MODES, NEEDED)


if __name__ == "__main__":
    main()
