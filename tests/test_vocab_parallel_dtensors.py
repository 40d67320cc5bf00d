"""linear_logprob of a head that is a DTensor: outputs and gradients of a head in one piece."""

import pytest
import ranks
import torch
from linear_logprob_cases import NAMES

import rlkernel
from rlkernel.reference import linear_logprob as head_reference

pytestmark = [ranks.pytestmark, pytest.mark.slow]
VOCAB = 133


def _dtensors(rank, kind):
    """For a head that is spread some way: outputs, gradients whole, and what a head in one piece gives."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    count = torch.distributed.get_world_size()
    mesh = torch.distributed.init_device_mesh
    head = torch.nn.Linear(16, VOCAB)
    torch.manual_seed(1)
    torch.nn.init.normal_(head.weight), torch.nn.init.normal_(head.bias)
    alone = torch.nn.Linear(16, VOCAB)
    alone.load_state_dict(head.state_dict())

    def distributed(mesh, *placements):
        for name in ("weight", "bias"):
            whole = getattr(head, name).detach()
            setattr(head, name, torch.nn.Parameter(distribute_tensor(whole, mesh, placements)))

    data = rank  # which of the data-parallel ranks this one is
    if kind == "tp":
        distributed(mesh("cpu", (count,), mesh_dim_names=("tp",)), Shard(0))
        data = 0
    elif kind == "replicated":
        distributed(mesh("cpu", (count,), mesh_dim_names=("tp",)), Replicate())
        data = 0
    elif kind == "fsdp2":
        fully_shard(head, mesh=mesh("cpu", (count,)))
    elif kind == "fsdp2-tp":
        both = mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        distributed(both["tp"], Shard(0))
        fully_shard(head, mesh=both["dp"])
        data = both.get_local_rank("dp")
    batches = [head_reference.make_inputs(7, 16, VOCAB, seed=10 + i) for i in range(count)]
    up = torch.linspace(-1, 1, 7)

    def run(function, h, ids):
        out = function(h, ids)
        ((out.logprobs + out.entropy * 0.3) * up).sum().backward()
        return out.logprobs.detach(), h.grad

    options = {"return_entropy": True, "temperature": 0.8}
    leaf = batches[data]["hidden"].clone().requires_grad_()
    got = run(
        lambda h, ids: rlkernel.linear_logprob(h, head.weight, ids, bias=head.bias, **options),
        leaf, batches[data]["target_ids"],
    )  # fmt: skip
    replicas = {"tp": 1, "replicated": 1, "fsdp2": count, "fsdp2-tp": 2}[kind]
    want = []
    for batch in batches[:replicas]:
        h = batch["hidden"].clone().requires_grad_()
        want.append(
            run(
                lambda h, ids: rlkernel.linear_logprob(h, alone.weight, ids, bias=alone.bias, **options),
                h,
                batch["target_ids"],
            )  # fmt: skip
        )
    grads = [p.grad.full_tensor() for p in (head.weight, head.bias)]
    whole = [p.grad / replicas for p in (alone.weight, alone.bias)]
    return [float((a - b).abs().max()) for a, b in zip((*got, *grads), (*want[data], *whole), strict=True)]


@pytest.mark.parametrize(
    ("count", "kinds"), [(2, ["tp", "replicated", "fsdp2"]), (4, ["tp", "fsdp2", "fsdp2-tp"])], ids=str
)
def test_dtensors(count, kinds, tmp_path):
    """Over "tp" the vocabulary is shared; over other dimensions gathered, with the mean of the gradients."""
    for kind, reports in ranks.run(_dtensors, kinds, tmp_path, count=count).items():
        for rank, apart in enumerate(reports):
            for name, off in zip(("logprobs", *NAMES), apart, strict=True):
                assert off <= 1e-5, f"{kind}, rank {rank}: {name} differ by {off}"
