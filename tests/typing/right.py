"""A user's script: a type checker in its strict mode finds nothing here."""

import torch
from torch import Tensor
from typing_extensions import assert_type

import rlkernel
from rlkernel.types import Backend, LossType

logits, ids = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
hidden, weight = torch.zeros(2, 3), torch.zeros(5, 3)


def entropies(asked: bool) -> None:
    assert_type(rlkernel.logprob(logits, ids, temperature=0.7, return_entropy=True).entropy, Tensor)
    assert_type(rlkernel.logprob(logits, ids).entropy, None)
    assert_type(rlkernel.logprob(logits, ids, return_entropy=asked).entropy, Tensor | None)
    logprobs, entropy, lse = rlkernel.linear_logprob(hidden, weight, ids, softcap=30.0, return_entropy=True)
    assert_type(logprobs + entropy + lse, Tensor)
    assert_type(rlkernel.linear_logprob(hidden, weight, ids, algorithm="tiled").lse, Tensor)


def losses(loss_type: LossType, mask: Tensor) -> Tensor:
    out = rlkernel.policy_loss(
        logits,
        None,
        logits,
        mask,
        loss_type=loss_type,
        loss_agg_mode="seq-mean-token-sum",
        correction="icepop",
    )
    head = rlkernel.linear_policy_loss(
        hidden[None],
        weight,
        ids[None],
        None,
        logits,
        mask,
        loss_type="dapo",
        epsilon_high=0.28,
        return_entropy=True,
    )
    assert_type(head.entropy, Tensor)
    preset = rlkernel.policy_loss_preset("gspo")
    return out.loss + head.loss + rlkernel.policy_loss(logits, None, logits, mask, **preset).loss


def attention(q: Tensor, k: Tensor, v: Tensor, batch: rlkernel.PrefixBatch, backend: Backend) -> None:
    assert_type(rlkernel.attention(q, k, v, window=128), Tensor)
    with rlkernel.use_backend(backend):
        out, lse = rlkernel.prefix_shared_attention(q, k, v, batch, return_lse=True, parity="bitwise")
    assert_type((out, lse), tuple[Tensor, Tensor])


def drawn(seeds: Tensor) -> Tensor:
    out = rlkernel.sample(
        logits, top_p=0.95, seeds=seeds, filter_order="joint", return_logprobs=("processed",)
    )
    rlkernel.sample_linear(hidden, weight, method="gumbel", store_logits="auto", seeds=seeds)
    return rlkernel.group_advantages(logits[:, 0], group_size=2, estimator="rloo") + out.token_ids


def model(network: torch.nn.Module, batch: rlkernel.PrefixBatch) -> Tensor:
    rlkernel.register_hf()
    with rlkernel.batch_invariant(level="tensor_parallel"):
        return rlkernel.packed_logprobs(network, batch, return_entropy=True, max_tokens=4096).entropy


def trained() -> None:
    with rlkernel.patch_trl(prefix_sharing="require", dropout="shared", batch_invariant=True) as patch:
        print(patch.name)
    rlkernel.patch_vllm(["sampler", "attention"], strict=True).undo()
