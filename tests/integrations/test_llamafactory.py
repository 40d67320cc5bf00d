"""rlkernel.patch_llamafactory() under the real LLaMA-Factory: the tests of in_llamafactory/, in a process in
which an earlier TRL comes first, and what its command starts."""

import json
import os
import sys
import textwrap
from pathlib import Path

import peer_sources
import pytest
import tiny
from fetch_peers import LLAMAFACTORY_TRL
from own_process import ROOT, check_folder, run

from rlkernel.integrations.llamafactory import install, switch

if sys.version_info < (3, 11):
    pytest.skip("LLaMA-Factory needs Python 3.11", allow_module_level=True)

FOLDER = Path(__file__).parent / "in_llamafactory"
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


def test_under_llamafactory(environment, tmp_path):
    check_folder(FOLDER, environment, tmp_path, more_than=20)


TOLD = """
import atexit, sys

def tell():
    home = sys.modules.get("rlkernel.integrations.llamafactory.llamafactory_patch")
    patch = home and home.LlamafactoryPatch.in_place()
    print("patched", patch and (dict(patch.calls), dict(patch.fallbacks)))

atexit.register(tell)
"""
CONFIG = {  # without checkpointing of LLaMA-Factory's own, which is not for transformers 5.24
    "stage": "dpo", "do_train": True, "finetuning_type": "lora", "lora_target": "q_proj", "dataset": "pairs",
    "dataset_dir": ".", "template": "default", "output_dir": "out", "max_steps": 2, "logging_steps": 1,
    "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True, "save_strategy": "no",
    "model_name_or_path": "model", "disable_gradient_checkpointing": True,
}  # fmt: skip


def test_a_run_of_torchruns_worker(environment, tmp_path):
    """LLaMA-Factory's own run from a file: its data, its template, its LoRA, and its trainer."""
    tiny.save(tmp_path / "model")
    pairs = [
        {
            "conversations": [{"from": "human", "value": f"what is {i}?"}],
            "chosen": {"from": "gpt", "value": f"it is {i}."},
            "rejected": {"from": "gpt", "value": "no idea."},
        }
        for i in range(8)
    ]
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    about = {"file_name": "pairs.json", "ranking": True, "formatting": "sharegpt", "columns": columns}
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"pairs": about}))
    (tmp_path / "run.yaml").write_text(json.dumps(CONFIG))
    (tmp_path / "sitecustomize.py").write_text(TOLD)
    paths = os.pathsep.join([environment["PYTHONPATH"], str(tmp_path)])
    variables = {"PYTHONPATH": paths, switch.SWITCH: "1", switch.STRICT: "1"}
    done = run([install.WORKER, "run.yaml"], environment | variables, tmp_path)
    assert done.returncode == 0 and "RuntimeWarning" not in done.stderr
    calls = {"CustomDPOTrainer.concatenated_forward": 4, "DPOTrainer.dpo_loss": 2}
    assert f"patched ({calls}, {{}})" in done.stdout
