"""value_loss: what its bits do not depend on: layout, other sequences, runs, threads, warp size."""

import pytest
import torch
from backends import is_slow, of, running, skip_unless_able
from bitwise import assert_equal
from value_loss_cases import CLIP, make_inputs, run

import rlkernel

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("value_loss"))
pytestmark = pytest.mark.usefixtures("poison")


@ON_EVERY_BACKEND
def test_packed_sequences_give_the_bits_of_padded_ones(backend, device):
    """Empty sequences too, in front, between and behind; offsets of either width."""
    lengths = [0, 3, 2048, 0, 0, 4097, 1, 0]
    padded = make_inputs(len(lengths), max(lengths), device=device)
    inside = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
    padded["mask"] &= inside
    starts = torch.tensor([0, *lengths], device=device).cumsum(0)
    packed = {k: v[inside] for k, v in padded.items()}
    skip_unless_able(backend, "value_loss", padded["values"])
    for mode in ("token-mean", "seq-mean-token-mean"):
        want = run(backend, padded, **CLIP, loss_agg_mode=mode)
        for offsets in (starts, starts.int()):
            loss, metrics, grad = run(backend, packed | {"cu_seqlens": offsets}, **CLIP, loss_agg_mode=mode)
            if backend == "reference":  # promises no bits
                torch.testing.assert_close((loss, metrics, grad), (*want[:2], want[2][inside]))
                continue
            assert_equal("loss", loss, want[0])
            assert_equal("metrics", metrics, want[1])
            assert_equal("grad", grad, want[2][inside])


@ON_EVERY_BACKEND
def test_a_sequence_does_not_feel_the_others(backend, device):
    """Alone, permuted, at another place of the packed tensor: the same sum and the same gradient."""
    if backend == "reference":
        pytest.skip("the reference promises no bits")
    inputs = make_inputs(5, 2300, device=device)
    skip_unless_able(backend, "value_loss", inputs["values"])
    options = dict(CLIP, loss_agg_mode="token-sum")
    whole = run(backend, inputs, **options)[2]
    order = torch.tensor([3, 0, 4, 2, 1], device=device)
    permuted = run(backend, {k: v[order] for k, v in inputs.items()}, **options)[2]
    assert_equal("permuted", permuted, whole[order])
    for i in range(5):
        alone = run(backend, {k: v[i : i + 1] for k, v in inputs.items()}, **options)
        assert_equal(f"gradient of {i}", alone[2], whole[i : i + 1])
        others_masked = torch.zeros_like(inputs["mask"])
        others_masked[i] = inputs["mask"][i]
        amid = run(backend, inputs | {"mask": others_masked}, **options)
        assert_equal(f"sum of {i}", amid[0], alone[0])
        assert_equal(f"metrics of {i}", amid[1], alone[1])
        packed = {k: torch.cat([v[0, :7], v[i], v[1, :9]]) for k, v in inputs.items()}
        packed["mask"] = packed["mask"].clone()
        packed["mask"][:7] = packed["mask"][-9:] = False
        starts = torch.tensor([0, 7, 2307, 2316], device=device)
        assert_equal(
            f"packed sum of {i}", run(backend, packed | {"cu_seqlens": starts}, **options)[0], alone[0]
        )


def test_the_invariance_test_finds_a_plain_sum():
    """What a sum over the flat tensor does: its order follows from the place, so its bits do too."""
    x = make_inputs(1, 4000)["values"][0]
    sums = {x.sum().item(), *(torch.cat([torch.zeros(k), x]).sum().item() for k in range(1, 60))}
    assert len(sums) > 1


@ON_EVERY_BACKEND
def test_same_bits_every_time(backend, device):
    inputs = make_inputs(4, 3000, device=device)
    skip_unless_able(backend, "value_loss", inputs["values"])
    first = run(backend, inputs, **CLIP, loss_agg_mode="seq-mean-token-mean")
    for _ in range(2 if is_slow(backend, device) else 100):
        again = run(backend, inputs, **CLIP, loss_agg_mode="seq-mean-token-mean")
        for name, a, b in zip(("loss", "metrics", "grad"), again, first, strict=True):
            assert_equal(name, a, b)
    with torch.no_grad(), running(backend):
        plain = rlkernel.value_loss(**inputs, **CLIP, loss_agg_mode="seq-mean-token-mean")
    assert_equal("loss without a gradient", plain.loss, first[0])


def test_same_bits_on_any_number_of_threads():
    inputs, results, before = make_inputs(40, 3000), [], torch.get_num_threads()
    skip_unless_able("native", "value_loss", inputs["values"])
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run("native", inputs, **CLIP))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for name, a, b in zip(("loss", "metrics", "grad"), result, results[0], strict=True):
            assert_equal(name, a, b)


def test_both_warp_sizes_give_the_same_bits():
    inputs = make_inputs(20, 2100, packed=True)
    results = [run(b, inputs, **CLIP) for b in ("emulated-warp32", "emulated-warp64")]
    for name, a, b in zip(("loss", "metrics", "grad"), *results, strict=True):
        assert_equal(name, a, b)
