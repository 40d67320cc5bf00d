"""torchtitan's own trainer, of pretraining: on a CPU, with random tokens and a model of two layers."""

import importlib
import tempfile
import types
from dataclasses import dataclass
from unittest import mock

import on_a_cpu
import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils
from torchtitan.models.common.attention import FlexAttention
from torchtitan.trainer import Trainer

LENGTH, SAMPLES = 32, 4


class Tokens(BaseDataLoader):
    """Random ones, of which some have no label, in two documents a row."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab: int
        infinite: bool = True  # the validator sets it

    def __init__(self, config, *, dp_rank, local_batch_size, seq_len, **_):
        self.vocab, self.rank, self.shape = config.vocab, dp_rank, (local_batch_size, seq_len + 1)
        self.given = 0

    def __iter__(self):
        while True:
            g = torch.Generator().manual_seed(100 * self.given + self.rank)
            self.given += 1
            tokens = torch.randint(self.vocab, self.shape, generator=g)
            labels = tokens[:, 1:].masked_fill(torch.rand(self.shape, generator=g)[:, 1:] < 0.3, -100)
            positions = torch.arange(LENGTH) % (LENGTH // 2)
            inputs = {"input": tokens[:, :-1].contiguous(), "positions": positions.repeat(SAMPLES, 1)}
            yield inputs, labels

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        pass

    encode = decode = get_vocab_size = None


def deterministic(*args, **options):
    """torchtitan's, which puts a compiled FlexAttention in its place anew."""
    seeded(*args, **options)
    FlexAttention._compiled_flex_attn = staticmethod(on_a_cpu.dense_attention)


seeded = utils.set_determinism
NO_GPU = types.SimpleNamespace(
    device_name="cpu",
    get_peak_stats=lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0),
    reset_peak_stats=lambda: None,
)


def trained(loss, model="llama3", *, parallelism=None, training=None, validate=False, folder=None, **config):
    """What ``steps`` steps told, and the weights after them; in ``folder`` they go on from a checkpoint."""
    spec = importlib.import_module(f"torchtitan.models.{model}").model_registry(
        "debugmodel", attn_backend="flex"
    )
    spec.model.layers = spec.model.layers[:2]
    data = Tokens.Config(vocab=spec.model.vocab_size)
    sizes = {"local_batch_size": SAMPLES, "seq_len": LENGTH, "steps": 2, "mixed_precision_param": "float32"}
    made = Trainer.Config(
        loss=loss,
        model_spec=spec,
        optimizer=default_adamw(lr=1e-2, eps=1e-3),  # a small gradient is rounding, and takes a small step
        training=TrainingConfig(**{**sizes, **(training or {})}, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(**(parallelism or {})),
        tokenizer=NoTokenizer.Config(),
        dataloader=data,
        validator=Validator.Config(enable=validate, freq=1, steps=2, dataloader=data),
        checkpoint=CheckpointManager.Config(
            enable=folder is not None, interval=1, keep_latest_k=0, last_save_model_only=False
        ),
        debug=DebugConfig(seed=0, enable_structured_logging=False),
        dump_folder=str(folder or tempfile.mkdtemp()),
        **{"activation_checkpoint": None, **config},
    )
    told = []
    with (
        mock.patch.object(metrics, "build_device_memory_monitor", lambda: NO_GPU),
        mock.patch.object(utils, "set_determinism", deterministic),
        mock.patch.object(utils, "set_pg_timeouts", lambda **_: None),  # of which Gloo has none
        mock.patch("torchtitan.trainer.time.sleep", lambda _: None),
    ):
        trainer = Trainer(made)
        for module in trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # which is all that Gloo can do
        of_trainer = trainer.metrics_processor
        of_trainer.should_log = lambda step: True
        of_trainer.log = lambda step, mean, largest, norm, **_: told.append((step, mean, largest, norm))
        of_trainer.log_validation = lambda loss, step: told.append((step, loss))
        trainer.train()
        trainer.close()
    state = trainer.model_parts[0].state_dict()
    return told, {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in state.items()}
