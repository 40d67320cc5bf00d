"""Every Triton kernel compiles for the GPUs that rlkernel names, holds its values in registers, and fits.

See triton_aot.py for what is compiled.  Registers, shared memory and instructions are those of the ledger,
benchmarks/results/codegen.json; write it anew only together with the reason.
"""

import re
import sys
from pathlib import Path

import pytest

from rlkernel.bench.ledger import Ledger

sys.path.insert(0, str(Path(__file__).parent / "codegen"))

import portable

triton = pytest.importorskip("triton", reason="Triton is not installed")

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
OLDER = VERSION < portable.TRITON
COMPILED, TARGETS = portable.TARGETS, portable.KEPT

# bytes of shared memory that a program can have
MOST_SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx950": 163840}


@pytest.fixture(scope="module")
def reports():
    """What compiling says, for each target: once for all workers and for `make check-codegen`."""
    return portable.reports()


@pytest.mark.parametrize("target", COMPILED)
def test_no_kernel_spills(reports, target):
    assert portable.spills({target: reports[target]}) == []
    planted = {target: {"cases": {"planted": {"spilling_kernel": reports[target]["planted"]}}}}
    assert portable.spills(planted), "the gate accepts a kernel that spills"


@pytest.mark.parametrize("target", COMPILED)
def test_every_kernel_fits(reports, target):
    for case, kernels in reports[target]["cases"].items():
        for kernel, used in kernels.items():
            assert used["shared"] <= MOST_SHARED[target], f"{kernel} cannot run on {target} ({case}): {used}"


@pytest.mark.skipif(OLDER, reason="what was measured is Triton 3.7.1")
@pytest.mark.parametrize(("target", "unit"), [("sm_90", "wgmma.mma_async"), ("sm_100", "tcgen05.mma")])
def test_described_tiles_are_copied_and_multiplied_by_the_units_for_tiles(reports, target, unit):
    cases, kernel = reports[target]["cases"], "matmul_descriptor_kernel"
    found = {case: kernels[kernel]["units"] for case, kernels in cases.items() if kernel in kernels}
    assert len(found) == 4
    for case, (copies, multiplies) in found.items():  # and nothing else
        assert copies == "cp.async.bulk.tensor" and multiplies.startswith(unit), (case, copies, multiplies)


TILED = ("product_kernel", "logits_gradient_kernel", "gradient_product_kernel")


@pytest.mark.skipif(OLDER, reason="what was measured is Triton 3.7.1")
def test_hoppers_fused_tiles_are_copied_by_descriptors(reports):
    """Of 128 x 256 where the sums have room; by no warps of their own, which gave wrong sums there."""
    wide = 0
    for case, kernels in reports["sm_90"]["cases"].items():
        if case.startswith("linear_logprob: fused") and "odd H" not in case:
            for kernel in set(kernels) & set(TILED):
                copies, multiplies = kernels[kernel]["units"]
                assert copies == "cp.async.bulk.tensor" and multiplies.startswith("wgmma"), (case, kernel)
                wide += multiplies.endswith("m64n256k16")
                assert not kernels[kernel]["specialized"], (case, kernel)
    assert wide >= 5


@pytest.mark.parametrize("target", [name for name in COMPILED if name.startswith("gfx")])
def test_amds_matrix_cores_multiply(reports, target):
    """In 16 bits: a tile whose operands were converted to fp32 would be six times as slow."""
    for case, kernels in reports[target]["cases"].items():
        for kernel in set(kernels) & {*TILED, "matmul_kernel"} if "fp32" not in case else ():
            units = kernels[kernel]["units"]
            assert units and all(unit.endswith(("bf16", "f16", "bf16_1k")) for unit in units), (
                case,
                kernel,
                units,
            )


