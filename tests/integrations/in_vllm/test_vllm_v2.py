"""Model Runner V2: its functions are there, and ours give what its formulas give.

It runs on GPUs alone.  What is looked at here are the signatures, the modules that hold the functions by
name, and the replacements themselves on a CPU.
"""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm.v1.worker.gpu.sample import gumbel, logprob

import rlkernel
from rlkernel.integrations.vllm import v2

VOCAB = 300
HOLDERS = {
    v2.SAMPLE: (
        "vllm.v1.worker.gpu.sample.gumbel", "vllm.v1.worker.gpu.sample.sampler",
        "vllm.v1.worker.gpu.spec_decode.speculator", "vllm.v1.watermarking.watermarker",
    ),
    v2.TOKENS: ("vllm.v1.worker.gpu.sample.logprob", "vllm.v1.worker.gpu.sample.prompt_logprob"),
    v2.TOPK: (
        "vllm.v1.worker.gpu.sample.logprob", "vllm.v1.worker.gpu.sample.prompt_logprob",
        "vllm.v1.worker.gpu.sample.sampler", "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
    ),
}  # fmt: skip


@pytest.fixture
def patched():
    with rlkernel.patch_vllm(ops=("v2",), strict=True) as patch:
        yield patch


def logits_of(rows, seed=0, dtype=torch.float32):
    logits = 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, :5] = -torch.inf  # as filters leave them
    return logits.to(dtype)


def test_every_module_that_holds_a_function_gets_ours():
    places = [(importlib.import_module(path), name) for name, paths in HOLDERS.items() for path in paths]
    before = [vars(module)[name] for module, name in places]
    with rlkernel.patch_vllm(ops=("v2",), strict=True) as patch:
        for (module, name), original in zip(places, before, strict=True):
            ours = vars(module)[name]
            assert ours is not original and f"{module.__name__}.{name}" in patch.replaced
            inspect.signature(ours).bind(*inspect.signature(original).parameters)
    assert [vars(module)[name] for module, name in places] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_tokens(patched, dtype):
    logits = logits_of(7, dtype=dtype)
    ids = torch.randint(0, VOCAB, (7, 4), generator=torch.Generator().manual_seed(1))
    got = logprob.compute_token_logprobs(logits, ids.int())
    want = logits.double().log_softmax(1).gather(1, ids)
    assert got.dtype == torch.float32 and got.shape == (7, 4)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    assert patched.calls[v2.TOKENS] == 1


@pytest.mark.parametrize("count", [0, 5, VOCAB])
def test_the_likeliest_tokens_and_the_ranks(patched, count):
    logits = logits_of(9)
    logits[2, 40] = logits[2, 41]  # a tie
    sampled = torch.randint(5, VOCAB, (9,), generator=torch.Generator().manual_seed(2))
    sampled[2] = 41
    out = logprob.compute_topk_scores(logits, count, sampled, cu_num_logits=[0, 9])
    truth = logits.double().log_softmax(1)
    assert torch.equal(out.logprob_token_ids[:, 0], sampled) and out.logprob_token_ids.dtype == torch.int64
    assert out.logprobs.shape == (9, 1 + count)
    torch.testing.assert_close(
        out.logprobs.double(), truth.gather(1, out.logprob_token_ids), rtol=1e-6, atol=1e-6
    )
    if count:
        torch.testing.assert_close(
            out.logprobs[:, 1:].double(), truth.topk(count).values, rtol=1e-6, atol=1e-6
        )
    wanted = (logits >= logits.gather(1, sampled[:, None])).sum(1)
    assert torch.equal(out.selected_token_ranks, wanted)
    assert out.cu_num_generated_tokens == [0, 9] and out.cu_num_generated_tokens_tensor is None


