"""The real verl, what rlkernel replaces in it, and inputs for both."""

import numpy as np
import pytest
import torch
from accuracy import check

import rlkernel

NEEDED = "needs verl, which is not installed"
verl = pytest.importorskip("verl", reason=NEEDED, exc_type=ImportError)
core = pytest.importorskip("verl.trainer.ppo.core_algos", reason=NEEDED, exc_type=ImportError)


def places():
    """(owner, name, what verl has there) of every attribute that the patch replaces."""
    with rlkernel.patch_verl() as patch:
        return [(entry, entry.expected) for entry in patch._done]


@pytest.fixture(autouse=True, scope="module")
def upstream():
    return places()


@pytest.fixture(autouse=True)
def nothing_left_behind(upstream):
    yield
    for entry, original in upstream:
        assert entry.current() is original, f"a test left {entry.path} patched"


def random(seed, *shape, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def actor_config(**fields):
    from verl.workers.config import ActorConfig

    info = fields.pop("global_batch_info", {})
    policy_loss = fields.pop("policy_loss", {})
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **fields)
    config.global_batch_info.update(info)
    for name, value in policy_loss.items():
        object.__setattr__(config.policy_loss, name, value)
    return config


def batch(seed=0, rows=6, tokens=11, drift=0.4):
    """Of a policy loss: sequences of several lengths, one of them empty, with holes where a tool spoke."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.randn(rows, tokens, generator=g).abs() - 0.05
    new = (old + drift * torch.randn(rows, tokens, generator=g)).clamp(max=-0.01)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=g)
    lengths[rows // 2] = 0 if rows > 1 else 1
    mask = (torch.arange(tokens) < lengths[:, None]) & (torch.rand(rows, tokens, generator=g) > 0.15)
    mask[0, 0] = True
    return {
        "old_log_prob": old,
        "log_prob": new,
        "advantages": torch.randn(rows, tokens, generator=g),
        "response_mask": mask,
    }


def weights_of(seed, shape):
    return random(seed, *shape, scale=0.5).exp()


def rewards(seed=0, rows=12, tokens=7):
    """Of advantage estimators: a reward at each response's last token, and the names of their groups."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=g)
    mask = (torch.arange(tokens) < lengths[:, None]).float()
    mask[1, 0] = 0.0 if lengths[1] > 1 else 1.0
    token_level = torch.zeros(rows, tokens)
    token_level[torch.arange(rows), lengths - 1] = torch.randn(rows, generator=g) + 1
    names = np.array([f"uid-{i}" for i in (0, 2, 2, 1, 0, 2, 1, 1, 3, 2, 0, 1)][:rows], dtype=object)
    return token_level, mask, names


def differentiated(call, leaves, dtype, upstream):
    """The outputs of ``call`` and the gradients of its ``leaves``, in ``dtype``."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in leaves]
    # no leaf itself: a backward that works in place writes over what it is given
    outputs = call(*(x * 1 for x in leaves))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((x.double() * u).sum() for x, u in zip(outputs, upstream, strict=True))
    return [x.detach() for x in outputs], torch.autograd.grad(total, leaves)


def check_against_verl(call, leaves, dtype, upstream, name, exact=None):
    """``call`` patched, beside verl's own: within twice verl's error in this dtype; the truth is ``exact`` in
    fp64, or verl's own."""
    leaves = [x.to(dtype) for x in leaves]
    truth = differentiated(exact or call, leaves, torch.float64, upstream)
    stock = differentiated(call, leaves, dtype, upstream)
    with rlkernel.patch_verl() as patch:
        found = differentiated(call, leaves, dtype, upstream)
        assert patch.calls[name] == 1 and not patch.fallbacks, (patch.calls, patch.fallbacks)
    for kind, got, theirs, exact in zip(("output", "gradient"), found, stock, truth, strict=True):
        for i, of in enumerate(zip(got, theirs, exact, strict=True)):
            check(f"{name}'s {kind} {i}", *of)
    return found, stock


def check_left_to_verl(call, reason):
    """Patched, ``call`` gives what it gave, be it an error, and ``reason`` is why."""

    def outcome():
        try:
            return call()
        except Exception as error:
            return type(error), str(error)

    want = outcome()
    with rlkernel.patch_verl() as patch:
        got = outcome()
        assert reason in str(patch.fallbacks) and not patch.calls
    assert str(got) == str(want)
