"""logprob: what its bits do not depend on: other rows, runs, options, threads."""

import os
import sys

import instruction_sets
import pytest
import torch
from backends import is_slow, of, skip_unless_able
from bitwise import assert_batch_invariant, assert_equal, probe
from logprob_cases import DTYPES, run, upstream_like

import rlkernel
from rlkernel import native
from rlkernel.calls.logprob import LogprobCall, RowGrads
from rlkernel.native import logprob as kernel
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


def results() -> list[torch.Tensor]:
    """Of more than a block of 4096 logits, with tails of a vector and of a step."""
    found = []
    for dtype in native.DTYPES:
        inputs = make_inputs(3, 9001, dtype=dtype)
        inputs["logits"][1, 17:4000] = -torch.inf
        upstream = upstream_like(inputs["target_ids"])
        for options in ({"return_entropy": True}, {"temperature": 0.7}):
            out, grad = run("native", **inputs, upstream=upstream, **options)
            found += [x for x in (*out, grad) if x is not None]
    return found


def test_avx2_has_the_bits_of_avx512(tmp_path):
    if "avx2" not in native.extension().built()["cpu"] or os.environ.get("RLKERNEL_CPU_ISA") == "baseline":
        pytest.skip("this processor's kernels are baseline only")
    instruction_sets.assert_not_seen(sys.modules[__name__], "avx2", tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_rows_have_the_bits_of_the_same_in_fp32(dtype):
    """A rollout in bf16, a trainer in fp32: each logit joins the same lane in the same order, with any tail.

    Where numbers of 16 bits lie is seen by their bits: so there are rows without a number above 0, and NaN of
    either sign."""
    for vocab in (1, 15, 16, 31, 33, 4096 + 17, 9001):
        inputs = make_inputs(9, vocab, dtype=dtype, ignored=0.0)
        logits, last = inputs["logits"], vocab - 1
        logits[1] = -logits[1].abs() - 3
        logits[2], logits[3], logits[4, 1::2] = -torch.inf, -0.0, -torch.inf
        logits[5, last], logits[6, last] = torch.inf, torch.nan
        logits.view(torch.int16)[7, last] = -1  # a NaN with a sign
        logits[8] -= 1000  # a block whose exponentials are all of the normal range, and one of 0
        logits[8, 0] = 0.0
        wide = inputs | {"logits": logits.float()}
        with rlkernel.use_backend("native"):
            got = rlkernel.logprob(**inputs, temperature=0.7, return_entropy=True)
            want = rlkernel.logprob(**wide, temperature=0.7, return_entropy=True)
        for name, value in got._asdict().items():
            assert_equal(f"{name} of {vocab}", value, getattr(want, name))
        assert got.lse.isfinite().logical_not().nonzero().flatten().tolist() == [2, 5, 6, 7], vocab


@pytest.mark.parametrize("entropy_gradient", [0.0, 0.3])
def test_a_gradient_of_bf16_is_that_of_fp32_rounded_to_nearest_even(entropy_gradient):
    """Two numbers are rounded at once, in halves of 16 bits: as torch rounds them, ties and NaN included."""
    logits = make_inputs(4, 4099, dtype=torch.bfloat16)["logits"]
    logits[0] = 0.0  # each gradient is g * 2^-12, and g: ties of an even and an odd upper half, and NaN
    logits[0, 4096:] = -torch.inf
    target_ids = torch.tensor([4098, 7, 7, 4098])
    temperature = torch.tensor([1.0, 1.0, 0.6, 1.4])
    gradient = torch.tensor([1.0, 1.0, -3.7, 0.2])
    halves = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-23, torch.nan]
    for scale in halves if entropy_gradient == 0 else halves[-1:] + [0.9]:
        gradient[0] = scale
        found = {}
        for dtype in (torch.float32, torch.bfloat16):
            call = LogprobCall(logits.to(dtype), target_ids, temperature, -100, True)
            if dtype == torch.float32:
                statistics = kernel.forward(call)
            up = torch.full_like(gradient, entropy_gradient)
            (found[dtype],) = kernel.backward(call, statistics, RowGrads(torch.zeros(4), up, gradient))
        assert_equal(f"gradient {scale}", found[torch.bfloat16], found[torch.float32].bfloat16())
        if entropy_gradient == 0:
            assert found[torch.bfloat16][0, 0].isnan() == (scale != scale)
