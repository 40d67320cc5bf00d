"""The fused head of an earlier TRL: of its asynchronous trainer, and of use_liger_kernel in TRL 1.14."""

import inspect

import earlier
import pytest
import torch
import trl.trainer.utils as utils

import rlkernel

HEAD = "_ChunkedLogProbFunction"


def call(inputs, **options):
    """Values, and gradients of a loss of both, of which TRL before 1.14 leaves the entropy's out."""
    head = getattr(utils, HEAD)
    taken = list(inspect.signature(THEIRS.forward).parameters)[1:]
    given = {**inputs, "chunk_size": 64, "temperature": 0.7, **options}
    results = head.apply(*(given[name] for name in taken if name in given))
    row = torch.linspace(-1, 1, len(results[0]))
    loss = (results[0] * row).sum() + (results[1] * row.flip(0)).sum()
    leaves = [x for x in inputs.values() if x is not None and x.requires_grad]
    return results, torch.autograd.grad(loss, leaves)


THEIRS = getattr(utils, HEAD, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_gives_trls_values(dtype):
    if THEIRS is None:
        assert earlier.VERSION.release < (1, 3)
        return
    g = torch.Generator().manual_seed(0)
    taken = inspect.signature(THEIRS.forward).parameters
    inputs = {
        "last_hidden": torch.randn(37, 24, generator=g, dtype=dtype).requires_grad_(),
        "weight": (torch.randn(211, 24, generator=g, dtype=dtype) / 2).requires_grad_(),
        "bias": torch.randn(211, generator=g, dtype=dtype).requires_grad_() if "bias" in taken else None,
        "targets": torch.randint(0, 211, (37,), generator=g),
    }
    options = {"final_logit_softcapping": 5.0, "logit_scale": 1.5}
    with rlkernel.patch_trl() as patch:
        ours, grads = call(inputs, **options)
    theirs, their_grads = call(inputs, **options)
    if dtype is torch.float64:
        assert patch.fallbacks == {f"{HEAD}: hidden is torch.float64": 1}
    else:
        assert patch.calls == {HEAD: 1} and not patch.fallbacks
    assert len(ours) == len(theirs) == 2
    torch.testing.assert_close((*ours, *grads), (*theirs, *their_grads), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("algorithm", ["DPO", "KTO"])
def test_a_preference_that_scores_in_it(model_path, algorithm):
    """As with use_liger_kernel, which needs a GPU, and as under FSDP, where a call of the reference is one of
    the trainer's method."""
    if earlier.VERSION.release < (1, 14):
        return  # which makes no use of it in these trainers
    from trl.models.utils import _ForwardRedirection

    class InTheHead(getattr(earlier.trl, f"{algorithm}Trainer")):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.use_liger_kernel, self._forward_redirection = True, _ForwardRedirection()

        def compute_loss(self, *args, **kwargs):
            self.is_fsdp_enabled = True
            try:
                return super().compute_loss(*args, **kwargs)
            finally:
                self.is_fsdp_enabled = False

    stock = earlier.trained(algorithm, model_path, InTheHead, max_steps=2)
    with rlkernel.patch_trl() as patch:
        patched = earlier.trained(algorithm, model_path, InTheHead, max_steps=2)
    assert patch.calls == {HEAD: 4 if algorithm == "DPO" else 8} and not patch.fallbacks
    earlier.check_same(patched, stock, 1e-4)
