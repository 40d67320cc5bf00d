"""Calls that `make lint` has mypy check: it finds a wrong option, or an ignore is not needed."""

import torch

import rlkernel

logits, ids = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
hidden, weight = torch.zeros(2, 3), torch.zeros(5, 3)


def right() -> None:
    rlkernel.score_tokens(logits, ids, top_p=0.9, logit_bias={1: 2.0}, return_rank=True)
    rlkernel.sample_linear(hidden, weight, softcap=30.0, top_k=torch.tensor([3, 4]), method="gumbel")
    rlkernel.verify_chain(ids[:, None], logits[:, None].expand(2, 2, 5), seeds=1, method="grouped")


def wrong() -> None:
    rlkernel.score_tokens(logits, ids, top_q=0.9)  # type: ignore[call-arg]
    rlkernel.score_tokens(logits, ids, method="gumbel")  # type: ignore[call-arg]
    rlkernel.score_tokens(logits, ids, top_p="0.9")  # type: ignore[arg-type]
    rlkernel.sample_linear(hidden, weight, top_q=0.9)  # type: ignore[call-arg]
    rlkernel.sample_linear(hidden, weight, filter_order=1)  # type: ignore[arg-type]
    rlkernel.verify_chain(ids[:, None], logits[:, None], return_rank=True)  # type: ignore[call-arg]
    rlkernel.verify_chain(ids[:, None], logits[:, None], penalties={})  # type: ignore[arg-type]
