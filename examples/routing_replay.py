"""What a replay of the rollout's routes leaves of the difference between rollout and trainer.

    python examples/routing_replay.py [--layers 8] [--experts 32] [--top-k 4] [--batch 16] [--length 32]

A mixture of experts with random weights draws tokens in bf16, over a KV cache, and its routes are recorded.
The trainer has the same weights in fp32 and scores what was drawn: with its own routes, and with the
rollout's. A token whose router decides narrowly goes to other experts in another precision; the replay takes
that away, and leaves what rounding alone does.
"""

import argparse

import torch
from torch import Tensor

from rlkernel import consistency, routing_replay


def make_models(layers: int, experts: int, top_k: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(the rollout's, in bf16; the trainer's, with the same weights in fp32)."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=experts,
        num_experts_per_tok=top_k, norm_topk_prob=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    rollout = AutoModelForCausalLM.from_config(config, experts_implementation="eager").bfloat16().eval()
    for parameter in rollout.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    trainer = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    trainer.load_state_dict(rollout.state_dict())
    return rollout, trainer


def drawn_logprobs(logits: Tensor, ids: Tensor, length: int) -> Tensor:
    """Of the last ``length`` tokens: [B, length]."""
    logprobs = logits[:, -length - 1 : -1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[:, -length:, None])[..., 0]


@torch.no_grad()
def compare(
    layers: int = 8, experts: int = 32, top_k: int = 4, batch: int = 16, length: int = 32
) -> tuple[Tensor, consistency.Report, consistency.Report]:
    """(the overlap of both sides' routes by layer, the report without replay, and with it)."""
    rollout, trainer = make_models(layers, experts, top_k)
    prompts = torch.randint(0, 512, (batch, 8))
    with routing_replay.record(rollout) as recording:
        out = rollout.generate(  # type: ignore[operator]
            prompts, max_new_tokens=length, do_sample=True, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    ids = out.sequences
    logits = torch.stack([*out.logits, torch.zeros_like(out.logits[0])], 1)  # [B, length + 1, V]
    theirs = drawn_logprobs(logits, ids, length)
    free = drawn_logprobs(trainer(ids).logits, ids, length)
    # the last token was drawn and never ran: it has no record
    rows = recording.routes.split([ids.shape[1] - 1] * batch)
    routes = routing_replay.pad_like(rows, torch.ones_like(ids))
    with routing_replay.replay(trainer, routes) as replay:
        replayed = drawn_logprobs(trainer(ids).logits, ids, length)
    return replay.overlap, consistency.compare(free, theirs), consistency.compare(replayed, theirs)


def main() -> None:
    from before_after import checked, need

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("layers", 8), ("experts", 32), ("top-k", 4), ("batch", 16), ("length", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = checked(parser, parser.parse_args())
    need("transformers")
    overlap, free, replayed = compare(**vars(options))
    shares = " ".join(f"{share:.3f}" for share in overlap.tolist())
    print(f"the rollout's experts that the trainer would choose, by layer: {shares}\n")
    print(f"with the trainer's own routes\n{free}\n\nwith the rollout's routes\n{replayed}")


if __name__ == "__main__":
    main()