def test_prompt_logprobs_run_on_ours_chunk_by_chunk(patched, monkeypatch):
    from vllm.v1.worker.gpu.sample import prompt_logprob

    monkeypatch.setattr(prompt_logprob, "CHUNK_SIZE", 4)
    head = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(3))
    hidden = torch.randn(10, 16, generator=torch.Generator().manual_seed(4))
    tokens = torch.arange(10) * 7
    ids, scores, ranks = prompt_logprob.compute_prompt_logprobs_with_chunking(
        tokens, hidden, lambda h: h @ head.T, 3
    )
    truth = (hidden.double() @ head.double().T).log_softmax(1)
    assert torch.equal(ids[:, 0], tokens) and scores.shape == (10, 4)
    torch.testing.assert_close(scores.double(), truth.gather(1, ids), rtol=1e-5, atol=1e-5)
    assert torch.equal(ranks, (truth >= truth.gather(1, tokens[:, None])).sum(1))
    assert patched.calls[v2.TOPK] == 3


def test_vllms_own_kernels_interpreted_give_the_same():
    """In a process of their own: whether Triton is interpreted is asked at its import."""
    script = Path(__file__).with_name("interpreted_v2.py")
    interpreted = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=interpreted)
    assert done.returncode == 0 and done.stdout.endswith("the same\n"), done.stdout + done.stderr


def draw(logits, temperature, seed, pos, mapping=None, **options):
    rows = logits.shape[0]
    mapping = torch.arange(rows, dtype=torch.int32) if mapping is None else mapping
    return gumbel.gumbel_sample(
        logits, mapping, temperature, seed, pos, options.pop("apply_temperature", True), False, **options
    )


def test_tokens_are_those_of_sample_at_the_place_of_the_next_token(patched):
    logits, t = logits_of(6), torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0, 0.7])
    seed, pos = torch.arange(6) + 2**40, torch.arange(6) * 3
    want = rlkernel.sample(logits, temperature=t, seeds=seed, positions=pos + 1, return_logprobs=())
    got = draw(logits, t, seed, pos)
    assert got.dtype == torch.int64 and torch.equal(got, want.token_ids.long())
    assert got[0] == logits[0].argmax()
    # a temperature that vLLM has applied already
    cold = draw(logits / t.clamp(min=0.5)[:, None], (t > 0).float() * 0.3, seed, pos, apply_temperature=False)
    assert cold[0] == logits[0].argmax() and torch.equal(cold[2:4], got[2:4])


def test_rows_are_those_of_their_requests_whatever_stands_beside_them(patched):
    logits, t, seed = logits_of(4), torch.tensor([1.0, 0.8, 0.0]), torch.tensor([5, 6, 7])
    pos = torch.tensor([3, 9, 9, 0])
    mapping = torch.tensor([1, 0, 2, -1], dtype=torch.int32)  # the last row pads
    got = draw(logits, t, seed, pos, mapping)
    alone = [draw(logits[i : i + 1], t, seed, pos[i : i + 1], mapping[i : i + 1]) for i in range(3)]
    assert torch.equal(got[:3], torch.cat(alone))
    assert 0 <= got[3] < VOCAB


def test_tokens_are_distributed_as_the_logits(patched):
    rows = 20_000
    row = logits_of(1)[:, 5:25]
    got = draw(
        row.expand(rows, -1), torch.ones(rows), torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    )
    p = row[0].double().softmax(0)
    expected, seen = p * rows, torch.bincount(got, minlength=20).double()
    assert ((seen - expected) ** 2 / expected).sum() < 19 + 5 * 38**0.5


def test_drafts_and_logits_are_left_to_vllm(patched, monkeypatch):
    """Its kernels need a GPU: that they are called is all that can be seen."""
    logits, ones = logits_of(2), torch.ones(2)
    called = []
    monkeypatch.setattr(gumbel, "_gumbel_sample_kernel", _Recorder(called))
    monkeypatch.setattr(logprob, "_ranks_kernel", _Recorder(called))
    for function in (
        lambda: gumbel.gumbel_sample(
            logits, torch.arange(2), ones, torch.arange(2), torch.arange(2), True, True
        ),
        lambda: logprob.compute_topk_scores(logits, 0, torch.tensor([7, 8]), logits_mode=True),
    ):
        with pytest.warns(UserWarning, match="leaves"):
            function()
    assert len(called) == 2 and not patched.calls and patched.fallbacks.total() == 2


class _Recorder:
    def __init__(self, called):
        self.called = called

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.called.append(grid)
