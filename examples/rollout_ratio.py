"""A rollout under temperature and top-p, and the importance ratio that the trainer computes for it.

    python examples/rollout_ratio.py [--batch 64] [--length 64] [--vocab 4096] [--top-p 0.8]

The policy is a table of bigram logits, so rollout and trainer see the same logits to the bit and what is left
of the ratio is the arithmetic of the two. Three trainers: one that forgets the temperature, one that forgets
the filter, and one that is given the tokens that the filter kept.
"""

import argparse

import torch
from torch import Tensor

import rlkernel


def rollout(
    policy: Tensor, batch: int, length: int, seed: int = 0, **filters: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [B, L + 1], the log-probability of each drawn one [B, L], and the kept tokens as ids and
    offsets."""
    requests = torch.arange(batch, device=policy.device)
    seeds = seed + requests
    tokens = [requests % policy.shape[1]]
    logprobs, ids, counts = [], [], []
    for position in range(length):
        out = rlkernel.sample(
            policy[tokens[-1]], seeds=seeds, positions=position, return_support=policy.shape[1],
            return_logprobs=("processed",), **filters,
        )  # fmt: skip
        assert out.processed_logprobs is not None and out.support_ids is not None
        assert out.support_offsets is not None
        tokens.append(out.token_ids)
        logprobs.append(out.processed_logprobs)
        ids.append(out.support_ids)
        counts.append(out.support_offsets.diff())
    # rows of the rollout are steps, those of the trainer are requests
    per_step = [list(i[: c.sum()].split(c.tolist())) for i, c in zip(ids, counts, strict=True)]
    support_ids = torch.cat([per_step[t][b] for b in range(batch) for t in range(length)])
    sizes = torch.stack(counts, 1).flatten()
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    return torch.stack(tokens, 1), torch.stack(logprobs, 1), support_ids, offsets


def ratios(policy: Tensor, temperature: float, batch: int, length: int, top_p: float) -> dict[str, Tensor]:
    """The importance ratio of each token, on-policy, by what the trainer knows of the rollout."""
    tokens, rolled, ids, offsets = rollout(policy, batch, length, temperature=temperature, top_p=top_p)
    logits, targets = policy[tokens[:, :-1]], tokens[:, 1:]
    trainers = {
        "softmax(logits)": rlkernel.logprob(logits, targets),
        "softmax(logits / T)": rlkernel.logprob(logits, targets, temperature=temperature),
        "softmax(logits / T) of the kept tokens": rlkernel.logprob(
            logits, targets, temperature=temperature, support_ids=ids, support_offsets=offsets
        ),
    }
    return {name: (out.logprobs - rolled).exp() for name, out in trainers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--top-p", type=float, default=0.8)
    arguments = parser.parse_args()
    for name, value in vars(arguments).items():
        if type(value) is int and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    policy = (2.5 * torch.randn(arguments.vocab, arguments.vocab, generator=generator)).to(device)
    every = ratios(policy, arguments.temperature, arguments.batch, arguments.length, arguments.top_p)
    print(f"{'the trainer takes':40} {'mean ratio':>10} {'exactly 1':>10} {'outside [0.9, 1.1]':>19}")
    for name, ratio in every.items():
        exact, outside = (ratio == 1).double().mean(), ((ratio < 0.9) | (ratio > 1.1)).double().mean()
        print(f"{name:40} {ratio.mean():10.4f} {exact:10.1%} {outside:19.1%}")


if __name__ == "__main__":
    main()
