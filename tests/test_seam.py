"""What crosses from Python to the compiled kernels: no buffer, name or rule may be other than C++ takes it to
be.  Calls are recorded while ops run, then made again with one thing wrong."""

import ast
import sys
from pathlib import Path
from typing import NamedTuple

import exchange
import pytest
import seam_calls
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import rlkernel
from rlkernel import native
from rlkernel.calls import paged_prefix_attention, policy_loss, preference_loss, sampling

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "csrc"))
import stub

CPU = native.extension().cpu
KERNELS = sorted(name for name, x in vars(CPU).items() if callable(x) and not name.startswith("_"))


def wrong(x):
    """Tensors in the place of x, and the reason for which each is refused."""
    yield "one element short", x.flatten()[:-1] if x.dim() < 2 else x[..., :-1].contiguous()
    if x.dim() > 1 and len(x) > 1:
        yield "one row short", x[:-1]
    yield "another dtype", x.to(torch.int16)
    yield "another device", torch.empty_like(x, device="meta")
    if x.numel() > 1:
        yield "not dense", torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize("name", KERNELS)
def test_a_wrong_buffer_is_refused(name):
    kernel = getattr(CPU, name)
    calls = seam_calls.recorded()[name]
    seen = set()
    for call in calls:
        kernel(**call)
        for field, x in call.items():
            if not isinstance(x, torch.Tensor):
                continue
            seen.add(field)
            for how, bad in wrong(x):
                if (name, field, how) in seam_calls.ALLOWED:
                    continue
                said = refusal(kernel, call | {field: bad})
                assert said.startswith(f"{name}: "), (field, how, said)
                assert "short" in how or field in said.removeprefix(name), said
            if field not in optional(name):
                with pytest.raises(TypeError, match=f"{name}: {field} must be a tensor, got None"):
                    kernel(**call | {field: None})
    assert seen >= tensors(name), "seam_calls has no call that gives them"


def written(kernel, call):
    """The tensors of a call that the kernel writes to."""
    for field, x in call.items():
        if isinstance(x, torch.Tensor):
            # no larger: kernels follow offsets and rows that they are given, and these are there
            marked = [torch.full_like(x, mark) for mark in (0, 1)]
            for other in marked:
                refusal(kernel, call | {field: other})  # marks may be no offsets
            if (marked[0] != 0).any() or (marked[1] != 1).any():
                yield field, x


@pytest.mark.parametrize("name", KERNELS)
def test_a_written_buffer_whose_elements_share_memory_is_refused(name):
    kernel = getattr(CPU, name)
    seen = set()
    for call in seam_calls.recorded()[name]:
        for field, x in written(kernel, call):
            for d in (d for d in range(x.dim()) if x.shape[d] > 1):
                seen.add(field)
                said = refusal(kernel, call | {field: x.narrow(d, 0, 1).expand_as(x)})
                assert said.startswith(f"{name}: ") and field in said.removeprefix(name), (field, d, said)
    assert seen


def test_elements_that_share_memory_are_told():
    call = seam_calls.recorded()["attention_merge"][-1]
    for out, strides in (
        (call["out"][:1].expand_as(call["out"]), "[0, 8, 1]"),
        (call["out"].flatten().as_strided((5, 3, 8), (8, 8, 1)), "[8, 8, 1]"),
    ):
        assert refusal(CPU.attention_merge, call | {"out": out}) == (
            "attention_merge: out must hold elements that share no memory, "
            f"got strides {strides} of shape [5, 3, 8]"
        )
    apart = torch.empty(3, 5, 16).transpose(0, 1)[..., :8].copy_(call["out"])
    CPU.attention_merge(**call | {"out": apart})


@pytest.mark.parametrize(
    "name, field",
    [
        ("gae", "cu_seqlens"),
        ("kl_shaped_rewards", "cu_seqlens"),
        ("policy_loss", "cu_seqlens"),
        ("value_loss_forward", "cu_seqlens"),
        ("preference_sums", "cu_seqlens"),
        ("group_advantages", "offsets"),
        ("segment_reduce", "offsets"),
        ("logprob_support_forward", "offsets"),
    ],
)
def test_offsets_without_an_interval_are_refused(name, field):
    """Of a batch without a row, whose other tensors hold nothing."""
    call = next(c for c in seam_calls.recorded()[name] if c[field] is not None)
    one = call[field].new_zeros(())
    for offsets, wanted, got in (
        (one, "have 1 dimensions", "0"),
        (one.view(1, 1), "have 1 dimensions", "2"),
        (one.view(1)[:0], "have an element or more", "none"),
    ):
        assert (
            refusal(getattr(CPU, name), call | {field: offsets})
            == f"{name}: {field} must {wanted}, got {got}"
        )


