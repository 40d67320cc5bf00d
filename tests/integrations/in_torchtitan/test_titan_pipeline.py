"""Schedules of pipeline parallelism: the last stage has the lm_head, and some take its gradients apart.

All stages are in one process.  torchtitan's own wrapper is no reference here: torch's schedules call the loss
once more than there are microbatches, to see shapes, and the wrapper's backward inside of that call leaves a
gradient in the lm_head.
"""

import pytest
import titan
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

MICROBATCHES = 4
VALID = torch.tensor(40)
SCHEDULES = "1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"


class Part(torch.nn.Module):
    def __init__(self, last):
        super().__init__()
        self.inner = torch.nn.Linear(titan.HIDDEN, titan.HIDDEN)
        self.lm_head = titan.head() if last else None

    def forward(self, hidden):
        return torch.tanh(self.inner(hidden))


def parts(count):
    torch.manual_seed(0)
    return torch.nn.ModuleList(Part(i == count - 1) for i in range(count))


def batch():
    labels, _ = titan.batch("sft", rows=MICROBATCHES)
    g = torch.Generator().manual_seed(3)
    return torch.randn(MICROBATCHES, titan.LENGTH, titan.HIDDEN, generator=g), labels


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def by_whole_logits(count):
    model = parts(count)
    hidden, labels = batch()
    for part in model:
        hidden = part(hidden)
    total, _ = titan.INNER["sft"].build()(model[-1].lm_head(hidden), labels, VALID)
    total.backward()
    return total.detach(), gradients(model)


def by_schedule(kind, count):
    model, loss = parts(count), titan.fused(titan.INNER["sft"]).build()
    loss.set_lm_head(model[-1].lm_head)
    stages = [PipelineStage(part, i, count, torch.device("cpu")) for i, part in enumerate(model)]
    made = get_schedule_class(kind)
    schedule = made(
        stages[0] if count == 1 else stages,
        n_microbatches=MICROBATCHES,
        loss_fn=lambda *given, **named: loss(*given, **named)[0],  # as torchtitan gives it
        scale_grads=False,
    )
    hidden, labels = batch()
    losses = []
    schedule.step(hidden, target=labels, losses=losses, loss_kwargs={"global_valid_tokens": VALID})
    return torch.stack(losses).sum().detach(), gradients(model)


@pytest.fixture(autouse=True, scope="module")
def alone(tmp_path_factory):
    store = tmp_path_factory.mktemp("stages") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_has_the_gradients_of_whole_logits(kind):
    count = 1 if issubclass(get_schedule_class(kind), PipelineScheduleSingle) else 2
    want, found = by_whole_logits(count), by_schedule(kind, count)
    torch.testing.assert_close(found[0], want[0])
    assert found[1].keys() == want[1].keys() and want[1][f"{count - 1}.lm_head.weight"].abs().max() > 0
    torch.testing.assert_close(found[1], want[1], rtol=1e-4, atol=1e-6)
