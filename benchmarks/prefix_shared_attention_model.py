"""A training step of a small transformer, its prompts repeated and packed: what the whole model gains.

    python -m rlkernel.benchmarks.prefix_shared_attention_model --threads 1 --json report.json

A Qwen2-like model in plain PyTorch computes the logprobs of a group of completions, and their gradients: once
as a batch of G sequences of P + L tokens, once as one packed row.  Both run in turns; the logprobs and the
gradients of all parameters are compared before anything is timed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

import rlkernel
from rlkernel.bench import amx, measure, memory, report
from rlkernel.benchmarks.prefix_shared_attention import GRID

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 256, 768, 4, 4, 2, 64, 4096
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        y = rms_norm(x, (HIDDEN,))
        q, k, v = (w(y).unflatten(-1, (-1, HEAD_DIM)) for w in (self.q, self.k, self.v))
        x = x + self.o(attend(_turned(q, turn), _turned(k, turn), v).flatten(-2))
        y = rms_norm(x, (HIDDEN,))
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [..., T, HIDDEN]."""
        rates = 1e6 ** (-torch.arange(0, 1, 2 / HEAD_DIM))
        angles = (positions[..., None] * rates)[..., None, :]
        turn = angles.cos(), angles.sin()
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, turn, attend)
        return rms_norm(x, (HIDDEN,))

    def logprobs(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return rlkernel.linear_logprob(hidden, self.embedding.weight, labels).logprobs


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    (cos, sin), (a, b) = turn, x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def repeated(model: Model, prompt: list[int], completions: list[list[int]]) -> Tensor:
    ids = torch.tensor([prompt + completion for completion in completions])
    length = len(completions[0])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    hidden = model(ids, torch.arange(ids.shape[1]), attend)[:, -length - 1 : -1]
    return model.logprobs(hidden.flatten(0, 1), ids[:, -length:].flatten())


def packed(model: Model, batch: rlkernel.PrefixBatch) -> Tensor:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = rlkernel.prefix_shared_attention(q, k, v, batch)
        assert isinstance(out, Tensor)
        return out

    hidden = model(batch.input_ids[0], batch.position_ids[0], attend)
    return model.logprobs(batch.completion_rows(hidden), batch.labels)


def flops(model: Model, tokens: int, labels: int, pairs: int) -> int:
    """Of a step: 6 per weight and token, 14 per head, element and pair of rows, 8 per entry of a logit."""
    weights = sum(p.numel() for p in model.layers.parameters())
    head = 8 * labels * HIDDEN * VOCABULARY  # the fused head computes its logits twice
    return 6 * weights * tokens + 14 * LAYERS * HEADS * HEAD_DIM * pairs + head


def measured(p: int, length: int, g: int, seconds: float) -> dict[str, Any]:
    """Ratios of repeated to packed: step time, operations, tokens, peak memory beyond the gradients."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Model()
    prompt = torch.randint(VOCABULARY, (p,), generator=generator).tolist()
    completions = torch.randint(VOCABULARY, (g, length), generator=generator).tolist()
    batch = rlkernel.PrefixBatch.pack([prompt], [completions])
    weight = torch.randn(g * length, generator=generator)
    parameters = list(model.parameters())

    def step(logprobs: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            found = logprobs()
            return (found, *torch.autograd.grad(found @ weight, parameters))

        return run

    calls = {
        "repeated": step(lambda: repeated(model, prompt, completions)),
        "packed": step(lambda: packed(model, batch)),
    }
    theirs, ours = (calls[name]() for name in calls)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True)]
    if max(errors) > 1e-4:
        raise RuntimeError(f"packed must be within 1e-4 of repeated, got {max(errors):.1e}")
    del theirs, ours
    peaks = {name: memory.peak_extra(call, "cpu") for name, call in calls.items()}
    times = {name: statistics.median(x) for name, x in measure.interleave(calls, "cpu", seconds).items()}
    n, dense = p + length, g * (p + length)
    shared = (p - 1) * p // 2 + g * (length * (p - 1) + length * (length + 1) // 2)
    work = {
        "repeated": flops(model, dense, g * length, g * n * (n + 1) // 2),
        "packed": flops(model, batch.total, g * length, shared),
    }
    # what both hold in the end, and not the group's
    gradients = sum(x.nbytes for x in parameters)
    held = {name: peak - gradients for name, peak in peaks.items()}
    compared: dict[str, dict[str, Any]] = {"time": times, "flops": work, "memory": held}
    ratio = {name: x["repeated"] / x["packed"] for name, x in compared.items()}
    ratio["tokens"] = dense / batch.total
    return {
        "sizes": {"P": p, "L": length, "G": g},
        "seconds": times,
        "peak_extra_bytes": peaks,
        "gradient_bytes": gradients,
        "flops": work,
        "ratio": ratio,
        "logprob_error": errors[0],
        "gradient_error": max(errors[1:]),
        "backend": rlkernel.last_backend("prefix_shared_attention"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = ("P", "L", "G", "repeated ms", "packed ms", "time", "FLOPs", "time/FLOPs", "tokens", "memory")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        ratio, seconds = row["ratio"], row["seconds"]
        lines.append(
            (
                *map(str, row["sizes"].values()),
                *(f"{1e3 * seconds[name]:.0f}" for name in ("repeated", "packed")),
                *(f"{ratio[name]:.2f}x" for name in ("time", "flops")),
                f"{ratio['time'] / ratio['flops']:.0%}",
                *(f"{ratio[name]:.2f}x" for name in ("tokens", "memory")),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(x, widths, strict=True)) for x in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=5.0, help="spent on the rounds of one case")
    parser.add_argument("--shape", nargs=3, type=int, metavar=("P", "L", "G"), help="instead of the grid")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    amx.avoid_broken_amx()
    rows = [measured(p, n, g, options.seconds) for p, n, g in ([options.shape] if options.shape else GRID)]
    head = report.header(arguments, "cpu")
    head["command"] = head["command"].replace("rlkernel.bench", __spec__.name)
    if options.json:
        Path(options.json).write_text(json.dumps({"header": head, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    print("ratios are repeated / packed; time/FLOPs: how much of what is saved arrives")
    print("memory: the peak beyond the gradients, which both hold")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
