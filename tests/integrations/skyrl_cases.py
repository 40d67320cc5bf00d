"""The real SkyRL, what rlkernel replaces in it, and inputs for both.

Its files lie where ``tests/fetch_peers.py`` put them, without what they want of a GPU; what in_skyrl/ holds
stands for packages of which they use a little.  Neither stays on the path: other frameworks would take what
lies there for installed.
"""

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accuracy import check
from peer_sources import folder

import rlkernel

if sys.version_info < (3, 11):
    pytest.skip("SkyRL needs Python 3.11", allow_module_level=True)
pytest.importorskip("ray", reason="needs Ray, which rlkernel does not need", exc_type=ImportError)
pytest.importorskip("omegaconf", reason="needs Ray, with which it comes here", exc_type=ImportError)
STAND_INS = Path(__file__).parent / "in_skyrl"
BACKEND = "skyrl.backends.skyrl_train"


SOURCE = folder("skyrl") / "skyrl"


@contextlib.contextmanager
def importable():
    before = list(sys.path)
    sys.path.insert(0, str(STAND_INS))
    try:
        yield
    finally:
        sys.path[:] = before
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            del sys.modules[name]


def load(name):
    with importable():
        return importlib.import_module(name)


if "skyrl" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "skyrl", SOURCE / "__init__.py", submodule_search_locations=[str(SOURCE)]
    )
    sys.modules["skyrl"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["skyrl"])
ppo_utils = load(f"{BACKEND}.utils.ppo_utils")
torch_utils = load(f"{BACKEND}.utils.torch_utils")
config = load("skyrl.train.config")


def places():
    """(entry, what SkyRL has there) of every attribute that the patch replaces."""
    with rlkernel.patch_skyrl() as patch:
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


def algorithm(**fields):
    """SkyRL's configuration; ``a__b`` is field b of its part a."""
    made = config.AlgorithmConfig()
    for name, value in fields.items():
        *path, last = name.split("__")
        owner = made
        for part in path:
            owner = getattr(owner, part)
        assert hasattr(owner, last), name
        setattr(owner, last, value)
    return made


def batch(seed=0, rows=6, tokens=11, drift=0.4):
    """Of a policy loss: sequences of several lengths, one of them empty, with holes where a tool spoke."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.randn(rows, tokens, generator=g).abs() - 0.05
    new = (old + drift * torch.randn(rows, tokens, generator=g)).clamp(max=-0.01)
    rollout = old + 0.3 * torch.randn(rows, tokens, generator=g)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=g)
    lengths[rows // 2] = 0 if rows > 1 else 1
    mask = (torch.arange(tokens) < lengths[:, None]) & (torch.rand(rows, tokens, generator=g) > 0.15)
    mask[0, 0] = True
    return {
        "log_probs": new,
        "old_log_probs": old,
        "advantages": torch.randn(rows, tokens, generator=g),
        "loss_mask": mask.float(),
        "rollout_logprobs": rollout,
    }


def rewards(seed=0, rows=12, tokens=7):
    """Of advantage estimators: responses that end together, as SkyRL pads them, with a reward at the last
    token, and the names of their groups."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=g)
    mask = (torch.arange(tokens) >= tokens - lengths[:, None]).float()
    token_level = torch.zeros(rows, tokens)
    token_level[:, -1] = torch.randn(rows, generator=g) + 1
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


def check_against_skyrl(call, leaves, dtype, upstream, name):
    """``call`` patched, beside SkyRL's own: within twice SkyRL's error in this dtype."""
    leaves = [x.to(dtype) for x in leaves]
    truth = differentiated(call, leaves, torch.float64, upstream)
    stock = differentiated(call, leaves, dtype, upstream)
    with rlkernel.patch_skyrl() as patch:
        found = differentiated(call, leaves, dtype, upstream)
        assert patch.calls[name] == 1 and not patch.fallbacks, (patch.calls, patch.fallbacks)
    for kind, got, theirs, exact in zip(("output", "gradient"), found, stock, truth, strict=True):
        for i, of in enumerate(zip(got, theirs, exact, strict=True)):
            check(f"{name}'s {kind} {i}", *of)
    return found, stock


def check_left_to_skyrl(call, reason):
    """Patched, ``call`` gives what it gave, be it an error, and ``reason`` is why."""

    def outcome():
        try:
            return call()
        except Exception as error:
            return type(error), str(error)

    want = outcome()
    with rlkernel.patch_skyrl() as patch:
        got = outcome()
        assert reason in str(patch.fallbacks) and not patch.calls, (patch.calls, patch.fallbacks)
    assert str(got) == str(want)