@pytest.mark.parametrize("name", ["logprob_forward", "logprob_backward", "logprob_exp"])
def test_a_tile_outside_every_vocabulary_is_refused(name):
    call = next(c for c in seam_calls.recorded()[name] if c["logits"].shape[-1] == 10)
    last = 2**63 - 1 - 10
    getattr(CPU, name)(**call | {"vocab_start": last})
    for start in (-1, last + 1, 2**63 - 1):
        assert refusal(getattr(CPU, name), call | {"vocab_start": start}) == (
            f"{name}: vocab_start must be from 0 to {last}, got {start}"
        )


@pytest.mark.parametrize("name", ["sampling_statistics", "sampling_finish"])
def test_a_tile_outside_the_vocabulary_is_refused(name):
    call = seam_calls.recorded()[name][-1]
    tile, vocab = call["logits"].shape[1], call["vocab"]
    for start in (-4096, 4096, 1, 2**63 - 4096):
        assert refusal(getattr(CPU, name), call | {"vocab_start": start}) == (
            f"{name}: vocab_start must be a multiple of 4096 from 0 to {vocab - tile}, got {start}"
        )
    for vocab in (-1, 2**31):
        assert refusal(getattr(CPU, name), call | {"vocab": vocab}) == (
            f"{name}: vocab must be from 0 to {2**31 - 1}, got {vocab}"
        )


def refusal(kernel, call):
    """What ValueError says; empty where none is raised."""
    try:
        kernel(**call)
    except ValueError as error:
        return str(error)
    return ""


def annotations(name):
    """The type of each field, as the stub has it."""
    tree = ast.parse(stub.PATH.read_text())
    (part,) = (n for n in tree.body if isinstance(n, ast.ClassDef))
    (method,) = (n for n in part.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return {a.arg: ast.unparse(a.annotation) for a in method.args.kwonlyargs}


def optional(name):
    return {field for field, kind in annotations(name).items() if kind != "Tensor"}


def tensors(name):
    return {field for field, kind in annotations(name).items() if "Tensor" in kind}


@pytest.mark.parametrize("name", KERNELS)
def test_wrong_keywords_are_refused(name):
    call = seam_calls.recorded()[name][0]
    field = next(iter(call))
    for bad in (
        {k: x for k, x in call.items() if k != field},
        {"x" + k if k == field else k: x for k, x in call.items()},
        call | {"one_more": 1},
    ):
        with pytest.raises(TypeError, match=f"^{name} takes the keywords {field}, "):
            getattr(CPU, name)(**bad)
    getattr(CPU, name)(**dict(reversed(call.items())))  # their order is free


@pytest.mark.parametrize("name", ["policy_loss", "policy_select", "preference_loss"])
def test_a_rule_of_other_fields_is_refused(name):
    call = seam_calls.recorded()[name][0]
    field = next(k for k, x in call.items() if hasattr(x, "_fields"))
    rule = call[field]
    names = [*rule._fields]
    for other in ([names[1], names[0], *names[2:]], names[:-1], [*names, "one_more"]):
        kind = NamedTuple(type(rule).__name__, [(n, object) for n in other])
        values = [getattr(rule, n, 0) for n in other]
        with pytest.raises(ValueError, match=f"{name}: {field} must have the fields {' '.join(names)}, got "):
            getattr(CPU, name)(**call | {field: kind(*values)})
    with pytest.raises(TypeError, match=f"{name}: {field} must be a NamedTuple"):
        getattr(CPU, name)(**call | {field: tuple(rule)})


def test_a_choice_that_is_none_is_refused():
    call = seam_calls.recorded()["policy_loss"][0]
    for number in (-1, len(policy_loss.POLICY_TERMS)):
        with pytest.raises(TypeError, match="policy_loss: term must be one of clipped, cispo"):
            CPU.policy_loss(**call | {"rule": call["rule"]._replace(term=number)})
    call = seam_calls.recorded()["kl_shaped_rewards"][0]
    with pytest.raises(TypeError, match="estimator must be one of k1, abs, k2, k3, got 'k4'"):
        CPU.kl_shaped_rewards(**call | {"estimator": "k4"})


def test_names_are_those_of_python():
    """The loader compares them: a rule holds the number of a name."""
    enums = native.extension().ENUMS
    assert native.differing_names(enums) == []
    for name, names in enums.items():
        for bad in (names[::-1], names[:-1], (*names, "one_more")):
            (told,) = native.differing_names(enums | {name: bad})
            assert name in told and ", ".join(bad) in told
    without = {name: names for name, names in enums.items() if name != "Term"}
    assert len(native.differing_names(without)) == 1


def test_names_of_numbers_are_as_many_as_numbers():
    assert len(rlkernel.VALUE_METRICS) == CPU.VALUE_METRICS
    assert 2 + len(rlkernel.POLICY_METRICS) + 1 == CPU.POLICY_VALUES
    assert len(preference_loss.PAIR_METRICS) == CPU.PREFERENCE_METRICS
    assert len(preference_loss.SEQUENCE_SUMS) == CPU.SEQUENCE_SUMS
    assert len(sampling.RECORD) == CPU.SAMPLING_RECORD


def test_sizes_that_both_sides_count_in_are_the_same():
    """A buffer of few tokens has the same bytes for other sizes: the kernels would not see it."""
    assert (sampling.SPLIT, sampling.GROUP) == (CPU.SAMPLING_SPLIT, CPU.SAMPLING_GROUP)
    assert paged_prefix_attention.TILE == CPU.PAGED_TILE
    assert paged_prefix_attention.CHUNK == CPU.PAGED_CHUNK


def test_the_stub_is_what_the_extension_says():
    assert ast.dump(ast.parse(stub.PATH.read_text())) == ast.dump(ast.parse(stub.text(CPU))), (
        "python csrc/stub.py writes it anew"
    )


LOADED = "native.extension()"
ADDED = """
x = torch.ones(2, 4)
advantages, returns = torch.empty(2, 2, 4)
native.extension().cpu.gae(
    rewards=x, values=x, mask=None, cu_seqlens=None, last_values=None, gamma=1.0, lam=1.0, zero_holes=False,
    advantages=advantages, returns=returns,
)
assert returns[0].tolist() == [4, 3, 2, 1]
"""


@pytest.mark.parametrize("change", ["", "told()", "told(major=2, previous=told())"])
def test_the_exchange_of_dlpack_1_is_found(change):
    assert exchange.run(change, ADDED) == ""


@pytest.mark.parametrize(
    "change",
    ["delattr(torch.Tensor, NAME)", "setattr(torch.Tensor, NAME, 7)", "told(major=2)", "told(major=0)"],
)
def test_a_torch_without_it_is_told_so(change):
    error = exchange.run(change, LOADED)
    assert "torch must be at least 2.11" in error and "__dlpack_c_exchange_api__ of DLPack 1" in error


def test_a_tensor_elsewhere_is_refused():
    """A GPU's tensors reach no kernel of the CPU, nor two devices' one kernel."""
    for device, name in ((exchange.CUDA, "a CUDA device"), (exchange.ROCM, "a ROCm device"), (7, "another")):
        error = exchange.run(f"told(device={device})", ADDED)
        assert error.startswith(f"ValueError: gae: rewards must be on the CPU, got {name}")
    error = exchange.run("told(ids=[0, 1, 0, 0])", ADDED)
    assert error == "ValueError: gae: values must be on device 0 as rewards is, got 1"


def _fake(x):
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


def _freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)  # as sharded training does between uses of a weight
    return x


