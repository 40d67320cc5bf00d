"""What torch.cuda says of the moment, asked without the objects that it makes."""

from collections.abc import Callable

import torch

# what Triton and inductor call: torch.cuda.current_stream takes microseconds for a Stream of Python
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_SYNC_IS_AN_ERROR = 2  # of torch.cuda.get_sync_debug_mode


def raw_stream(device: torch.device) -> int:
    """The handle of the current stream of ``device``."""
    if _raw_stream is None or device.index is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, which forbids to look at values."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def runs_ahead(device: torch.device) -> bool:
    """Whether the host runs ahead of ``device``, and reading a value is waiting for it."""
    return device.type == "cuda"


def may_wait(device: torch.device) -> bool:
    """Whether the host may wait for a value of ``device``: not under capture, nor where
    ``torch.cuda.set_sync_debug_mode("error")`` makes an error of it."""
    if capturing(device):
        return False
    if not runs_ahead(device) or not torch.cuda.is_initialized():
        return True
    return torch.cuda.get_sync_debug_mode() < _SYNC_IS_AN_ERROR
