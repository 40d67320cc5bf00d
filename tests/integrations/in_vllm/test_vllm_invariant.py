"""Two programs, one number: what vLLM's engine reports of a token is what transformers computes of it."""

import contextlib

import engines
import invariant_models
import routing_capture
import torch
from invariant_models import (
    OPS,
    Sample,
    differences,
    engine,
    loaded,
    prompt_samples,
    rollout,
    samples,
    saved,
    scored,
)
from server import Server
from torch.nn.utils import parametrize
from vllm.v1.core.sched.scheduler import Scheduler

import rlkernel
from rlkernel import routing_replay
from rlkernel.integrations.vllm import support_of


@contextlib.contextmanager
def patched(path, dtype, make=engines.in_process, return_support=0, **options):
    """An engine whose numbers are to be transformers'."""
    with rlkernel.patch_vllm(ops=OPS, batch_invariant=True, strict=True, return_support=return_support):
        assert rlkernel.batch_invariant.is_enabled()
        llm = engine(path, dtype, make, **options)
        try:
            yield llm
        finally:
            engines.shut_down(llm)
    assert not rlkernel.batch_invariant.is_enabled()


def assert_zero(found, count):
    assert len(found) == count and found.max() == 0, f"{int((found > 0).sum())} of {len(found)} differ"


def test_a_worker_process(tmp_path):
    path = saved(tmp_path, "Qwen2", torch.float32)
    with patched(path, torch.float32, engines.worker_processes) as llm:
        found = samples(rollout(llm))
    model = loaded(path, torch.float32)
    assert_zero(differences(model, found), 10 * 16)
    assert_zero(differences(model, found, score=invariant_models.scored_from_hidden), 10 * 16)


def test_a_server_with_an_adapter_merged_into_the_weights(tmp_path):
    """Llama in fp16. The trainer multiplies by W + s B A too, through which A and B have their gradients."""
    path, dtype = saved(tmp_path / "model", "Llama", torch.float16), torch.float16
    trained = adapted(loaded(path, dtype))
    with rlkernel.batch_invariant():
        merged = {name: weight.detach().clone() for name, weight in merged_weights(trained)}
    model = loaded(path, dtype)
    model.load_state_dict(merged)
    model.save_pretrained(path)
    with Server(
        path,
        tmp_path / "server.log",
        *("--dtype", "float16", "--enable-prefix-caching", "--max-num-batched-tokens", "48"),
        VLLM_RLKERNEL=",".join(OPS),
        VLLM_RLKERNEL_STRICT="1",
        VLLM_RLKERNEL_BATCH_INVARIANT="1",
    ) as server:
        answer = server.complete(
            prompt=(asked := invariant_models.prompts()), n=2, max_tokens=16, temperature=1.0, logprobs=1,
            ignore_eos=True,
        )  # fmt: skip
    found = [
        Sample(
            asked[i // 2],
            [int(x.split(":")[1]) for x in choice["logprobs"]["tokens"]],
            choice["logprobs"]["token_logprobs"],
        )
        for i, choice in enumerate(answer["choices"])
    ]
    assert_zero(differences(trained, found), 10 * 16)
    assert differences(loaded(path, dtype), found, mode=False).max() > 0
    with rlkernel.batch_invariant():
        scored(trained, found).sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in trained.parameters() if p.requires_grad
    )


class Adapter(torch.nn.Module):
    """W + s B A, wherever W is asked for."""

    def __init__(self, weight):
        super().__init__()
        out, into = weight.shape
        self.a = torch.nn.Parameter(0.05 * torch.randn(4, into, dtype=weight.dtype))
        self.b = torch.nn.Parameter(0.05 * torch.randn(out, 4, dtype=weight.dtype))

    def forward(self, weight):
        return weight + 2 * (self.b @ self.a)


def adapted(model):
    torch.manual_seed(1)
    model.requires_grad_(False)
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj", "down_proj")):
            parametrize.register_parametrization(module, "weight", Adapter(module.weight))
    return model


def merged_weights(model):
    for name, module in model.named_modules():
        for key in ("weight", "bias"):
            if isinstance(getattr(module, key, None), torch.Tensor):
                yield f"{name}.{key}", getattr(module, key)


def test_softcaps_windows_preemption_and_prompts(tmp_path, monkeypatch):
    """Gemma 2 in bf16, in a cache that holds a few requests alone."""
    preempted, asked = [], invariant_models.prompts((20, 25, 60))  # which all go on into another block
    preempt = Scheduler._preempt_request

    def counted(self, request, *args, **options):
        preempted.append(request)
        return preempt(self, request, *args, **options)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    path = saved(tmp_path, "Gemma2", torch.bfloat16)
    with patched(path, torch.bfloat16, max_model_len=96, num_gpu_blocks_override=8) as llm:
        found = rollout(llm, asked, max_tokens=24, prompt_logprobs=1)
    assert preempted
    model = loaded(path, torch.bfloat16)
    assert_zero(differences(model, samples(found)), 10 * 24)
    assert_zero(differences(model, prompt_samples(found)), sum(len(p) - 1 for p in asked))
    assert differences(model, samples(found), mode=False).max() > 0


def test_processed_logprobs_are_those_of_a_support(tmp_path):
    """Gemma 3 in fp32, with tokens drawn of a nucleus."""
    path = saved(tmp_path, "Gemma3", torch.float32)
    with patched(path, torch.float32, return_support=512, logprobs_mode="processed_logprobs") as llm:
        found = rollout(llm, temperature=0.8, top_p=0.9, top_k=100)
    support = support_of(found)
    assert support.known.all() and len(support.ids) > 10 * 16 * 2
    options = {"support_ids": support.ids, "support_offsets": support.offsets}
    model = loaded(path, torch.float32)
    assert_zero(differences(model, samples(found), temperature=0.8, **options), 10 * 16)
    assert differences(model, samples(found), temperature=0.8).max() > 1e-3  # of the whole row


def test_experts_with_the_engines_routes_and_without(tmp_path):
    """Qwen3-MoE in bf16."""
    path = saved(tmp_path, "Qwen3Moe", torch.bfloat16)
    with patched(path, torch.bfloat16) as llm:
        found = samples(rollout(llm))
        [prompt] = engines.prompts(1, shortest=20, longest=40)
        output, routed = routing_capture.generate(llm, prompt, 8)
    model = loaded(path, torch.bfloat16)
    assert_zero(differences(model, found), 10 * 16)
    assert_zero(differences(model, found, score=invariant_models.scored_from_hidden), 10 * 16)
    assert differences(model, found, mode=False).max() > 0
    replayed = samples([output])
    routes = routing_replay.from_vllm(
        routed, 8, layers=routing_replay.moe_layers(model), tokens=len(replayed[0].ids)
    )
    with routing_replay.replay(model, routes) as replay:
        assert_zero(differences(model, replayed), 8)
    assert float(replay.overlap.min()) == 1
    assert_zero(differences(model, replayed), 8)
