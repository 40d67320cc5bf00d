"""predict: times from the ledger, beside those that a report of the GPU has."""

import json
from dataclasses import replace

import pytest

from rlkernel.bench import cli, ledger, predict
from rlkernel.bench.devices import DEVICES
from rlkernel.bench.headlines import BF16, FILTER_STEPS, Launch, V, filter_launch, headlines
from rlkernel.bench.ledger import Ledger, Record

H100 = DEVICES["h100"]
RECORD = Record(64, 512, 0, 4, 1000, True, 240, 64, 0, 0, 0, 100, 50, 20, 0, 16, {})
KERNEL = {"cuda": "op: kernel"}


def known(**changes):
    return Ledger({"cuda": "nvcc"}, {"cuda": {"sm_90a": {"op: kernel": RECORD._replace(**changes)}}})


def test_bytes_at_the_rate_that_a_read_reaches():
    time = predict.time_of(Launch("read", KERNEL, read=3.35e9), H100, known())
    assert time.bound == "bandwidth" and time.floor == pytest.approx(1e-3)
    assert time.seconds == pytest.approx(1e-3 / H100.reads + H100.launch)


def test_code_that_cannot_issue_so_fast_is_slower():
    time = predict.time_of(Launch("read", KERNEL, read=3.35e9), H100, known(turn=2400))
    share, _, busiest = ledger.bound(RECORD._replace(turn=2400), H100)
    assert time.bound == busiest == "issue" and time.seconds == pytest.approx(1e-3 / share + H100.launch)


def test_products_pay_for_waves_that_are_not_full():
    full = predict.time_of(Launch("gemm", None, flops=1e12, blocks=132), H100, known())
    half = predict.time_of(Launch("gemm", None, flops=1e12, blocks=66), H100, known())
    assert full.seconds == pytest.approx(1e12 / H100.peak / H100.gemm + H100.launch)
    assert half.seconds - H100.launch == pytest.approx(2 * (full.seconds - H100.launch))


def test_products_that_take_turns_with_the_rest_are_slower():
    tiles = {"flops": 262144, "tensor": 4, "loaded": 8, "turn": 256, "special": 8, "lsu": 8}
    overlapping, apart = (
        predict.time_of(Launch("x", KERNEL, flops=1e12, apart=apart), H100, known(**tiles))
        for apart in (False, True)
    )
    # 256 instructions are issued in as many clocks as 262144 operations take
    assert apart.seconds - H100.launch == pytest.approx(2 * (overlapping.seconds - H100.launch), rel=0.02)
    assert apart.bound == "products and the rest by turns"


