"""packed_logprobs through what wraps a model: DDP, torch.compile, PEFT, autocast and frozen parameters."""

import contextlib

import pytest
import torch
from packed_cases import EXACT, error, models, pack, packed_model

import rlkernel
from rlkernel.integrations import hf

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`", "ignore:None of the inputs")


@contextlib.contextmanager
def process_group(tmp_path):
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("find_unused_parameters, max_tokens", ((False, None), (True, None), (False, 20)))
def test_ddp_reduces_the_gradients(tmp_path, find_unused_parameters, max_tokens):
    logprobs, entropy, grads = models.dense("qwen2")
    model = models.make("qwen2")
    w = models.weights(len(logprobs))
    with process_group(tmp_path):
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=find_unused_parameters
        )

        def doubled(state, bucket):  # stands for the other ranks: what did not pass here is seen
            done = torch.futures.Future()
            done.set_result(bucket.buffer() * 2)
            return done

        wrapped.register_comm_hook(None, doubled)
        hf.use_packed(wrapped)
        found = rlkernel.packed_logprobs(wrapped, pack(), return_entropy=True, max_tokens=max_tokens)
        loss = (found.logprobs * w).sum() + (found.entropy * w.flip(0)).sum()
        reduced = models.gradients(model, loss)
    assert error(found.logprobs, logprobs) <= EXACT
    assert models.worst({name: grad / 2 for name, grad in reduced.items()}, grads) <= 1e-6


@pytest.mark.parametrize(
    "where, checkpointing",
    [
        ("around", False),
        ("around", True),
        ("in place", True),
        ("a layer", False),
        ("around an adapter", False),
    ],
)
def test_compiled_models_run_as_they_are_written(where, checkpointing):
    """In a packed call; all others stay compiled."""
    runs = []

    def backend(graph, inputs):
        return lambda *a: runs.append(1) or graph(*a)

    logprobs, _, grads = models.dense("llama")
    model = compiled = packed_model()
    if checkpointing:  # which is refused where a layer is compiled
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch._dynamo.reset()
    if where == "in place":
        model.compile(backend=backend)
    elif where == "a layer":
        model.model.layers[1].compile(backend=backend)
    elif where == "around":
        compiled = torch.compile(model, backend=backend)
    else:
        peft = pytest.importorskip("peft", reason="needs PEFT, which rlkernel does not depend on")
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2)).double()
        compiled = torch.compile(adapted, backend=backend)
    found = rlkernel.packed_logprobs(compiled, pack()).logprobs
    assert error(found, logprobs) <= EXACT
    if where == "around an adapter":
        found.sum().backward()
    else:
        stock = models.make("llama")
        w = models.weights(len(logprobs))
        expected = models.gradients(stock, (torch.cat([x for x, _ in models.alone(stock)]) * w).sum())
        assert models.worst(models.gradients(model, (found * w).sum()), expected) <= 1e-6
    assert not runs
    if not checkpointing:
        compiled(torch.tensor([models.PROMPTS[0]]), use_cache=False)
        assert runs


def test_a_model_inside_another_object():
    """As PEFT wraps: a module of another kind whose forward calls the model."""

    class Wrapper(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.base, self.calls = model, 0

        def get_base_model(self):
            return self.base

        def forward(self, **inputs):
            self.calls += 1
            return self.base(**inputs)

    wrapper = Wrapper(models.make("llama"))
    hf.use_packed(wrapper)
    assert error(rlkernel.packed_logprobs(wrapper, pack()).logprobs, models.dense("llama")[0]) <= EXACT
    assert wrapper.calls == 1


def test_a_head_that_peft_trains():
    """Its adapter has a copy of the head, which runs while the adapter is on, and its base the original."""
    peft = pytest.importorskip("peft", reason="needs PEFT, which rlkernel does not depend on")
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, modules_to_save=["lm_head"])
    base = models.make("llama")
    model = peft.get_peft_model(base, config).double()
    head = base.lm_head.modules_to_save["default"]
    torch.nn.init.normal_(head.weight, std=0.2)  # as training would make it another
    w = models.weights(len(models.dense("llama")[0]))

    def scored(logprobs):
        return logprobs.detach(), models.gradients(model, (logprobs * w).sum())

    def alone():
        return torch.cat([logprobs for logprobs, _ in models.alone(model)])

    expected, grads = scored(alone())
    with model.disable_adapter(), torch.no_grad():
        reference = alone()
    hf.use_packed(model)
    found, found_grads = scored(rlkernel.packed_logprobs(model, pack()).logprobs)
    with model.disable_adapter(), torch.no_grad():
        found_reference = rlkernel.packed_logprobs(model, pack()).logprobs
    assert error(found, expected) <= EXACT and error(found_reference, reference) <= EXACT
    assert models.worst(found_grads, grads) <= 1e-6 and any("modules_to_save" in name for name in grads)
    assert error(expected, reference) > 0.1 and "forward" not in vars(head)


def test_frozen_models_train_what_is_not_frozen():
    logprobs, _, _ = models.dense("llama")
    model = packed_model().requires_grad_(False)
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    w = models.weights(len(logprobs))
    found = models.gradients(model, (rlkernel.packed_logprobs(model, pack()).logprobs * w).sum())
    other = models.make("llama")
    alone = torch.cat([x for x, _ in models.alone(other)])
    expected = models.gradients(other, (alone * w).sum())
    assert models.worst(found, {name: expected[name] for name in found}) <= 1e-6 and len(found) == 1


def test_autocast_and_half_models():
    """bf16 rounds alike: no further from fp64 than twice the model's own logprobs are, sample for sample."""
    truth = models.dense("llama")[0]
    for dtype, cast in ((torch.float32, True), (torch.bfloat16, False)):
        model = models.make("llama", dtype=dtype)
        context = torch.autocast("cpu", torch.bfloat16) if cast else contextlib.nullcontext()
        with context:
            own = error(torch.cat([x for x, _ in models.alone(model)]), truth)
            hf.use_packed(model)
            found = rlkernel.packed_logprobs(model, pack()).logprobs
        print(f"own {own:.1e}, packed {error(found, truth):.1e}")
        assert found.dtype == torch.float32 and error(found, truth) <= 2 * own
        found.sum().backward()


def test_fp32_head():
    model = packed_model(dtype=torch.bfloat16)
    hidden = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    batch = pack()
    with torch.autocast("cpu", torch.bfloat16):
        found = rlkernel.packed_logprobs(model, batch, fp32_head=True).logprobs
    logits = batch.completion_rows(hidden[0]).float() @ model.lm_head.weight.float().T
    expected = logits.log_softmax(-1).gather(1, batch.labels[:, None])[:, 0]
    assert error(found, expected) <= 1e-5
