"""Trainings by the real axolotl: its configuration, plugin manager, loader, builders and trainers."""

import tempfile

import axolotl.train
import earlier
from axolotl.cli.config import plugin_set_cfg, prepare_plugins
from axolotl.common.datasets import TrainDatasetMeta
from axolotl.integrations.base import PluginManager
from axolotl.utils.config import normalize_config, validate_config
from axolotl.utils.dict import DictDefault
from datasets import Dataset

PLUGIN = "rlkernel.integrations.axolotl.RlkernelPlugin"
BASE = {
    "datasets": [{"path": "somewhere", "type": "given"}],
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1,
    "max_steps": 2,
    "learning_rate": 0.1,
    "optimizer": "sgd",  # Adam takes a gradient that is the rounding of nothing for a step like all others
    "lr_scheduler": "constant",
    "sequence_len": 128,
    "logging_steps": 1,
    "seed": 0,
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "attn_implementation": "eager",
    "pad_token": "<pad>",
    "dataset_num_proc": 1,
}
OF = {
    "grpo": {"micro_batch_size": 8},
    "kto": {"remove_unused_columns": False},
    "orpo": {"orpo_alpha": 0.1},
    "simpo": {"rl_beta": 0.1, "cpo_alpha": 0.5, "simpo_gamma": 0.5},
}
GROUPS = {"num_generations": 4, "max_completion_length": 16, "beta": 0.04, "reward_funcs": ["runs.reward"]}
DATA = {"grpo": "GRPO", "kto": "KTO"}  # the others' are preferences


def reward(completions, completion_ids, **_):
    """Different for nearly every completion: with equal rewards the gradient is the rounding of nothing."""
    return [sum(i % 7 for i in ids) / len(ids) for ids in completion_ids]


def config(model_path, rl, plugin=False, groups=None, **more):
    """A validated configuration, as axolotl makes it of YAML."""
    raw = {**BASE, **OF.get(rl, {}), "base_model": model_path, "rl": rl, "output_dir": tempfile.mkdtemp()}
    if rl == "grpo":
        raw["trl"] = {**GROUPS, **(groups or {})}
    if plugin:
        raw["plugins"] = [PLUGIN]
    manager = PluginManager.get_instance()
    manager.plugins.clear()
    cfg = DictDefault(raw | more)
    prepare_plugins(cfg)
    cfg = validate_config(cfg)
    normalize_config(cfg)
    plugin_set_cfg(cfg)
    return cfg


def plugin():
    return PluginManager.get_instance().plugins[PLUGIN]


def data(rl):
    return TrainDatasetMeta(Dataset.from_dict(earlier.DATA[DATA.get(rl, "DPO")]), None, BASE["max_steps"])


def made(cfg):
    """A trainer that has not trained."""
    return axolotl.train.setup_model_and_trainer(cfg, data(cfg.rl))[0]


def trained(model_path, rl, plugin=False, **options):
    """What a training logged, and its weights."""
    cfg = config(model_path, rl, plugin, **options)
    _, _, trainer = axolotl.train.train(cfg, data(rl))
    return earlier.log_of(trainer), {name: x.clone() for name, x in trainer.model.state_dict().items()}
