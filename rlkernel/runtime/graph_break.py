"""Calls that no graph of a compiler holds.

To import this is to import torch's compiler, and Triton with it: only where a graph is being made.
"""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="sample(group=) and its kin must be called outside of a compiled graph")
def outside(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
