"""What torch.cuda says of the moment, asked without the objects that it makes."""

from collections.abc import Callable

import torch

# what Triton and inductor call: torch.cuda.current_stream takes microseconds for a Stream of Python
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def raw_stream(device: torch.device) -> int:
    """The handle of the current stream of ``device``."""
    if _raw_stream is None or device.index is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, which forbids to look at values."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