def test_few_blocks_are_as_slow_as_one():
    one, many = (
        predict.time_of(Launch("rows", KERNEL, blocks=n, warps=16, alone=2**18), H100, known())
        for n in (1, 264)
    )
    assert one.bound == many.bound == "one block's time"
    assert many.seconds - H100.launch == pytest.approx(2 * (one.seconds - H100.launch))


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 66, 67, 108, 128, 132, 148, 149, 256, 265, 305, 1024])
def test_a_filtered_row_is_shared_only_where_that_pays(name, rows):
    """By clusters of few rows and half blocks of many: never slower than a whole block a row."""
    device, ledger_of = DEVICES[name], Ledger.load()
    launch = filter_launch(rows, device)
    waits = FILTER_STEPS * device.step
    whole = replace(launch, blocks=rows, warps=512 // device.lanes, alone=V * BF16, waits=waits)
    shared, alone = (predict.time_of(each, device, ledger_of).seconds for each in (launch, whole))
    assert shared <= 1.01 * alone  # waves that just miss each other
    if 2 * rows <= device.multiprocessors and device.cluster > 1:
        assert shared < alone


def test_waits_stay_however_many_help():
    launch = {"warps": 8, "alone": 2**17, "waits": 5e-6}
    one, eight = (
        predict.time_of(Launch("rows", KERNEL, blocks=n, **{**launch, "alone": 2**17 / n}), H100, known())
        for n in (1, 8)
    )
    waits = launch["waits"] + H100.launch
    assert one.seconds - waits == pytest.approx(8 * (eight.seconds - waits))


def test_instructions_that_a_launch_names_are_issued_at_the_pace_of_a_warp():
    launch = {"blocks": 1, "alone": 2**20, "turn": 16, "issued": 300.0}
    few, many = (
        predict.time_of(Launch("x", KERNEL, warps=n, **launch), H100, known()).seconds - H100.launch
        for n in (4, 32)
    )
    assert few == pytest.approx(2**20 / (4 * 32 * 16) * 300 * H100.pace / H100.clock)
    assert many == pytest.approx(2**20 / (32 * 32 * 16) * 300 * 8 / H100.clock)  # four are issued in a clock


def test_a_turn_reads_what_the_launch_says():
    turns = [
        predict.time_of(Launch("x", KERNEL, blocks=1, warps=8, alone=2**20, turn=n), H100, known()).seconds
        for n in (RECORD.loaded, 2 * RECORD.loaded)
    ]
    assert turns[0] - H100.launch == pytest.approx(2 * (turns[1] - H100.launch))


def test_what_is_read_again_comes_from_the_l2_where_it_fits():
    def again(rows):
        launch = Launch("rows", KERNEL, blocks=rows, warps=64, alone=2**19, again=True)
        return predict.time_of(launch, H100, known(loaded=2**10))

    assert again(96).bound == "L2" and again(104).bound == "bandwidth"
    assert again(96).seconds == pytest.approx(96 * 2**19 / H100.cache_bandwidth + H100.launch)


def test_launches_count_where_there_is_little_to_do():
    time = predict.time_of(Launch("tiny", KERNEL, read=8.0, times=10), H100, known())
    assert time.bound == "launches" and time.seconds == pytest.approx(10 * H100.launch, rel=1e-3)


def test_code_that_the_ledger_lacks_is_named():
    with pytest.raises(KeyError, match="the ledger has nothing of triton for H100"):
        predict.time_of(Launch("x", {"triton": "op: kernel"}), H100, known())
    with pytest.raises(KeyError, match="the ledger has no op: other of cuda for sm_90a"):
        predict.time_of(Launch("x", {"cuda": "op: other"}), H100, known())


@pytest.mark.parametrize("name", DEVICES)
def test_every_headline_has_its_kernels_in_the_committed_ledger(name):
    found, missing = predict.predictions(DEVICES[name], Ledger.load())
    device = DEVICES[name]
    if device.name != "mi250x":  # Triton's kernels are not compiled for it
        assert not missing, missing
    assert found and all(p.seconds >= p.floor > 0 for p in found)
    assert len(found) + len(missing) == len(headlines())


def test_figures_are_those_that_were_reckoned_by_hand():
    """From the SASS of these kernels, before there was a tool: 0.83-0.90 ms, 17.9 ms and 69 ms on an H100."""
    found, _ = predict.predictions(H100, Ledger.load())
    found = [p for p in found if p.headline.case.sizes.get("N") in (None, 8192)]
    times = {(p.headline.op, p.headline.note, p.headline.direction): p.seconds for p in found}
    assert 0.80e-3 < times["logprob", "", "forward"] < 0.90e-3
    assert 12e-3 < times["linear_logprob", "tiled", "forward"] < 19e-3
    assert 48e-3 < times["linear_logprob", "tiled", "forward+backward"] < 75e-3


def test_fewer_rows_take_less_and_few_launches():
    """A product of 256 rows reads the weight in the time that it multiplies; the host must be as fast."""
    found, _ = predict.predictions(H100, Ledger.load())
    tiled = [p for p in found if p.headline.note == "tiled"]
    for direction, most in (("forward", 2), ("forward+backward", 5)):
        of = {p.headline.case.sizes["N"]: p for p in tiled if p.headline.direction == direction}
        assert of[256].seconds < of[1024].seconds / 2 < of[8192].seconds / 8
        assert sum(launch.times for launch, _ in of[256].times) == most


def stored(**changes):
    row = {
        "op": "logprob", "case": "N=8192 V=151936 T=1.0 entropy", "dtype": "bfloat16", "backend": "native",
        "pass": "forward", "seconds": 0.00092, **changes,
    }  # fmt: skip
    machine = {"cuda:0": changes.pop("gpu", "NVIDIA H100 80GB HBM3, sm_90, 80 GiB")}
    return {"header": {"device": "cuda", "date": "2027-01-01", "machine": machine}, "rows": [row]}


def test_a_measurement_stands_beside_its_prediction(tmp_path, capsys):
    path = tmp_path / "h100.json"
    path.write_text(json.dumps(stored()))
    assert cli.main(["predict", str(path), "--device", "h100"]) == 0
    table = capsys.readouterr().out
    line = next(x for x in table.splitlines() if x.startswith("| logprob") and "| forward |" in x)
    assert "0.920 ms (1.1" in line
    predicted, _ = predict.predictions(H100, Ledger.load())
    assert table.count("not yet") == len(predicted) - 1


@pytest.mark.parametrize("change", [{"backend": "triton"}, {"dtype": "float32"}, {"gpu": "NVIDIA H200"}])
def test_a_measurement_of_something_else_does_not(change):
    logprob = headlines()[0]
    assert predict.measured(logprob, H100, [stored()]) == 0.00092
    assert predict.measured(logprob, H100, [stored(**change)]) is None


def test_the_newest_measurement_counts():
    older, newer = stored(seconds=1.0), stored(seconds=2.0)
    older["header"]["date"] = "2026-12-31"
    assert predict.measured(headlines()[0], H100, [newer, older]) == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict"], "predict must be given --device of a100, h100, h200, b200, mi300x, mi250x, got None"),
        (["predict", "--device", "cuda"], "--device must be of a100, .*, got cuda"),
        (["predict", "nothing.json", "--device", "h100"], "nothing.json must be a report"),
        (["speed", "--device", "h100"], "--device must be of cpu, cuda, got h100"),
    ],
)
def test_usage(arguments, message, capsys):
    import re

    assert cli.main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)


def test_without_a_ledger_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(Ledger.load.__func__, "__defaults__", (tmp_path / "codegen.json",))
    with pytest.raises(predict.UsageError, match="predict must have the ledger"):
        predict.text("h100")