@pytest.mark.skipif(OLDER, reason="what was measured is Triton 3.7.1")
def test_gradients_of_attention_fill_hoppers_tensor_cores(reports):
    """Plain runs 64 columns of scores at a time, masked ones 32; the sums as wide as a head or half of it."""
    cases = reports["sm_90"]["cases"]
    key, query = "attention_key_grad_kernel", "attention_query_grad_kernel"
    for case, kernel, columns in (
        ("bf16 D = 64", key, {32, 64}),
        ("bf16 D = 128", key, {32, 64, 128}),
        ("bf16 D = 128", query, {32, 64, 128}),
        ("bf16 D = 128 stored", key, {32, 64, 128}),
        ("bf16 D = 128 stored", query, {32, 128}),  # scores of masked runs: of the others it reads gradients
        ("bf16 D = 192, Dv = 128", query, {32, 64, 256}),
    ):
        units = cases[f"prefix_shared_attention: {case}"][kernel]["units"]
        stores = "cp.async.bulk.tensor" in units
        assert stores == case.endswith("stored"), (case, kernel, units)
        found = {int(re.search(r"m64n(\d+)k16", unit)[1]) for unit in units if "wgmma" in unit}
        assert found == columns, (case, kernel, units)


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm_")])
def test_pages_are_copied_ahead_of_the_products(reports, target):
    """A turn waits for its own keys alone: were their pages loaded beside them, it would wait for all."""
    for case, kernels in reports[target]["cases"].items():
        if "paged_attention_kernel" in kernels and "bf16" in case:
            assert kernels["paged_attention_kernel"]["ahead"] >= 2, (case, kernels)


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm_")])
def test_tensor_cores_take_sixteen_of_k_at_a_time(reports, target):
    """In every tile of every kernel, which ``tensor_core.py`` supposes: no TF32, and no part of a group.

    FP8 comes 32 at a time where it is multiplied as FP8."""
    cases = reports[target]["cases"]
    every = [kernels[k]["units"] for kernels in cases.values() for k in kernels if k != "fp8_product_kernel"]
    found = {unit for units in every for unit in units} - {"cp.async.bulk.tensor"}
    assert found and all(unit.endswith(("k16", "kind::f16")) for unit in found), sorted(found)


@pytest.mark.parametrize(
    ("target", "fp8", "decoded"),
    [
        ("sm_80", "m16n8k16", "m16n8k16"),
        ("sm_90", "k16", "k16"),  # whose tensor cores keep too few bits of a sum of FP8
        ("sm_100", "kind::f8f6f4", "kind::f16"),
    ],
)
def test_fp8_is_multiplied_as_fp8(reports, target, fp8, decoded):
    """Where a GPU has instructions for the FP8 of the weight; elsewhere as float16."""
    cases = {
        k: v["fp8_product_kernel"]["units"] for k, v in reports[target]["cases"].items() if "_fp8: " in k
    }
    assert len(cases) == 6
    for case, (unit,) in cases.items():
        assert unit.endswith(decoded if case.endswith("fnuz") else fp8), (case, unit)


def test_the_code_is_no_worse_than_the_ledger_says(reports):
    """As `make check-codegen` asks it, which writes the ledger anew with ARGS=--write."""
    ledger = Ledger.load()
    if ledger.compilers.get("triton") != portable.version():
        pytest.skip("the ledger is of another Triton")
    problems = ledger.differences("triton", portable.records(reports))
    assert not problems, "\n".join(problems)


def test_every_kernel_has_a_case(reports):
    """On one of the targets at least; the ledger has which on each."""
    compiled = {kernel for report in reports.values() for case in report["cases"].values() for kernel in case}
    missing = {kernel for target in TARGETS for kernel in reports[target]["kernels"]} - compiled
    assert not missing, f"nothing in tests/aot_cases compiles {', '.join(sorted(missing))}"


@pytest.mark.parametrize("target", TARGETS)
def test_lengths_temperatures_and_ignore_index_recompile_nothing(reports, target):
    binaries = reports[target]["binaries"]
    assert set(binaries) == {
        *("forward_kernel", "backward_kernel", "product_kernel", "merge_kernel"),
        *("row_gradient_kernel", "logits_gradient_kernel", "gradient_product_kernel"),
        *("support_forward_kernel", "support_backward_kernel"),
        *("chunk_kernel", "total_kernel", "multiply_kernel", "gae_kernel"),
        *("layer_forward_kernel", "layer_backward_kernel", "layer_sums_kernel"),
        *("rms_forward_kernel", "rms_backward_kernel", "rms_weight_kernel", "norm_total_kernel"),
        *("moments_kernel", "scale_kernel", "kl_kernel", "batch_kernel", "group_kernel"),
        *("sums_kernel", "loss_kernel", "gradient_kernel"),
        *("statistics_kernel", "finish_kernel"),
        *("attention_forward_kernel", "attention_delta_kernel", "attention_query_grad_kernel"),
        *("attention_key_grad_kernel", "attention_sum_kernel"),
        *("around_merge_kernel", "around_gather_kernel", "around_reduce_kernel"),
        *("paged_attention_kernel", "paged_merge_kernel"),
    }
    assert set(binaries.values()) == {1}, f"more than one binary of a kernel on {target}: {binaries}"
