"""Every op a thousand times under load from a second stream: what only a GPU's scheduler can vary."""

import pytest
import torch

from rlkernel import dispatch
from rlkernel.bench import cases, parity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
RERUNS = 1000
MODULES = cases.modules()
PAIRS = [(op, backend) for op in MODULES for backend in ("native", "triton") if dispatch.has(backend, op)]


def bits(x):
    return x.reshape(-1).contiguous().view(torch.uint8)  # NaN has bits too


class Load:
    """Products on a stream of their own, of sizes that leave a kernel many multiprocessors or few."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.sizes = [torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for n in (256, 1024, 2048, 4096)]

    def more(self, run):
        with torch.cuda.stream(self.stream):
            x = self.sizes[run % len(self.sizes)]
            torch.mm(x, x)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_a_thousand_reruns_have_the_same_bits(op, backend):
    module, load = MODULES[op], Load()
    case = module.QUICK[0]
    case = case.replace(op=op, gradients=case.gradients or module.GRADIENTS)
    inputs = parity.make_inputs(module, case, "cuda")
    upstream = parity.upstream(module, case, inputs)
    call = parity.ours(module, op, backend)
    try:
        first = parity.outcome(call, inputs, case, upstream)
    except NotImplementedError as error:
        pytest.skip(f"{backend} refuses: {error}")
    assert any(x.numel() for x in first.values())
    different = {name: torch.zeros((), dtype=torch.int64, device="cuda") for name in first}
    for run in range(RERUNS):
        load.more(run)
        for name, x in parity.outcome(call, inputs, case, upstream).items():
            different[name] += (bits(x) != bits(first[name])).any()
    found = {name: count.item() for name, count in different.items() if count.item()}
    assert not found, f"{op} on {backend}: of {RERUNS} reruns these had other bits: {found}"
