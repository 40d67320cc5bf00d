"""rlkernel.patch_llamafactory() under the real LLaMA-Factory: the tests of in_llamafactory/, in a process in
which an earlier TRL comes first, and what its command starts."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import peer_sources
import pytest
from fetch_peers import LLAMAFACTORY_TRL

if sys.version_info < (3, 11):
    pytest.skip("LLaMA-Factory needs Python 3.11", allow_module_level=True)

FOLDER = Path(__file__).parent / "in_llamafactory"
ROOT = Path(__file__).parents[2]
STAND_INS = {  # of sound, and of loaders that are saved with a run: no test has either
    "torchaudio/__init__.py": "",
    "torchdata/__init__.py": "",
    "torchdata/stateful_dataloader/__init__.py": "class StatefulDataLoader:\n    pass\n",
    "torchdata/stateful_dataloader/sampler.py": "class StatefulDistributedSampler:\n    pass\n",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of a process that has LLaMA-Factory, its TRL and the stand-ins."""
    found = tmp_path_factory.mktemp("installed")
    (found / "llamafactory").symlink_to(peer_sources.folder("llamafactory") / "llamafactory")
    for name, text in STAND_INS.items():
        path = found / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    trl = peer_sources.folder(f"trl-{LLAMAFACTORY_TRL}")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (trl, found, ROOT))),
        "DISABLE_VERSION_CHECK": "1",  # of transformers, datasets and others, which are later ones here
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run(command, environment, folder=ROOT):
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True, timeout=900
    )
    print(done.stdout[-8000:], done.stderr[-4000:])
    return done


def test_under_llamafactory(environment, tmp_path):
    options = ["-q", "-p", "no:cacheprovider", f"--confcutdir={FOLDER}", f"--basetemp={tmp_path / 'tests'}"]
    done = run(["-m", "pytest", *options, str(FOLDER)], environment)
    assert done.returncode == 0
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 20 and "skipped" not in done.stdout