@pytest.mark.parametrize(
    "made, got",
    [
        (_fake, "a FakeTensor"),
        (lambda x: _fake(torch.stack([x, x]))[1], "a FakeTensor"),
        (_freed, "a tensor whose storage was freed"),
    ],
    ids=["fake", "fake, at an offset", "freed"],
)
def test_a_tensor_without_memory_is_refused(made, got):
    call = seam_calls.recorded()["attention_merge"][0]
    with pytest.raises(
        ValueError, match=f"attention_merge: out must lie in memory that torch shows, got {got}"
    ):
        CPU.attention_merge(**call | {"out": made(call["out"].contiguous())})


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x.clone().requires_grad_(),
        lambda x: torch.nn.Parameter(x.clone()),
        lambda x: x.clone().as_subclass(Marked),
        lambda x: torch.stack([torch.zeros_like(x), x])[1],
        lambda x: torch.cat([torch.zeros_like(x), x], 1)[:, x.shape[1] :],
        lambda x: x[:1].expand_as(x),
        torch.inference_mode()(lambda x: x.clone()),
        lambda x: x.requires_grad_() * 1,
    ],
    ids=[
        "a leaf",
        "a parameter",
        "a subclass",
        "at an offset",
        "of other strides",
        "expanded",
        "of inference",
        "a result",
    ],
)
def test_any_tensor_is_read(made):
    x = torch.arange(8.0).view(1, 8).expand(3, 8)
    want, got = (torch.empty(3, 8) for _ in range(2))
    rest = {
        "mask": None,
        "cu_seqlens": None,
        "last_values": None,
        "gamma": 0.9,
        "lam": 0.9,
        "zero_holes": False,
    }
    for values, advantages in ((x.clone(), want), (made(x.clone()), got)):
        CPU.gae(rewards=x, values=values, **rest, advantages=advantages, returns=torch.empty(3, 8))
    assert torch.equal(got, want)
