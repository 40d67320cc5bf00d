"""Two ranks with parts of an lm_head that are plain tensors, as the backend ``spmd_types`` has them."""

import pytest
import ranks
import titan
import torch
from test_titan_ranks import start_the_server
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.distributed.utils import set_spmd_backend

EVEN, ODD = 96, 97  # torchtitan gathers logits, of which each rank must have as many
CASES = {
    "grpo": ("grpo", EVEN), "dapo": ("dapo", EVEN), "sft": ("sft", EVEN),
    "odd": ("grpo", ODD), "odd sft": ("sft", ODD),
}  # fmt: skip


def lm_head(vocab):
    return titan.head(config=titan.Linear.Config(in_features=titan.HIDDEN, out_features=vocab))


def part(rank, vocab):
    """What rank ``rank`` of two has of the lm_head, which still says how many tokens there are."""
    module = lm_head(vocab)
    own = module.weight.detach().chunk(2)[rank].clone()
    module.weight = torch.nn.Parameter(own)
    return module


def outcomes(rank, case):
    inner, vocab = CASES[case]
    labels, inputs = titan.batch(inner, vocab=vocab)
    config, hidden = titan.INNER[inner], titan.hidden_states()
    set_spmd_backend("spmd_types")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with set_current_spmd_mesh(mesh):
        found = [titan.outcome(titan.fused(config).build(), part(rank, vocab), hidden, labels, inputs)]
        if inner != "sft" and vocab == EVEN:
            stock = titan.chunked(config).build()
            found.append(titan.outcome(stock, part(rank, vocab), hidden, labels, inputs))
    return found


def check(name, got, want):
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6, msg=lambda told: f"{name}: {told}")


def check_alike(found, want):
    """Of both ranks: loss and metrics, parts of the weight's gradient, and the sum of the hidden states'."""
    for total, metrics, _ in found:
        check("loss", total, want[0])
        assert metrics.keys() == want[1].keys()
        for name, value in want[1].items():
            check(name, metrics[name], value)
    grads = [grads for _, _, grads in found]
    check("weight", torch.cat([grad["weight"] for grad in grads]), want[2]["weight"])
    check("hidden", grads[0]["hidden"] + grads[1]["hidden"], want[2]["hidden"])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    start_the_server()
    return ranks.run(outcomes, list(CASES), tmp_path_factory.mktemp("vocabulary"))


@pytest.mark.parametrize("case", CASES)
def test_a_shared_vocabulary(found, case):
    inner, vocab = CASES[case]
    labels, inputs = titan.batch(inner, vocab=vocab)
    module, hidden = lm_head(vocab), titan.hidden_states()
    whole = titan.outcome(titan.INNER[inner].build(), module, hidden, labels, inputs, whole=True)
    by_loss = list(zip(*found[case], strict=True))
    assert len(by_loss) == 1 + (inner != "sft" and vocab == EVEN), "torchtitan's own, too"
    for of_ranks in by_loss:
        check_alike(of_ranks, whole)
