"""The real vLLM on a CPU, on a model that is made on the spot: ``make test-vllm`` runs this folder."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))  # ports
sys.path.insert(1, str(Path(__file__).parent.parent))  # tiny
sys.path.append(str(Path(__file__).parents[3] / "examples"))  # which import each other

import vllm_environment  # noqa: F401, I001  (before vLLM)
import engines
import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return engines.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def llm(model):
    """An engine in this process, where a patch of its classes comes and goes at any time."""
    return engines.in_process(model)


@pytest.fixture
def patch():
    import rlkernel

    with rlkernel.patch_vllm(strict=True) as patch:
        yield patch


@pytest.fixture
def expanded(monkeypatch):
    """What each row asks for at each of its drafts: vLLM 0.32's own leaves it unwritten on a CPU."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts)

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)
