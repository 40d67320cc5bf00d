"""A process in which vLLM's own kernels of Model Runner V2 run, interpreted, beside what replaces them."""

import torch
import triton
import triton.language as tl
import vllm.triton_utils

import rlkernel

VOCAB = 2500  # more than two blocks of either kernel
ROWS = 6


def close(a, b):
    return torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6)


def main():
    # vLLM sees no GPU, and has names without a meaning in Triton's place
    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl
    from vllm.v1.worker.gpu.sample import gumbel, logprob

    from rlkernel.integrations.vllm import v2

    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCAB, generator=draw)
    logits[:, :5] = -torch.inf
    logits[2, 40] = logits[2, 41]  # a tie
    ids = torch.randint(0, VOCAB, (ROWS, 4), generator=draw)
    sampled = torch.randint(5, VOCAB, (ROWS,), generator=draw)
    sampled[2] = 41
    rows = torch.arange(ROWS)
    arguments = (logits, rows, torch.zeros(ROWS), rows, rows, True, False)
    theirs = (
        logprob.compute_token_logprobs(logits, ids),
        [logprob.compute_topk_scores(logits, count, sampled) for count in (0, 7)],
        gumbel.gumbel_sample(*arguments),
    )
    with rlkernel.patch_vllm(ops=("v2",), strict=False) as patch:
        close(logprob.compute_token_logprobs(logits, ids), theirs[0])
        for count, want in zip((0, 7), theirs[1], strict=True):
            mine = logprob.compute_topk_scores(logits, count, sampled)
            assert torch.equal(mine.logprob_token_ids, want.logprob_token_ids)
            assert torch.equal(mine.selected_token_ranks, want.selected_token_ranks)
            close(mine.logprobs, want.logprobs)
        assert torch.equal(gumbel.gumbel_sample(*arguments), theirs[2])  # greedy: a draw has other noise
        assert patch.calls == {v2.TOKENS: 1, v2.TOPK: 2, v2.SAMPLE: 1} and not patch.refused
    print("the same")


if __name__ == "__main__":
    main()
