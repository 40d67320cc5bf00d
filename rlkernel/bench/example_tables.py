"""The reports of examples as tables for ``readme``: the same work, by a framework alone and with rlkernel."""

from typing import Any

from rlkernel.bench import measure
from rlkernel.bench.trainer_step import measured, page, spread_of

Stored = dict[str, Any]


def areal_step(stored: Stored) -> str:
    """Of ``examples/areal_step.py``: a step by AReaL's FSDP engine and actor."""
    what = "A step of PPO by AReaL's `FSDPPPOActor`"
    return _step(stored, what, {"stock": "AReaL", "patched": "`patch_areal()`"}, ", half of them the prompt")


def deepspeed_step(stored: Stored) -> str:
    """Of ``examples/deepspeed_step.py``: a step of an engine."""
    what = f"A PPO step of an engine under ZeRO-{stored['settings']['stage']}"
    return _step(stored, what, {"stock": "logits", "score": "`score()`"})


def llamafactory_step(stored: Stored) -> str:
    """Of ``examples/llamafactory_step.py``: a step by LLaMA-Factory's trainer of pairs."""
    what, ways = (
        "A step of DPO by LLaMA-Factory's `CustomDPOTrainer`, with a reference",
        {"stock": "LLaMA-Factory", "patched": "`patch_llamafactory()`"},
    )
    return _step(stored, what, ways, of_them=", half of them the prompt")


def torchtitan_step(stored: Stored) -> str:
    """Of ``examples/torchtitan_step.py``: a step with a loss of torchtitan."""
    what = "A step of GRPO of torchtitan's Qwen 3"
    ways = {"stock": "`ChunkedLossWrapper`", "fused": "`FusedLoss`"}
    return _step(stored, what, ways, of_them=", half of them the prompt")


def megatron_step(stored: Stored) -> str:
    """Of ``examples/megatron_step.py``: a step of a model of Megatron-Core."""
    what = "A step of GRPO of a `GPTModel` that is given labels, with `cross_entropy_loss_fusion`"
    return _step(stored, what, {"stock": "Megatron", "patched": "`patch_megatron()`"})


def openrlhf_step(stored: Stored) -> str:
    """Of ``examples/openrlhf_step.py``: a step by OpenRLHF's actor and policy loss."""
    what = "A step of GRPO by OpenRLHF's `Actor` and `PolicyLoss`, with entropies"
    return _step(stored, what, {"stock": "OpenRLHF", "patched": "`patch_openrlhf()`"})


def skyrl_step(stored: Stored) -> str:
    """Of ``examples/skyrl_step.py``: a step by SkyRL's model and functions."""
    what, ways = (
        "A step of GRPO by SkyRL's model and functions",
        {"stock": "SkyRL", "patched": "`patch_skyrl()`"},
    )
    return _step(stored, what, ways, of_them=", half of them the prompt")


def swift_step(stored: Stored) -> str:
    """Of ``examples/swift_step.py``: a step by methods of ms-swift's GRPO trainer."""
    what = "A step of GRPO by ms-swift's `GRPOTrainer`, with entropies"
    return _step(
        stored, what, {"stock": "ms-swift", "patched": "`patch_swift()`"}, ", half of them the prompt"
    )


def verl_step(stored: Stored) -> str:
    """Of ``examples/verl_step.py``: a step by verl's functions."""
    what = "A step of GRPO by verl's functions with `use_fused_kernels` (backend `torch`)"
    return _step(stored, what, {"stock": "verl", "patched": "`patch_verl()`"})


def _step(stored: Stored, what: str, ways: dict[str, str], of_them: str = "") -> str:
    """Of an example that ``examples/apart.py`` measures."""
    settings = stored["settings"]
    return _two_ways(
        stored,
        f"{what}: {settings['samples']} samples of {settings['length']} tokens{of_them}, "
        f"{settings.get('dtype', 'fp32')}, {settings['layers']} layers of {settings['hidden']}, "
        f"V={settings['vocabulary']}.",
        ways,
        {
            "CPU time of the step, s": ("cpu_seconds", "{:.2f}"),
            "peak extra memory, MiB": ("peak_mib", "{:.0f}"),
        },
        f"largest difference of a step's mean logprob: {stored['logprob_difference']:.1e}",
    )


def sglang_sampler(stored: Stored) -> str:
    """Of ``examples/sglang_sampler.py``: steps of the sampler."""
    settings = stored["settings"]
    return _two_ways(
        stored,
        f"A step of SGLang's sampler, top-p 0.95 with log-probabilities: {settings['requests']} requests, "
        f"{settings['dtype']}, V={settings['vocabulary']}.",
        {"stock": "SGLang", "patched": "`patch_sglang()`"},
        {
            "CPU time of the step, s": ("cpu_seconds", "{:.3f}"),
            "peak extra memory, MiB": ("peak_mib", "{:.1f}"),
        },
        f"largest difference of a step's mean log-probability: {stored['logprob_difference']:.1e}",
    )


