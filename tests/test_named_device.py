"""The Python around the kernels, on tensors that only say they are on a GPU: it mixes none with the CPU's and
reads no value back.  Kernels are recorded, not run; PyTorch's fake tensors raise on the rest."""

import contextlib
import types
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import rlkernel
from rlkernel import dispatch, native
from rlkernel.bench import cases, parity, status
from rlkernel.runtime import gpu, tracing, workspace

GPU = torch.device("cuda:0")
MODULES = cases.modules(None)
CASES = [
    pytest.param(op, case, id=f"{op}-{preset}-{i}")
    for op, module in MODULES.items()
    if op not in status.CPU_ONLY
    for preset, several in module.PRESETS.items()
    for i, case in enumerate(several)
    if case.dtype != "float64" and not case.axis
    if case.options.get("algorithm") != "fused"  # Triton's alone
]


class Part(types.SimpleNamespace):
    __hash__ = object.__hash__


def recorded(call):
    """The CUDA part, whose kernels are handed to ``call`` behind their name."""
    part = vars(native.extension().cpu)
    kernels = {name: partial(call, name) if callable(x) else x for name, x in part.items()}
    return Part(**kernels | {"part": "cuda"})


@pytest.fixture
def launched(monkeypatch):
    """The kernels that would run, on an H100 within a graph: where nothing may be read."""
    torch._C._ensureCUDADeviceGuardSet()  # without a GPU: one that does nothing
    names: list[str] = []
    kernels = recorded(lambda name, *arguments, **fields: names.append(name))
    monkeypatch.setattr(workspace, "_buffers", {})
    for name in ("is_on", "is_fake"):  # these tensors stand for ones that have memory
        monkeypatch.setattr(tracing, name, lambda: False)
    monkeypatch.setattr(native, "_kernels", lambda part, index: kernels)
    monkeypatch.setattr(gpu, "raw_stream", lambda device: 0)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 1 << 20)
    for name, value in {
        "get_device_capability": (9, 0),
        "current_device": 0,
        "is_current_stream_capturing": True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    return names


def named(x, mode):
    """x as a tensor of the GPU that has its shape and strides, and no memory."""
    if isinstance(x, torch.Tensor):
        bare = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return FakeTensor(mode, bare, GPU)
    if isinstance(x, (list, tuple)):
        parts = [named(part, mode) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


@contextlib.contextmanager
def where_torch_can():
    """A torch that was built without CUDA cannot index a tensor of a GPU, not even of one in name."""
    try:
        yield
    except RuntimeError as error:
        if torch.version.cuda is not None or "not linked with support for cuda" not in str(error):
            raise
        pytest.skip("indexing needs a torch built with CUDA")


@pytest.mark.parametrize(("op", "case"), CASES)
def test_an_op_stays_on_its_device(op, case, launched):
    module = MODULES[op]
    dtype = "bfloat16" if op == "prefix_shared_attention" else case.dtype  # what vendors' kernels take
    case = case.replace(op=op, dtype=dtype, sizes=dict(module.PRESETS["tiny"][0].sizes))
    real = parity.make_inputs(module, case, "cpu")
    mode = FakeTensorMode()
    with mode:
        inputs = {name: named(x, mode) for name, x in real.items()}
        with torch.no_grad(), where_torch_can():
            outputs = parity.ours(module, op, "native")(inputs, case)
    assert rlkernel.last_backend(op) == "native"
    assert {x.device for x in outputs.values()} == {GPU}
    vendors = op == "prefix_shared_attention"  # a batch that is one call of theirs launches none of ours
    assert launched or vendors


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_is_on_its_device_and_its_stream(current, launched, monkeypatch):
    entered, handles = [], []
    kernels = recorded(lambda *arguments, **fields: handles.append((arguments, fields)))
    monkeypatch.setattr(native, "_kernels", lambda part, index: kernels)
    monkeypatch.setattr(gpu, "raw_stream", lambda device: 70 + device.index)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: entered.append(device) or contextlib.nullcontext()
    )
    native.kernels(GPU).gae(rewards=1)
    assert handles == [(("gae", 70), {"rewards": 1})]
    assert entered == ([] if current == 0 else [GPU])


def test_the_stream_is_asked_of_torch_where_its_handle_is_not_to_be_had(monkeypatch):
    stream = types.SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(gpu, "_raw_stream", None)
    assert gpu.raw_stream(GPU) == 7
    monkeypatch.setattr(gpu, "_raw_stream", lambda index: 40 + index)
    assert gpu.raw_stream(GPU) == 40
    assert gpu.raw_stream(torch.device("cuda")) == 7  # whichever is current


def test_a_tensor_of_the_cpu_among_them_is_found():
    mode = FakeTensorMode()
    with mode, pytest.raises(RuntimeError, match="device"):
        named(torch.zeros(3), mode) + torch.zeros(3)


def test_a_value_that_is_read_is_found():
    mode = FakeTensorMode()
    with mode, pytest.raises(Exception, match="item|local_scalar_dense"):
        bool(named(torch.zeros(3), mode).any())


def test_every_op_is_here():
    assert {case.values[0] for case in CASES} == {*dispatch.ops()} - {*status.CPU_ONLY}
