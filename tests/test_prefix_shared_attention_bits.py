"""prefix_shared_attention: what a row's bits do not depend on, and that its group's NaN stays there."""

import pytest
import torch
from backends import is_slow, of
from bitwise import assert_equal
from prefix_cases import (
    FORESTS,
    LARGE,
    OPTIONS,
    Result,
    groups,
    inputs_of,
    like_hugging_face,
    run,
    skip_unless_it_can,
)

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("prefix_shared_attention"))
pytestmark = pytest.mark.usefixtures("poison")


def assert_same(got: Result, want: Result):
    for name, a, b in zip(Result._fields, got, want, strict=True):
        if a is not None:
            assert_equal(name, a, b)


BITS = [FORESTS["past tiles"], FORESTS["a depth of five"], *LARGE.values()]
FEW_BITS = [groups((37, [3, 20]), (16, [1, 7]))]


@pytest.mark.parametrize("parity", ["fast", "bitwise"])
@ON_EVERY_BACKEND
def test_the_same_call_gives_the_same_bits(backend, device, parity):
    for shape in FEW_BITS if is_slow(backend, device) else BITS:
        inputs = inputs_of(shape, 2, 1, device=device, sinks=True)
        skip_unless_it_can(backend, shape.layout(), inputs, parity=parity)
        first = run(backend, shape.layout(), inputs, parity=parity)
        assert_same(run(backend, shape.layout(), inputs, parity=parity), first)


