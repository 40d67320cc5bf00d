"""The real OpenRLHF, which ``make`` fetches, with stand-ins for what of its dependencies needs a GPU."""

import contextlib
import importlib
import os
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
from accuracy import check
from peer_sources import folder

import rlkernel

NEEDED = "needs OpenRLHF's dependencies"
for name in ("transformers", "peft", "deepspeed", "ray"):  # of which some look for what is installed
    pytest.importorskip(name, reason=NEEDED)

VERSION = "0.11.2"
ROOT = Path(__file__).parents[2]
STAND_INS = {
    "flash_attn/__init__.py": "",
    "flash_attn/bert_padding.py": """
        import torch
        from einops import rearrange

        def index_first_axis(x, indices):
            return x[indices]

        def unpad_input(x, mask):
            lengths = mask.sum(-1, dtype=torch.int32)
            indices = mask.flatten().nonzero()[:, 0]
            ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            return rearrange(x, "b s ... -> (b s) ...")[indices], indices, ends, int(lengths.max()), lengths

        def pad_input(x, indices, batch, seqlen):
            found = x.new_zeros(batch * seqlen, *x.shape[1:])
            return found.index_copy(0, indices, x).view(batch, seqlen, *x.shape[1:])
    """,
    "flash_attn/utils/__init__.py": "",
    "flash_attn/utils/distributed.py": """
        import torch.distributed.nn.functional as functional

        def all_gather(x, group):
            return __import__("torch").cat(functional.all_gather(x.contiguous(), group))
    """,
    "ring_flash_attn/__init__.py": "def update_ring_flash_attn_params(cu_seqlens, group):\n    pass\n",
    "vllm/__init__.py": "class SamplingParams:\n    pass\n",
    "vllm/inputs.py": "class TokensPrompt:\n    pass\n",
    "vllm/utils.py": "def random_uuid():\n    return '0'\n",
    "pylatexenc/__init__.py": "from . import latex2text\n",
    "pylatexenc/latex2text.py": "",
    "torchdata/__init__.py": "",
    "torchdata/stateful_dataloader.py": "class StatefulDataLoader:\n    pass\n",
    "aiohttp/__init__.py": "",
}


def places(parent):
    """Folders for ``sys.path``: OpenRLHF as if it were installed, and the stand-ins."""
    found, stand_ins = parent / "installed", parent / "stand_ins"
    found.mkdir()
    (found / "openrlhf").symlink_to(folder("openrlhf") / "openrlhf")
    info = found / f"openrlhf-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: openrlhf\nVersion: {VERSION}\n")
    for name, text in STAND_INS.items():
        path = stand_ins / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return found, stand_ins


_parent = tempfile.TemporaryDirectory()
INSTALLED, STOOD_IN = places(Path(_parent.name))


@contextlib.contextmanager
def installed():
    """Inside, this process finds OpenRLHF; behind it, other tests do not."""
    sys.path.append(str(INSTALLED))
    try:
        yield
    finally:
        sys.path.remove(str(INSTALLED))


def _imported():
    """OpenRLHF's modules.  What stands in for other packages is gone again."""
    before = set(sys.modules)
    sys.path[:0] = [str(STOOD_IN)]
    try:
        names = (
            "models.utils", "models.loss", "models.actor", "models.ring_attn_utils",
            "trainer.ppo_utils.experience_maker", "trainer.ray.ppo_actor", "trainer.ray.ppo_critic",
            "trainer.dpo_trainer", "trainer.ppo_utils.experience",
        )  # fmt: skip
        return {name: importlib.import_module(f"openrlhf.{name}") for name in names}
    finally:
        sys.path.remove(str(STOOD_IN))
        stand_ins = {Path(path).parts[0] for path in STAND_INS}
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in stand_ins:
                del sys.modules[name]


with installed():
    MODULES = _imported()
utils, losses, actors = (MODULES[f"models.{x}"] for x in ("utils", "loss", "actor"))
makers = MODULES["trainer.ppo_utils.experience_maker"]


def environment(**variables):
    """Of a fresh process that has OpenRLHF and the stand-ins."""
    paths = [str(STOOD_IN), str(INSTALLED), str(ROOT), *sys.path]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(paths), PYTHONWARNINGS="ignore") | variables


def all_places():
    with rlkernel.patch_openrlhf() as patch:
        return [(entry, entry.expected) for entry in patch._done]


@pytest.fixture(autouse=True, scope="module")
def upstream():
    with installed():
        yield all_places()


@pytest.fixture(autouse=True)
def nothing_left_behind(upstream, monkeypatch):
    from rlkernel.integrations.openrlhf import switch

    for name in (*switch.OWN, switch.RAY):
        monkeypatch.delenv(name, raising=False)
    yield
    for name in (*switch.OWN, switch.RAY):  # monkeypatch gives back what it took, and no more
        os.environ.pop(name, None)
    for entry, original in upstream:
        assert entry.current() is original, f"a test left {entry.path} patched"


def random(seed, *shape, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(seed=0, rows=6, tokens=11, drift=0.4):
    """Of a policy loss: sequences of several lengths, one of them empty, with holes where a tool spoke."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.randn(rows, tokens, generator=g).abs() - 0.05
    new = (old + drift * torch.randn(rows, tokens, generator=g)).clamp(max=-0.01)
    rollout = (old + drift * torch.randn(rows, tokens, generator=g)).clamp(max=-0.01)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=g)
    lengths[rows // 2] = 0 if rows > 1 else 1
    mask = (torch.arange(tokens) < lengths[:, None]) & (torch.rand(rows, tokens, generator=g) > 0.15)
    mask[0, 0] = True
    return {
        "log_probs": new,
        "old_log_probs": old,
        "advantages": torch.randn(rows, tokens, generator=g),
        "action_mask": mask,
        "rollout_log_probs": rollout,
    }


def differentiated(call, leaves, dtype, upstream):
    """The outputs of ``call`` and the gradients of its ``leaves``, in ``dtype``."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in leaves]
    outputs = call(*(x * 1 for x in leaves))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((x.double() * u).sum() for x, u in zip(outputs, upstream, strict=True))
    return [x.detach() for x in outputs], torch.autograd.grad(total, leaves)


def check_against_openrlhf(call, leaves, dtype, upstream, name, exact=None):
    """``call`` patched, beside OpenRLHF's own: within twice its error in this dtype; the truth is ``exact``
    in fp64, or OpenRLHF's own."""
    leaves = [x.to(dtype) for x in leaves]
    truth = differentiated(exact or call, leaves, torch.float64, upstream)
    stock = differentiated(call, leaves, dtype, upstream)
    with rlkernel.patch_openrlhf() as patch:
        found = differentiated(call, leaves, dtype, upstream)
        assert patch.calls[name] == 1 and not patch.fallbacks, (patch.calls, patch.fallbacks)
    for kind, got, theirs, want in zip(("output", "gradient"), found, stock, truth, strict=True):
        for i, of in enumerate(zip(got, theirs, want, strict=True)):
            assert of[0].dtype == of[1].dtype
            check(f"{name}'s {kind} {i}", *of)
    return found, stock


def check_left_to_openrlhf(call, reason, parts=None):
    """Patched, ``call`` gives what it gave, be it an error, and ``reason`` is why."""

    def outcome():
        try:
            return call()
        except Exception as error:
            return type(error), str(error)

    want = outcome()
    with rlkernel.patch_openrlhf(parts) as patch:
        got = outcome()
        assert reason in str(patch.fallbacks) and not patch.calls, (patch.fallbacks, patch.calls)
    assert str(got) == str(want)
