"""Routes in a file: that of safetensors, which holds numbers and a header of JSON and runs no code.

Written and read here with the standard library, as rlkernel needs torch alone; ``safetensors`` reads it too.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkernel.routing_replay.routes import Routes, cat, storage_dtype

FORMAT = "rlkernel.routes"
VERSION = 1
MAX_HEADER = 1 << 20
DTYPES = {"U8": torch.uint8, "U16": torch.uint16, "I64": torch.int64}


def save(path: str | os.PathLike[str], sequences: Routes | Sequence[Routes]) -> None:
    """Write routes, those of one sequence or of several of one model, as one file.

    The file appears when it is whole: a reader never sees a part of it.

    Examples:
        >>> routes = rlkernel.routing_replay.from_vllm(np.zeros((4, 2, 1), dtype=np.int32), 8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rlkernel.routing_replay.save(f"{folder}/routes", routes)
        ...     len(rlkernel.routing_replay.load(f"{folder}/routes"))
        1
    """
    sequences = [sequences] if isinstance(sequences, Routes) else list(sequences)
    whole = cat(sequences).to("cpu")
    lengths = torch.tensor([len(sequence) for sequence in sequences], device="cpu")
    # the type that is most strictly aligned first, as the format wants it
    tensors = {"lengths": lengths, "experts": whole.experts, "known": whole.known.to(torch.uint8)}
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "version": str(VERSION),
            "num_experts": str(whole.num_experts),
        }
    }
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for tensor in tensors.values():
                file.write(_bytes(tensor))
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> list[Routes]:
    """The sequences of a file of ``save``.

    Raises:
        ValueError: the file is not one, of another version, cut off, or holds ids that are no expert's.

    Examples:
        >>> routes = rlkernel.routing_replay.from_vllm(np.zeros((4, 2, 1), dtype=np.int32), 8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rlkernel.routing_replay.save(f"{folder}/routes", [routes, routes])
        ...     len(rlkernel.routing_replay.load(f"{folder}/routes"))
        2
    """
    data = Path(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER, len(data) - 8):
        raise ValueError(f"{path} must be a file of rlkernel.routing_replay.save, got one without its header")
    try:
        header = json.loads(data[8 : 8 + length])
        about = header["__metadata__"]
        kind, version, num_experts = about["format"], int(about["version"]), int(about["num_experts"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a file of rlkernel.routing_replay.save, got another") from error
    if kind != FORMAT or version != VERSION:
        raise ValueError(f"{path} must be of format {FORMAT} version {VERSION}, got {kind} version {version}")
    body = bytearray(data[8 + length :])
    experts = _tensor(path, header, "experts", body, 3)
    known = _tensor(path, header, "known", body, 1)
    lengths = _tensor(path, header, "lengths", body, 1).tolist()
    if experts.dtype != storage_dtype(num_experts):
        raise ValueError(f"{path}: experts must be {storage_dtype(num_experts)}, got {experts.dtype}")
    if known.numel() != experts.shape[1]:
        raise ValueError(f"{path}: known must have {experts.shape[1]} tokens, got {known.numel()}")
    return Routes.of(experts, num_experts, known.bool()).split(lengths)


def _bytes(tensor: Tensor) -> bytes:
    tensor = tensor.contiguous()  # torch alone has no way to its bytes; numpy is not needed for them
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _tensor(path: Any, header: dict[str, Any], name: str, body: bytearray, dim: int) -> Tensor:
    try:
        entry = header[name]
        dtype, shape = DTYPES[entry["dtype"]], [int(n) for n in entry["shape"]]
        start, end = (int(n) for n in entry["data_offsets"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: its header must tell of {name}, got {header.get(name)}") from error
    count = 1
    for n in shape:
        count *= n
    fits = 0 <= start <= end <= len(body) and end - start == count * dtype.itemsize and min(shape) >= 0
    if len(shape) != dim or not fits:
        raise ValueError(
            f"{path}: {name} must be {count * dtype.itemsize} of the file's {len(body)} bytes, "
            f"got those from {start} to {end}"
        )
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(body, dtype=dtype, count=count, offset=start).reshape(shape)
