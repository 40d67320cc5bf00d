"""One GRPO step of a Hugging Face model, every sample with its own copy of the prompt and then packed.

    python examples/packed_grpo.py [--prompt 512] [--length 64] [--group 8] [--groups 1]
    python examples/packed_grpo.py --json result.json                  # every figure, step by step

The same rollout, the same loss, once as a padded batch through the model's own attention, once through
``rlkernel.packed_logprobs``, where a group's prompt runs once. Prints both losses, time, memory and rows of
both steps and how far the gradients are apart. Both score tokens with ``linear_logprob``: what differs is the
rows.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rlkernel
from rlkernel.bench import example_tables, memory, report


def make_model(layers: int = 4, hidden: int = 256) -> Any:
    """A small Qwen2 with random weights, on the packed attention, which also serves its ordinary calls."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2048, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1 << 16,
    )  # fmt: skip
    rlkernel.register_hf()
    return AutoModelForCausalLM.from_config(config, attn_implementation="rlkernel")


def make_rollout(prompt: int, length: int, group: int, groups: int) -> dict[str, Tensor]:
    """As a trainer holds it: prompts padded on the left, completions on the right, one reward each."""
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(prompt // 2, prompt, (groups,), generator=g)
    sizes[0] = prompt
    ids = torch.randint(3, 2048, (groups, prompt), generator=g)
    ends = torch.randint(length // 2, length + 1, (groups * group, 1), generator=g)
    ends[0] = length
    prompts_mask = torch.arange(prompt) >= prompt - sizes[:, None]
    return {
        "prompt_ids": ids.repeat_interleave(group, 0),
        "prompt_mask": prompts_mask.repeat_interleave(group, 0),
        "completion_ids": torch.randint(3, 2048, (groups * group, length), generator=g),
        "completion_mask": torch.arange(length) < ends,
        "rewards": torch.rand(groups * group, generator=g),
    }


def dense_logprobs(model: Any, rollout: dict[str, Tensor]) -> Tensor:
    """[N, L], from a batch in which every sample holds its prompt."""
    ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], 1)
    mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    hidden = model.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
    rows = hidden[:, -rollout["completion_ids"].shape[1] - 1 : -1]
    targets = rollout["completion_ids"].masked_fill(~rollout["completion_mask"], -100)
    return rlkernel.linear_logprob(rows, model.lm_head.weight, targets).logprobs


def packed_logprobs(model: Any, rollout: dict[str, Tensor]) -> Tensor:
    """[N, L], from rows in which every prompt stands once."""
    names = "prompt_ids", "prompt_mask", "completion_ids", "completion_mask"
    batch = rlkernel.PrefixBatch.from_padded(*(rollout[name] for name in names))
    return batch.unpack(rlkernel.packed_logprobs(model, batch).logprobs)


def step(
    model: Any, rollout: dict[str, Tensor], score: Callable[[Any, dict[str, Tensor]], Tensor], group: int
) -> tuple[float, Tensor, float]:
    """Loss, gradients as one vector, seconds: logprobs before the update, then those of the policy."""
    model.zero_grad()
    began = time.perf_counter()
    with torch.no_grad():
        old = score(model, rollout)
    advantages = rlkernel.group_advantages(rollout["rewards"], group_size=group)
    loss = rlkernel.policy_loss(score(model, rollout), old, advantages, rollout["completion_mask"]).loss
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()  # waits for the GPU
    return float(loss.detach()), gradients, time.perf_counter() - began


def measured(
    model: Any,
    rollout: dict[str, Tensor],
    score: Callable[[Any, dict[str, Tensor]], Tensor],
    group: int,
    steps: int,
) -> tuple[Tensor, dict[str, Any]]:
    """The gradients, and what some steps took, after one that makes tables and memory."""
    device = rollout["rewards"].device.type
    record: dict[str, Any] = {"seconds": [], "cpu_seconds": []}
    for _ in range(steps + 1):
        began = time.process_time()
        loss, gradients, seconds = step(model, rollout, score, group)
        record["seconds"].append(seconds)
        record["cpu_seconds"].append(time.process_time() - began)
    record["loss"] = loss
    peak = memory.peak_extra(lambda: step(model, rollout, score, group), device)
    names = "seconds", "cpu_seconds"
    record["summary"] = {name: statistics.median(record[name][1:]) for name in names} | {
        "peak_mib": peak / 2**20
    }
    return gradients, record


def main() -> None:
    from before_after import checked, need

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument(
        "--group", type=int, default=8, help="of one: no advantage, and no gradient to compare"
    )
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one that is not")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every figure, step by step, to this file")
    options = checked(parser, parser.parse_args())
    need("transformers")
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(options.layers, options.hidden).to(device)
    rollout = make_rollout(options.prompt, options.length, options.group, options.groups)
    rollout = {name: x.to(device) for name, x in rollout.items()}
    dense_gradients, dense = measured(model, rollout, dense_logprobs, options.group, options.steps)
    packed_gradients, packed = measured(model, rollout, packed_logprobs, options.group, options.steps)
    names = "prompt_ids", "prompt_mask", "completion_ids", "completion_mask"
    batch = rlkernel.PrefixBatch.from_padded(*(rollout[name] for name in names))
    dense["summary"]["rows"] = rollout["rewards"].numel() * (options.prompt + options.length)
    packed["summary"]["rows"] = batch.model_kwargs()["input_ids"].shape[1]
    settings = {k: v for k, v in vars(options).items() if isinstance(v, int)}
    head = report.header([], device) | {"threads": options.threads}
    head["command"] = shlex.join(["python", "examples/packed_grpo.py", *sys.argv[1:]])
    apart = float((dense_gradients - packed_gradients).abs().max() / dense_gradients.abs().max())
    result = {
        "header": head,
        "dense": dense,
        "packed": packed,
        "gradient_difference": apart,
        "settings": settings | {"vocabulary": model.config.vocab_size},
    }
    print(example_tables.packed_grpo(result))
    print(f"losses {dense['loss']:+.7f} and {packed['loss']:+.7f}; {batch}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