@pytest.mark.parametrize("options", ["plain", "softcap", "window 8", "sinks", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ON_EVERY_BACKEND
def test_parity_with_repeated_prompts(backend, device, dtype, options):
    asked = dict(OPTIONS[options])
    sinks = asked.pop("sinks", False)
    slow = is_slow(backend, device)
    if slow and (dtype == torch.bfloat16) != (options == "all"):
        return
    for shape in [*FEW_BITS, FORESTS["a depth of five"]] if slow else [*FEW_BITS, *BITS]:
        layout = shape.layout()
        inputs = inputs_of(shape, 2, 1, 32, dtype=dtype, device=device, sinks=sinks)
        inputs |= {name: like_hugging_face(inputs[name]) for name in "qkv"}
        skip_unless_it_can(backend, layout, inputs, parity="bitwise", **asked)
        repeated, index = layout.repeated()
        index = index.to(device)
        dense = inputs | {name: inputs[name][index] for name in ("q", "k", "v", "grad_out")}
        got = run(backend, layout, inputs, parity="bitwise", **asked)
        want = run(backend, repeated, dense, parity="bitwise", **asked)
        assert_equal("out", got.out[index], want.out)
        assert_equal("lse", got.lse[:, index], want.lse)
        # and bits are not all: it is still the same attention
        fast = run(backend, layout, inputs, **asked)
        torch.testing.assert_close(got.out, fast.out, rtol=0, atol=0.03 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dims", [(40, 24), (24, 40)], ids=str)
@ON_EVERY_BACKEND
def test_parity_with_values_of_another_head_dim(backend, device, dims):
    for shape in [*FEW_BITS, FORESTS["a depth of five"]]:
        layout = shape.layout()
        inputs = inputs_of(shape, 2, 1, dims[0], v_dim=dims[1], device=device, sinks=True)
        skip_unless_it_can(backend, layout, inputs, parity="bitwise")
        repeated, index = layout.repeated()
        index = index.to(device)
        dense = inputs | {name: inputs[name][index] for name in ("q", "k", "v", "grad_out")}
        for options in ({}, {"window": 5, "softcap": 3.0}):
            got = run(backend, layout, inputs, parity="bitwise", **options)
            want = run(backend, repeated, dense, parity="bitwise", **options)
            assert_equal("out", got.out[index], want.out)
            assert_equal("lse", got.lse[:, index], want.lse)


@ON_EVERY_BACKEND
def test_a_row_does_not_depend_on_other_groups(backend, device):
    """Bitwise parity makes a row batch-invariant too: its tiles are cut at its own positions."""
    sizes = [(37, [20, 5]), (70, [9, 66, 9]), (0, [4]), (16, [16])]
    if is_slow(backend, device):
        sizes = [(20, [6, 5]), (35, [9, 2]), (0, [4]), (3, [16])]
    shape = groups(*sizes)
    inputs = inputs_of(shape, 2, 1, 32, device=device)
    skip_unless_it_can(backend, shape.layout(), inputs, parity="bitwise")
    whole = run(backend, shape.layout(), inputs, parity="bitwise")
    for order in ([3, 1, 0, 2], [1], [0, 3]):
        rows = torch.cat([rows_of(sizes, b)[0] for b in order] + [rows_of(sizes, b)[1] for b in order])
        part = {k: None if x is None else x[rows.to(device)] for k, x in inputs.items()}
        got = run(backend, groups(*(sizes[b] for b in order)).layout(), part, parity="bitwise")
        assert_equal(f"out of {order}", got.out, whole.out[rows.to(device)])
        assert_equal(f"lse of {order}", got.lse, whole.lse[:, rows.to(device)])


def rows_of(sizes, b):
    """The rows of group b: of its prompt, of its completions."""
    prompts = sum(p for p, _ in sizes)
    p, c = sum(p for p, _ in sizes[:b]), prompts + sum(sum(c) for _, c in sizes[:b])
    return torch.arange(p, p + sizes[b][0]), torch.arange(c, c + sum(sizes[b][1]))


@ON_EVERY_BACKEND
def test_siblings_may_stand_in_any_order(backend, device):
    lengths = [9, 12, 9, 1, 30] if is_slow(backend, device) else [9, 66, 9, 1, 30]
    shape = groups((45, lengths))
    inputs = inputs_of(shape, 2, 1, 32, device=device)
    skip_unless_it_can(backend, shape.layout(), inputs, parity="bitwise")
    whole = run(backend, shape.layout(), inputs, parity="bitwise")
    order, starts = [4, 0, 3, 2, 1], [45 + sum(lengths[:i]) for i in range(5)]
    runs = [torch.arange(starts[i], starts[i] + lengths[i]) for i in order]
    rows = torch.cat([torch.arange(45), *runs]).to(device)
    part = {k: None if x is None else x[rows] for k, x in inputs.items()}
    other = groups((45, [lengths[i] for i in order])).layout()
    got = run(backend, other, part, parity="bitwise")
    assert_equal("out", got.out, whole.out[rows])
    assert_equal("lse", got.lse, whole.lse[:, rows])


@ON_EVERY_BACKEND
def test_nan_stays_in_its_group(backend, device):
    sizes = [(7, [5, 3]), (20, [4, 9]), (6, [6])]
    inputs = inputs_of(groups(*sizes), 2, 1, device=device)
    layout = groups(*sizes).layout()
    skip_unless_it_can(backend, layout, inputs)
    clean = run(backend, layout, inputs)
    prompt, completions = (rows.to(device) for rows in rows_of(sizes, 1))
    rest = torch.ones(layout.total, dtype=torch.bool, device=device)
    rest[prompt] = rest[completions] = False
    for name in ("q", "k", "v", "grad_out"):
        bad = inputs | {name: inputs[name].clone()}
        bad[name][prompt[3]] = torch.nan
        bad[name][completions[2]] = torch.inf
        got = run(backend, layout, bad)
        for field, a, b in zip(Result._fields, got, clean, strict=True):
            if a is not None:
                a, b = (x[:, rest] if field == "lse" else x[rest] for x in (a, b))
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    # nor from one completion to its siblings' rows and to the prompt's
    bad = inputs | {"k": inputs["k"].clone(), "v": inputs["v"].clone()}
    bad["k"][completions[4:]] = bad["v"][completions[4:]] = torch.nan
    got = run(backend, layout, bad)
    rest[prompt] = rest[completions[:4]] = True
    torch.testing.assert_close(got.out[rest], clean.out[rest], rtol=0, atol=1e-6)
