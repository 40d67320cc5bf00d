"""Packed batches, and models whose attention runs on them."""

import pytest

import rlkernel
from rlkernel import PrefixBatch
from rlkernel.integrations import hf

transformers = pytest.importorskip("transformers", reason="needs transformers, which rlkernel does not need")
models = pytest.importorskip("hf_models")
rlkernel.register_hf()
EXACT = 5e-14  # of log-probabilities in fp64; up to 2e-15 was seen


def pack(**options):
    return PrefixBatch.pack(models.PROMPTS, models.COMPLETIONS, **options)


def packed_model(name="llama", checkpointing=None, **options):
    model = models.make(name, **options)
    hf.use_packed(model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return model


def error(a, b):
    return float((a - b).detach().abs().max())
