"""What the tests of patch_trl(prefix_sharing=True) share: the trainers' method, and one pass through it."""

import types

import pytest
import tiny
import torch

import rlkernel

trl = pytest.importorskip("trl", reason="needs TRL, which rlkernel does not depend on")
accelerate = pytest.importorskip("accelerate")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
rloo_trainer = pytest.importorskip("trl.trainer.rloo_trainer")

from rlkernel.integrations.trl.contract import METHOD, SHUFFLE  # noqa: E402  (needs TRL)

UPSTREAM = {
    METHOD: vars(trl.GRPOTrainer)[METHOD],
    SHUFFLE: grpo_trainer.shuffle_sequence_dict,
}
RLOO = vars(trl.RLOOTrainer)[METHOD]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    assert vars(trl.GRPOTrainer)[METHOD] is UPSTREAM[METHOD], "a test left the method patched"
    assert grpo_trainer.shuffle_sequence_dict is UPSTREAM[SHUFFLE], "a test left the shuffle patched"
    assert vars(trl.RLOOTrainer)[METHOD] is RLOO and rloo_trainer.shuffle_sequence_dict is UPSTREAM[SHUFFLE]


def patch_trl(**options):
    return rlkernel.patch_trl(**{"prefix_sharing": True} | options)


PROMPTS, GROUP, PROMPT, COMPLETION = 2, 4, 9, 6
LENGTHS = (6, 3, 0, 1, 6, 6, 2, 5)  # of the completions; one is empty
OUTPUTS = ("log_probs", "entropy")


def make_model(model=None, temperature=0.7):
    from trl.trainer.utils import add_fused_lm_head

    model = tiny.make_model(vocab=211, hidden=32) if model is None else model
    add_fused_lm_head(model, temperature=temperature, outputs=OUTPUTS)  # as GRPOTrainer does
    return model


def samples(lengths=LENGTHS, prompts=(9, 5), seed=0):
    """TRL's tensors: prompts padded on the left, completions on the right."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 211, (PROMPTS * GROUP, PROMPT + COMPLETION), generator=g)
    mask = torch.ones_like(ids)
    for group, length in enumerate(prompts):
        rows = slice(group * GROUP, (group + 1) * GROUP)
        ids[rows, :PROMPT] = ids[group * GROUP, :PROMPT]
        mask[rows, : PROMPT - length] = 0
    for row, length in enumerate(lengths):
        mask[row, PROMPT + length :] = 0
    return ids * mask, mask


@pytest.fixture(scope="module")
def trainer():
    """What the method reads of a trainer."""
    return types.SimpleNamespace(accelerator=accelerate.Accelerator(cpu=True))


def one_pass(trainer, model, ids, mask, batch_size=None, aux_loss=False, **inputs):
    """Logprobs, entropies, aux loss and all gradients of a loss of the three."""
    model.zero_grad()
    method = getattr(trl.GRPOTrainer, METHOD)
    scores = method(
        trainer, model, ids, mask, COMPLETION, batch_size, compute_entropy=True, compute_aux_loss=aux_loss,
        **inputs,
    )  # fmt: skip
    logps, entropies, aux = scores
    row = torch.linspace(-1, 1, logps.numel()).view_as(logps)
    ((logps * row).sum() + (entropies * row.flip(0)).sum() + (100 * aux if aux_loss else 0)).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [x.detach() for x in scores if x is not None], grads


def assert_same_pass(ours, theirs, limit=5e-6):
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=limit, atol=limit)
    assert ours[1].keys() == theirs[1].keys()
    for name, other in theirs[1].items():
        apart = (ours[1][name] - other).abs().max() / other.abs().max().clamp_min(1e-3)
        assert apart <= 4 * limit, f"gradient of {name} differs by {apart:.1e}"
