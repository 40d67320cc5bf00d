"""Processes that hold parts of one model: DDP, FSDP and DeepSpeed's ZeRO, for real, over gloo."""

import functools
import importlib.util
import multiprocessing
import os
import time
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest
import torch

RANKS = 2
SECONDS = 1200

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


def kinds(*names, apart=False):
    """Of ways to spread a model, those that one start of the processes tries; DeepSpeed's last, or apart."""
    zero = [name for name in names if name.startswith("zero")]
    others = [name for name in names if name not in zero]
    missing = importlib.util.find_spec("deepspeed") is None
    if not (apart or missing):
        return [pytest.param(others + zero, id="all")]
    mark = pytest.mark.skipif(missing, reason="needs DeepSpeed, which is not installed")
    return [pytest.param(zero, marks=mark, id="zero"), pytest.param(others, id="torch")]


def run(job, kinds, tmp_path, *arguments, count=RANKS):
    """``job(rank, kind, *arguments)`` on each of ``count`` ranks for each kind; ``[kind][rank]`` of what they
    return.

    Ranks that wait for each other for ever are an error.
    """
    folder = tmp_path / job.__name__
    folder.mkdir(parents=True)
    _start_the_server()
    told = job, kinds, str(folder), arguments, count
    context = torch.multiprocessing.start_processes(
        _rank, told, nprocs=count, join=False, start_method="forkserver"
    )
    end = time.monotonic() + SECONDS
    while not context.join(5):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            pytest.fail(f"the ranks did not end within {SECONDS} s: they wait for each other")
    found = [torch.load(folder / str(rank), weights_only=False) for rank in range(count)]
    return {kind: [of_rank[kind] for of_rank in found] for kind in kinds}


@functools.cache
def _start_the_server():
    """The process that ranks are forks of, with what they import: that takes longer than most tests."""
    multiprocessing.set_forkserver_preload(["rank_imports"])
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, PYTHONPATH=path):  # Pythons before 3.12.4 have no other way to it
        forkserver.ensure_running()


def _rank(rank, job, kinds, folder, arguments, count):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    no_gpu = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    os.environ.update({name: str(value) for name, value in (place | no_gpu).items()})
    if kinds[-1].startswith("zero"):
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        # whose compilation takes most of a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        group = {"rank": rank, "world_size": count, "init_method": store}
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, **group)
    else:
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    torch.save({kind: job(rank, kind, *arguments) for kind in kinds}, f"{folder}/{rank}")
    torch.distributed.barrier()


def wrap(model, kind):
    """The model as ranks share it; each decoder layer is gathered by itself."""
    layers = model.get_decoder().layers
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh("cpu", (RANKS,))
        for unit in (*layers, *([model.lm_head] if kind == "fsdp2-head" else []), model):
            fully_shard(unit, mesh=mesh)
        return model
    if kind == "fsdp1":
        from torch.distributed import fsdp
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layers[0])})
        return fsdp.FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config = zero(int(kind[-1]))
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.settings = HfDeepSpeedConfig(config)  # from which TRL knows, while it lives
    return engine


def calls_of(model):
    """A list that grows with each call of the model."""
    from rlkernel.integrations import hf

    calls = []
    hf.causal_lm(model).get_decoder().register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def zero(stage):
    """DeepSpeed's settings; no parameter is too small to be shared out."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }


def automatic_zero(stage):
    """DeepSpeed's settings, of which a trainer of transformers fills in its own."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    auto = dict.fromkeys((*names, "gradient_clipping"), "auto")
    return {"zero_optimization": zero(stage)["zero_optimization"]} | auto


def whole(x):
    """A tensor, or what ranks hold parts of as one."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def gradients(model, kind, loss):
    """Of each parameter by its name in the bare model: whole, the mean over the ranks."""
    if kind.startswith("zero"):
        from deepspeed.utils import safe_get_full_grad

        model.backward(loss)
        found = {name: safe_get_full_grad(p) for name, p in model.named_parameters()}
    elif kind == "fsdp1":
        loss.backward()
        with type(model).summon_full_params(model, with_grads=True):
            found = {name: p.grad.clone() for name, p in model.named_parameters()}
    else:
        loss.backward()
        found = {name: whole(p.grad) for name, p in model.named_parameters()}
    return {name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): g for name, g in found.items()}


def weights(model, kind):
    """Each parameter by its name in the bare model: whole."""
    parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    if not kind.startswith("zero"):
        return {name: whole(p.detach()).clone() for name, p in parameters.items()}
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: p.detach().clone() for name, p in parameters.items()}


def accelerate_without_gpus():
    """accelerate runs DeepSpeed and FSDP where it sees a GPU; here the CPU takes its part."""
    import accelerate.state as state

    state.PartialState._prepare_backend = lambda *_, **__: ("gloo", state.DistributedType.MULTI_GPU)
    state.PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
