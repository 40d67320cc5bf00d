"""logprob: what its bits do not depend on: other rows, runs, options, threads."""

import pytest
import torch
from backends import is_slow, of, skip_unless_able
from bitwise import assert_batch_invariant, assert_equal, probe
from logprob_cases import DTYPES, run, upstream_like

from rlkernel.reference.logprob import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("logprob"))
pytestmark = pytest.mark.usefixtures("poison")


@DTYPES
@ON_EVERY_BACKEND
def test_batch_invariant(backend, device, dtype):
    if backend == "reference":
        pytest.skip("the reference promises no bits")
    for vocab in (37, 1999):
        logits = probe(7, vocab, dtype, device)
        target_ids = torch.randint(0, vocab, (7,), device=device)
        skip_unless_able(backend, "logprob", logits, target_ids)
        upstream = torch.stack(upstream_like(target_ids), -1)
        temperature = torch.rand(7, device=device) + 0.5

        def outputs(x, ids, up, t):
            out, grad = run(backend, x, ids, up.unbind(-1), temperature=t, return_entropy=True)
            return *out, grad

        assert_batch_invariant(outputs, logits, target_ids, upstream, temperature)


def test_batch_invariance_test_finds_a_sum_split_by_the_batch():
    """The same check on a sum whose parts depend on the number of rows, as those of a library's GEMM may."""

    def split_by_rows(x):
        parts = 1 + len(x) % 7
        sums = [chunk.sum(1) for chunk in x.float().exp().chunk(parts, 1)]
        return (torch.log(sum(sums)),)

    with pytest.raises(AssertionError, match="differ"):
        assert_batch_invariant(split_by_rows, probe(512, 1999, torch.float32, "cpu"))


@ON_EVERY_BACKEND
def test_same_bits_every_time_and_with_any_options(backend, device):
    inputs = make_inputs(4, 3001, device=device)
    skip_unless_able(backend, "logprob", *inputs.values())
    upstream = upstream_like(inputs["target_ids"])
    first, grad = run(backend, **inputs, upstream=upstream, return_entropy=True)
    for _ in range(2 if is_slow(backend, device) else 20):
        again, grad_again = run(backend, **inputs, upstream=upstream, return_entropy=True)
        assert_equal("entropy", again.entropy, first.entropy)
        assert_equal("grad", grad_again, grad)
    if backend != "reference":
        plain, _ = run(backend, **inputs)
        assert_equal("logprobs without entropy", plain.logprobs, first.logprobs)
        assert_equal("lse without entropy", plain.lse, first.lse)
        one_t = torch.full(inputs["target_ids"].shape, 1.0, device=device)
        assert_equal(
            "logprobs, T per row", run(backend, **inputs, temperature=one_t)[0].logprobs, first.logprobs
        )


def test_same_bits_on_any_number_of_threads():
    inputs = make_inputs(33, 4001)
    skip_unless_able("native", "logprob", *inputs.values())
    upstream, results = upstream_like(inputs["target_ids"]), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run("native", **inputs, upstream=upstream, return_entropy=True))
    finally:
        torch.set_num_threads(before)
    for out, grad in results[1:]:
        assert_equal("logprobs", out.logprobs, results[0][0].logprobs)
        assert_equal("entropy", out.entropy, results[0][0].entropy)
        assert_equal("grad", grad, results[0][1])
