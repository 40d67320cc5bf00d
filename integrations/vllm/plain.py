"""The step of most rollouts: nothing changes the logits or filters them, and the log-probability of the token
is asked for, alone or beside that of the likeliest one.

What ``rlkernel.sample`` and the sampler make of it, to the bit, in a few calls: with a small model they would
take as long as its layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from rlkernel.calls.sampling import Sampling, SamplingCall
from rlkernel.integrations.vllm import adjustments, positions, support
from rlkernel.ops.sampling import inputs, outputs
from rlkernel.ops.sampling.drawing import draw
from rlkernel.ops.sampling.ranks import Wanted
from rlkernel.ops.sampling.trained import named_again

WANTED = Wanted("raw", 1, None)
WANTS = "logprobs", "rank", "seeds"


def sampled(logits: Tensor, metadata: Any) -> SamplerOutput | None:
    """None where the batch asks for more."""
    top = metadata.max_num_logprobs
    if top not in (0, 1) or metadata.logprob_token_ids or not logits.is_cpu or support.asked():
        return None
    if not adjustments.unchanged(metadata):
        return None
    rows, z = inputs.rows_of(logits)
    n, device = len(z), z.device
    request = Sampling(
        temperature=inputs.temperature_of(adjustments.temperature(metadata), rows),
        seeds=inputs.seeds_of(positions.seeds(metadata.generators, n, device), rows),
        positions=positions.positions(n, device) if metadata.generators else None,
        raw=True,
        rank=True,
        rank_ties="max",
    )
    call = SamplingCall(z, None, request, WANTS)
    stats = outputs.as_trained(call, draw(call), seen=("raw",))
    tokens, own = stats.token_ids, stats.raw_logprobs
    assert own is not None
    ids, logprobs = tokens[:, None], own[:, None]
    if top:
        likeliest = draw(SamplingCall(z, None, Sampling(temperature=0.0, seeds=request.seeds, softmax=True)))
        assert likeliest.log_sum is not None
        found = None, likeliest.token_ids[:, None], (0.0 - likeliest.log_sum)[:, None], None
        _, others, values, _ = named_again(found, stats, WANTED)
        assert others is not None and values is not None
        ids, logprobs = torch.cat((ids, others), 1), torch.cat((logprobs, values), 1)
    ids = ids.clamp(min=0).to(torch.int32)  # vLLM has no token that is none
    return SamplerOutput(
        sampled_token_ids=ids[:, :1].contiguous(),
        logprobs_tensors=LogprobsTensors(ids, logprobs, stats.rank),
    )
