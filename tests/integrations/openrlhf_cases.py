"""The real OpenRLHF, which ``make`` fetches, with stand-ins for what of its dependencies needs a GPU."""

import contextlib
import importlib
import os
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from doors import Door, policy_batch
from peer_sources import folder

import rlkernel
from rlkernel.integrations.openrlhf import contract, switch
from rlkernel.integrations.openrlhf.openrlhf_patch import OpenRlhfPatch

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


DOOR = Door(
    rlkernel.patch_openrlhf, OpenRlhfPatch, "openrlhf", "OpenRLHF", contract.SUPPORTED, switch,
    (*switch.OWN, switch.RAY),
)  # fmt: skip
check_against_openrlhf, check_left_to_openrlhf = DOOR.check_against, DOOR.check_left
upstream, nothing_left_behind = DOOR.fixtures(installed)


def batch(*sizes, **more):
    new, old, rollout, advantages, mask = policy_batch(*sizes, **more)
    return {
        "log_probs": new, "old_log_probs": old, "advantages": advantages, "action_mask": mask,
        "rollout_log_probs": rollout,
    }  # fmt: skip
