"""The op ``sampling``: what the backend that can do what is wanted makes of the logits."""

from types import ModuleType

from torch.autograd import profiler

from rlkernel import dispatch
from rlkernel.calls.sampling import SampleStats, SamplingCall
from rlkernel.opaque import Op
from rlkernel.runtime import ranges, tracing


def draw(call: SamplingCall) -> SampleStats:
    if not tracing.is_on():  # nothing of it has a gradient
        call = op.plain(call)
        impl, watched = _pick(call), profiler._is_profiler_enabled or ranges.nvtx
        stats: SampleStats = op.named(impl, call) if watched else impl.forward(call)
        return stats
    # the outputs of a node do not depend on the backend
    return SampleStats(*op(call._replace(wants=(*call.wants, "every statistic"))))


def _pick(call: SamplingCall) -> ModuleType:
    return dispatch.pick("sampling", call.logits, sampling=call.request, needs=call.wants)


def _like(call: SamplingCall) -> SampleStats:
    return SampleStats.empty(len(call.logits), call.request, call.logits.device, call.logits.dtype)


op = Op("sampling", SamplingCall, SampleStats, pick=_pick, like=_like)
