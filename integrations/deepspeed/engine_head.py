"""The lm_head of an engine: a plain one, or what DeepSpeed's tensor parallelism leaves of it on a rank."""

from __future__ import annotations

from typing import Any

from rlkernel.integrations._shards import shard
from rlkernel.integrations.hf.lm_head import LmHead

LAYERS = "deepspeed.module_inject.layers"
# which hold neighbouring rows of the vocabulary; layers derived from them may hold others
COLUMNS = ("LinearLayer", "VocabParallelLinear")


class EngineHead(LmHead):
    """Scores by the rows of every rank, gathered or not: the ranks have the same tokens."""

    def _shard(self) -> dict[str, Any]:
        kind, module = type(self.module), self.module
        if (kind.__module__, kind.__name__) not in [(LAYERS, name) for name in COLUMNS]:
            return super()._shard()
        if module.defer_collectives_to_compiler:
            raise ValueError(f"{self.name}: DeepCompile must not have the collectives of its lm_head")
        sizes = module._partition_sizes
        return shard(module.mp_group, sum(sizes[: module.tp_index]))
