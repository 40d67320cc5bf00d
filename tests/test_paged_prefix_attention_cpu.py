"""What only the compiled CPU kernel of ``paged_prefix_attention`` promises: bits on any number of threads
and any instruction set, nothing read that no row sees, and a plan whose numbers it compares."""

import ctypes
import mmap
import os
import sys

import instruction_sets
import pytest
import torch
from accuracy import error
from bitwise import assert_equal
from paged_cases import OP, STEPS, TABLES, dense, differing, group, make, run

import rlkernel
from rlkernel.native import paged_prefix_attention as native_op
from rlkernel.prefix import paged

PAGE = 4096


def assert_same(got, want):
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        assert_equal(name, a, b)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    yield lambda: torch.set_num_threads(2)
    torch.set_num_threads(before)


@pytest.mark.parametrize("step", ["both at once", "chunked prefill", "many rows of a group"])
def test_threads_change_no_bit(step, two_threads):
    inputs = make(STEPS[step], 6, 2, 40, 24)
    torch.set_num_threads(1)
    want = run("native", inputs)
    two_threads()
    for _ in range(3):
        assert_same(run("native", inputs), want)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_items_of_any_rows_change_no_bit(rows, monkeypatch):
    """Other neighbours in registers: 6 rows and heads are multiplied at a time."""
    inputs = make(STEPS["prefill behind a cached prompt"], 7, 1, 24)
    want = run("native", inputs, window=70)
    monkeypatch.setattr(paged, "ITEM_ROWS", rows)
    assert_same(run("native", inputs, window=70), want)


def test_sharing_less_than_a_tile_is_found(monkeypatch):
    """The bits hold because items end where tiles do."""
    inputs = make(STEPS["decode of several"])
    assert not differing("native", inputs)
    monkeypatch.setattr(paged, "TILE", 16)
    assert differing("native", inputs)
    assert error(run("native", inputs)[0], dense(inputs, torch.float64)[0]) < 1e-5


def results():
    """They go through every kind of load, of tile and of width."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for dims in ((6, 2, 40, 24), (7, 1, 64, 67)):
            inputs = make(STEPS["both at once"], *dims, dtype=dtype, window=150)
            inputs["sinks"] = torch.linspace(-1, 2, dims[0])
            for softcap in (None, 3.0):
                found += run("native", inputs, window=150, softcap=softcap)
    return found


@pytest.mark.parametrize("isa", instruction_sets.NARROWER)
def test_instruction_sets_change_no_bit(isa, tmp_path):
    instruction_sets.assert_not_seen(sys.modules[__name__], isa, tmp_path)


def guarded(cache, written):
    """A copy of ``cache``, each of whose keys fills a page; those that were not written cannot be read."""
    assert cache[0, 0].numel() * cache.itemsize == PAGE
    memory = mmap.mmap(-1, cache.numel() * cache.itemsize)
    copy = torch.frombuffer(memory, dtype=cache.dtype).view(cache.shape)
    copy.copy_(cache)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for page in (~written).flatten().nonzero().flatten().tolist():
        address = ctypes.c_void_p(copy.data_ptr() + page * PAGE)
        assert protect(address, ctypes.c_size_t(PAGE), 0) == 0, os.strerror(ctypes.get_errno())
    return copy


@pytest.mark.skipif(sys.platform != "linux", reason="pages are Linux's")
@pytest.mark.parametrize("window", [None, 75])
def test_what_no_row_sees_is_not_read(window):
    inputs = make(STEPS["both at once"], 4, 4, 256, window=window)
    want = run("native", inputs, window=window)
    written = ~inputs["key_cache"][:, :, 0, 0].isnan()
    assert not written.all()
    caches = {name: guarded(inputs[name], written) for name in ("key_cache", "value_cache")}
    assert_same(run("native", {**inputs, **caches}, window=window), want)


def test_a_strange_layout_of_a_head():
    """Elements of a head that do not lie together, nor do tokens."""
    inputs = make(STEPS["both at once"], head_dim=24)
    want = run("native", inputs)
    for name in ("key_cache", "value_cache"):
        inputs[name] = torch.stack([inputs[name], inputs[name]], -1).flatten(3)[..., ::2]
    assert inputs["key_cache"].stride(3) == 2
    assert_same(run("native", inputs), want)


def call_of(inputs):
    plan = rlkernel.paged_prefix_plan(*(inputs[name] for name in TABLES), inputs["key_cache"].shape[1])
    return {**inputs, "plan": plan}


@pytest.mark.parametrize(
    ("table", "place", "value", "message"),
    [
        ("rows", 0, 9, "rows must hold numbers from 0 below 3, got rows from 1 to 9"),
        ("positions", 1, -1, "positions must hold numbers from 0 below"),
        ("pages", 2, 99, "pages must hold numbers from 0 below 20, got pages from"),
        ("slots", 0, 99, "slots must hold numbers from 0 below"),
        ("starts", 1, 99, "starts must rise from 0"),
        ("items", (0, 1), 4, "items must hold rows, pages and slots that there are, got others in item 0"),
        ("items", (1, 2), 99, "items must hold rows, pages and slots that there are, got others in item 1"),
        ("items", (1, 5), 99, "items must hold rows, pages and slots that there are, got others in item 1"),
        ("launches", (0, 1), 99, "launches must"),
        ("launches", (0, 2), 1, "launches must"),
    ],
)
def test_a_plan_that_points_elsewhere_is_refused(table, place, value, message):
    inputs = call_of(make(group("a", 64, [3, 40, 5])))
    plan = inputs["plan"]
    changed = getattr(plan, table).clone()
    changed[place] = value
    inputs["plan"] = plan._replace(**{table: changed})
    with pytest.raises(ValueError, match="^paged_prefix_attention: ") as error:
        run("native", inputs)
    assert message in str(error.value)


def test_reasons():
    query, cache = torch.zeros(3, 2, 64), torch.zeros(5, 16, 1, 64)
    assert native_op.unsupported(query, cache, cache) == []
    assert native_op.unsupported(query.double(), cache.double()) == [
        "query must be fp16, bf16 or fp32, got float64"
    ]
    assert native_op.unsupported(query.to("meta"), cache) == ["its compiled kernel is one for CPUs, got meta"]


def test_it_runs_where_nothing_is_said():
    inputs = make(STEPS["decode of several"])
    rlkernel.paged_prefix_attention(**inputs)
    assert rlkernel.last_backend(OP) == "native"
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    rlkernel.paged_prefix_attention(**wide)
    assert rlkernel.last_backend(OP) == "reference"