def vllm_rollout(stored: Stored) -> str:
    """Of ``examples/vllm_rollout.py``: samples of prompts, and log-probabilities of prompts."""
    settings = stored["settings"]
    return _two_ways(
        stored,
        f"A rollout of {settings['prompts']} prompts, {settings['samples']} samples of "
        f"{settings['tokens']} tokens each, top-p 0.95 of top-k 1000 with log-probabilities; and "
        f"`prompt_logprobs` of {settings['prompts']} prompts of {settings['scored']} tokens. fp32, "
        f"{settings['layers']} layers of {settings['hidden']}, V={settings['vocabulary']}.",
        {"stock": "vLLM", "patched": "`patch_vllm()`"},
        {
            "rollout, CPU time, s": ("rollout_cpu", "{:.2f}"),
            "rollout, peak extra memory, MiB": ("rollout_mib", "{:.0f}"),
            "scoring of prompts, CPU time, s": ("scoring_cpu", "{:.2f}"),
            "scoring of prompts, peak extra memory, MiB": ("scoring_mib", "{:.0f}"),
        },
        f"largest difference of a prompt's log-probability: {stored['logprob_difference']:.1e}",
    )


def vllm_attention(stored: Stored) -> str:
    """Of ``examples/vllm_attention.py``: decode steps, and attention in them, by what requests share."""
    settings = stored["settings"]
    rows = []
    for case in stored["cases"]:
        found, tokens = case["summary"], f"{case['prompt']} tokens"
        rows.append(
            [
                case["heads"],
                str(case["requests"]),
                f"a prompt of {tokens}" if case["shared"] else f"nothing of {tokens}",
            ]
        )
        for what in ("attention", "step"):
            rows[-1] += [f"{found[f'{what}_ms_{mode}']:.1f}" for mode in ("stock", "patched")]
            rows[-1].append(f"{found[f'{what}_ratio']:.2f}x{_between(case, what)}")
        rows[-1].append(f"{found['fewer_bytes']:.1f}x")
    figures = [
        f"{what}, {of}" for what in ("attention", "step") for of in ("vLLM, ms", "ours, ms", "vLLM / ours")
    ]
    return page(
        stored,
        f"CPU time of a decode step of {settings['layers']} layers of {settings['hidden']}, D=64, "
        f"{settings['dtype']}: medians of {settings['pairs']} pairs.",
        ["Hq / Hkv", "requests", "they share", *figures, "fewer KV bytes"],
        rows,
        "attention is all layers', with vLLM's metadata and our plan; "
        "where nothing is shared both are vLLM's kernel",
        "in brackets what the middle half of the pairs' own ratios lies between",
    )


def _between(case: Stored, what: str) -> str:
    pairs = zip(case["stock"][what], case["patched"][what], strict=True)
    quartiles = measure.quartiles([stock / patched for stock, patched in pairs])
    return f" ({quartiles[0]:.2f} to {quartiles[1]:.2f})" if quartiles else ""


def packed_grpo(stored: Stored) -> str:
    """Of ``examples/packed_grpo.py``: logprobs before the update, the policy's, and their gradients."""
    settings = stored["settings"]
    return _two_ways(
        stored,
        f"A GRPO step, old logprobs, policy's and backward: {settings['groups']} group(s), "
        f"P={settings['prompt']}, L={settings['length']}, G={settings['group']}, fp32, "
        f"{settings['layers']} layers of {settings['hidden']}, V={settings['vocabulary']}; both ways score "
        "with `linear_logprob`.",
        {"dense": "padded batch", "packed": "`packed_logprobs()`"},
        {
            "CPU time of the step, s": ("cpu_seconds", "{:.2f}"),
            "peak extra memory, MiB": ("peak_mib", "{:.0f}"),
            "rows of a pass": ("rows", "{:.0f}"),
        },
        f"largest difference of a gradient, of the largest gradient: {stored['gradient_difference']:.1e}",
    )


def _two_ways(
    stored: Stored, about: str, modes: dict[str, str], wanted: dict[str, tuple[str, str]], note: str
) -> str:
    """A table of both modes, and the first one's figures over the second one's."""
    columns = ["", *modes.values(), " / ".join(modes)]
    return page(stored, about, columns, measured(stored, modes, wanted), note, spread_of(stored, modes))
