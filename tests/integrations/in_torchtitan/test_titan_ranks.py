"""Two ranks that FSDP 2 spreads torchtitan's model over, its lm_head with the norm or with the embedding, or
that share its layers and its vocabulary."""

import functools
import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pretraining
import ranks
import titan
import torch
from test_titan_pretraining import check_alike as check_pretraining
from test_titan_trainer import check_alike

BACKEND = "partial_dtensor"
FSDP = {"backend": BACKEND}
KINDS = {
    "tied": FSDP | {"tied": True},
    "bf16": FSDP | {"tied": False, "dtype": "bfloat16"},
    "tp": FSDP | {"tied": False, "tensor_parallel": 2},
}
TOLERANCE = {"bf16": 2e-2}


@functools.cache
def start_the_server():
    """As ``ranks`` does, with what these ranks import, and before it."""
    multiprocessing.set_forkserver_preload(["titan"])
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()


def train(rank, kind):
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's own start of ranks does
    config = titan.INNER["grpo"]
    return [titan.trained(loss(config), ranks=2, **KINDS[kind]) for loss in (titan.fused, titan.chunked)]


def test_two_ranks(tmp_path):
    start_the_server()
    found = ranks.run(train, list(KINDS), tmp_path)
    for kind, of_ranks in found.items():
        for ours, stock in of_ranks:
            check_alike(ours, stock, TOLERANCE.get(kind, 2e-5))
        check_alike(of_ranks[0][0], of_ranks[1][0], 0.0)


PRETRAINING = {
    "tied": {
        "model": "qwen3",
        "parallelism": {"spmd_backend": BACKEND, "fsdp_reshard_after_forward": "always"},
    },
    "tp": {
        "validate": True,
        "parallelism": {
            "spmd_backend": BACKEND,
            "tensor_parallel_degree": 2,
            "enable_sequence_parallel": False,
        },
    },
}


def pretrain(rank, kind):
    torch.autograd.set_multithreading_enabled(False)
    config = titan.INNER["sft"]
    return [pretraining.trained(loss(config), **PRETRAINING[kind]) for loss in (titan.fused, titan.chunked)]


def test_two_ranks_of_pretraining(tmp_path):
    start_the_server()
    for of_ranks in ranks.run(pretrain, list(PRETRAINING), tmp_path).values():
        for ours, stock in of_ranks:
            check_pretraining(ours, stock)
