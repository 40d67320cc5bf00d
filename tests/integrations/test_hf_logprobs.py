"""packed_logprobs: through wrappers, in parts, with a mixture's auxiliary loss, and what it leaves behind."""

import contextlib
import importlib.util
from pathlib import Path

import pytest
import torch

import rlkernel
from rlkernel import PrefixBatch
from rlkernel.integrations import hf
from rlkernel.integrations.hf import lm_head, logprobs

transformers = pytest.importorskip("transformers", reason="needs transformers, which rlkernel does not need")
models = pytest.importorskip("hf_models")
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`", "ignore:None of the inputs")
rlkernel.register_hf()
EXACT = 5e-14  # in fp64; up to 2e-15 was seen


def pack(**options):
    return PrefixBatch.pack(models.PROMPTS, models.COMPLETIONS, **options)


def packed_model(name="llama", **options):
    model = models.make(name, **options)
    hf.use_packed(model)
    return model


def error(a, b):
    return float((a - b).detach().abs().max())


def test_the_example_of_its_documentation():
    model, batch = packed_model(), pack()
    logprobs = rlkernel.packed_logprobs(model, batch).logprobs
    padded = batch.unpack(logprobs)
    for row, (prompt, completion) in zip(padded, models.SAMPLES, strict=True):
        logits = model(torch.tensor([prompt + completion])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(
            1, torch.tensor(completion)[:, None].long()
        )
        assert error(row[: len(completion)], expected[:, 0]) <= EXACT if completion else (row == 0).all()


@pytest.mark.parametrize("name", ("granite", "cohere", "minicpm3", "deepseek_v2", "gpt2", "gemma2"))
def test_what_models_do_to_logits(name):
    """Scales, softcaps, learned positions, values narrower than keys (minicpm3) and wider (deepseek_v2)."""
    model = models.make(name)
    expected = torch.cat([x for x, _ in models.alone(model, temperature=0.7)])
    w = models.weights(len(expected))
    grads = models.gradients(model, (expected * w).sum())
    hf.use_packed(model)
    found = rlkernel.packed_logprobs(model, pack(), temperature=0.7).logprobs
    assert error(found, expected) <= (3e-6 if name == "gemma2" else EXACT)
    assert models.worst(models.gradients(model, (found * w).sum()), grads) <= 3e-6


def test_a_head_with_a_bias():
    model = packed_model()
    model.lm_head = torch.nn.Linear(32, models.VOCAB, dtype=torch.float64)
    expected = torch.cat([x for x, _ in models.alone(model)])
    assert error(rlkernel.packed_logprobs(model, pack()).logprobs, expected) <= EXACT


def test_old_and_reference_passes_have_the_bits_of_the_policy_pass():
    model, batch = packed_model(dtype=torch.float32), pack()
    policy = rlkernel.packed_logprobs(model, batch, return_entropy=True)
    with torch.no_grad():
        old = rlkernel.packed_logprobs(model, batch, return_entropy=True)
    assert torch.equal(policy.logprobs, old.logprobs) and torch.equal(policy.entropy, old.entropy)
    assert policy.logprobs.requires_grad and not old.logprobs.requires_grad
    assert torch.equal(rlkernel.packed_logprobs(model.eval(), batch).logprobs, old.logprobs)


@pytest.mark.parametrize("max_tokens", (1, 15, 30, 1000))
def test_parts(max_tokens):
    logprobs, entropy, grads = models.dense("llama")
    model, batch = packed_model(), pack()
    assert len(batch.split(max_tokens)) == {1: 8, 15: 5, 30: 2, 1000: 1}[max_tokens]
    found = rlkernel.packed_logprobs(model, batch, return_entropy=True, max_tokens=max_tokens)
    assert error(found.logprobs, logprobs) <= EXACT and error(found.entropy, entropy) <= EXACT
    w = models.weights(len(logprobs))
    loss = (found.logprobs * w).sum() + (found.entropy * w.flip(0)).sum()
    assert models.worst(models.gradients(model, loss), grads) <= 1e-6


def test_parts_of_a_tree_and_of_a_part():
    nodes = [[3 + i for i in range(n)] for n in (7, 5, 4, 6, 3)]
    tree = PrefixBatch.pack_tree(nodes, [-1, 0, 1, 1, 0], [False, True, True, True, True])
    model = packed_model()
    part = pack().select([6, 1, 4])
    with torch.no_grad():
        for batch in (tree, part):
            whole = rlkernel.packed_logprobs(model, batch).logprobs
            assert len(batch.split(14)) > 1
            assert error(rlkernel.packed_logprobs(model, batch, max_tokens=14).logprobs, whole) <= EXACT


@pytest.mark.parametrize("max_tokens", (None, 24))
@pytest.mark.parametrize("name", ("llama", "mixtral"))
def test_turns_of_agents(name, max_tokens):
    """Whole sequences that begin alike, with tools between the turns; each has a mask of its own."""
    g = torch.Generator().manual_seed(2)
    long = torch.randint(3, models.VOCAB, (26,), generator=g).tolist()
    tokens = [long[:13], long[:20], long, long[:15] + [5, 6, 7, 8], [9, 10, 11], long[:13]]
    masks = [[int(t > 5 and t % 7 < 4) for t in range(len(ids))] for ids in tokens]
    masks[1][:13] = [0] * 13  # trains on its last turn alone
    model = models.make(name)
    ids, mask = models.padded([([], ids) for ids in tokens])
    stock = model(ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    logprobs = stock.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    wanted = torch.zeros_like(ids, dtype=torch.bool)
    for n, own in enumerate(masks):
        wanted[n, : len(own)] = torch.tensor(own) != 0
    want = torch.where(wanted, torch.nn.functional.pad(logprobs, (1, 0)), 0)
    w = torch.randn(want.shape, generator=g, dtype=want.dtype)
    expected = models.gradients(model, (want * w).sum() + (stock.aux_loss if name == "mixtral" else 0))
    hf.use_packed(model)
    batch = PrefixBatch.from_sequences(tokens, masks)
    assert batch.total < 35 and batch.labels.numel() < batch.total - batch.n_prefix
    found = rlkernel.packed_logprobs(model, batch, return_aux_loss=name == "mixtral", max_tokens=max_tokens)
    got = batch.unpack(found.logprobs)
    assert error(got, want) <= EXACT
    loss = (got * w).sum() + (found.aux_loss if name == "mixtral" else 0)
    assert models.worst(models.gradients(model, loss), expected) <= 1e-5


@pytest.mark.parametrize("return_aux_loss", (False, True))
def test_batches_without_a_label(return_aux_loss):
    model = packed_model("mixtral" if return_aux_loss else "llama")
    for prompts, completions in (([], []), ([[], []], [[[]], [[]]]), ([[]], [[[5]]]), ([[5, 6]], [[[]]])):
        batch = PrefixBatch.pack(prompts, completions)
        found = rlkernel.packed_logprobs(model, batch, return_entropy=True, return_aux_loss=return_aux_loss)
        assert found.logprobs.shape == found.entropy.shape == (0,)
        loss = found.logprobs.sum() + found.entropy.sum()
        (loss + found.aux_loss if return_aux_loss else loss).backward()


# mixtures of experts


@pytest.mark.parametrize("max_tokens", (None, 20))
@pytest.mark.parametrize("name", ("qwen3_moe", "gpt_oss", "mixtral"))
def test_the_auxiliary_loss_is_that_of_the_padded_batch(name, max_tokens):
    samples = [*models.SAMPLES, ([], [5, 9, 30]), ([], []), ([8, 4], []), ([8, 4], [])]
    batch = PrefixBatch.pack(
        [*models.PROMPTS, [], [8, 4]], [*models.COMPLETIONS, [[5, 9, 30], []], [[], []]]
    )  # an empty prompt, empty completions, a prompt without any other
    model = models.make(name)
    ids, mask = models.padded(samples)
    stock = model(ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    expected = models.gradients(model, stock)
    hf.use_packed(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = rlkernel.packed_logprobs(
        model, batch, return_entropy=True, return_aux_loss=True, max_tokens=max_tokens
    )
    plain = rlkernel.packed_logprobs(model, batch, return_entropy=True)
    print(f"aux loss {stock:.6f}, error {error(found.aux_loss, stock):.1e}")
    assert error(found.aux_loss, stock) <= 1e-6  # transformers sums it in fp32
    assert models.worst(models.gradients(model, found.aux_loss), expected) <= 1e-5
    assert error(found.logprobs, plain.logprobs) <= EXACT and error(found.entropy, plain.entropy) <= EXACT


def test_without_weights_the_auxiliary_loss_is_another(monkeypatch):
    """The mutant of the test above: every row counted once, as if no prompt were shared."""
    model = models.make("mixtral")
    ids, mask = models.padded()
    stock = model(ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    hf.use_packed(model)
    right = rlkernel.packed_logprobs(model, pack(), return_aux_loss=True).aux_loss
    monkeypatch.setattr(PrefixBatch, "token_counts", lambda batch: torch.ones(batch.total))
    wrong = rlkernel.packed_logprobs(model, pack(), return_aux_loss=True).aux_loss
    assert error(right, stock) <= 1e-6 and error(wrong, stock) > 1e-3


def test_weights_count_every_token_of_every_sample():
    tree = PrefixBatch.pack_tree(
        [[3] * 5, [4] * 2, [], [5] * 3, [6], [7] * 4],
        [-1, 0, 1, 2, 1, -1],
        [False, False, True, True, True, False],
    )
    for batch in (pack(), pack().select([0, 0, 5]), tree, PrefixBatch.pack([], [])):
        longer, keep = batch.with_last_tokens()
        assert longer.token_counts().sum() == batch.tokens_dense
        assert torch.equal(longer.labels[keep], batch.labels)


def test_reentrant_checkpointing_cuts_the_router_off():
    model = packed_model("mixtral")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="router_logits have no gradient.* {'use_reentrant': False}"):
        rlkernel.packed_logprobs(model, pack(), return_aux_loss=True)
    with torch.no_grad():
        assert rlkernel.packed_logprobs(model, pack(), return_aux_loss=True).aux_loss > 0


def test_a_config_that_asks_for_router_logits():
    model = packed_model("mixtral", output_router_logits=True)
    found = rlkernel.packed_logprobs(model, pack())
    assert found.aux_loss is None and error(found.logprobs, models.dense("mixtral")[0]) <= EXACT
    assert rlkernel.packed_logprobs(model, pack(), return_aux_loss=True).aux_loss > 0


def test_dense_models_have_no_auxiliary_loss():
    with pytest.raises(
        ValueError, match="LlamaForCausalLM: it must return router_logits for return_aux_loss"
    ):
        rlkernel.packed_logprobs(packed_model(), pack(), return_aux_loss=True)


def test_a_transformers_whose_loss_takes_no_weights(monkeypatch):
    from transformers.models.mixtral import modeling_mixtral

    def old(logits, experts, top_k, attention_mask):
        rows, length = attention_mask.shape

    logprobs._load_balancing_loss.cache_clear()
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", old)
    with pytest.raises(ValueError, match="return_aux_loss needs a transformers whose load-balancing loss"):
        rlkernel.packed_logprobs(packed_model("mixtral"), pack(), return_aux_loss=True)
    assert rlkernel.packed_logprobs(packed_model("mixtral"), pack()).aux_loss is None


# what wraps a model


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


# what it leaves behind, and what it refuses


def test_nothing_is_left_behind():
    model, batch = packed_model(), pack()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    rlkernel.packed_logprobs(model, batch)
    for layer in (model.model.norm, model.lm_head):  # in front of the head, and in it

        def fails(*_):
            raise RuntimeError("in the middle")

        hook = layer.register_forward_hook(fails)
        with pytest.raises(RuntimeError, match="in the middle"):
            rlkernel.packed_logprobs(model, batch)
        hook.remove()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert model(batch.input_ids).logits.shape == (1, batch.total, models.VOCAB)
    own = model.lm_head.forward = lambda hidden: torch.nn.functional.linear(hidden, model.lm_head.weight)
    rlkernel.packed_logprobs(model, batch)
    assert model.lm_head.forward is own


def test_a_model_that_is_not_on_packed_attention():
    with pytest.raises(ValueError, match=r"set_attn_implementation\('rlkernel'\), got 'sdpa'"):
        rlkernel.packed_logprobs(models.make("llama"), pack())


def test_a_batch_of_something_else():
    with pytest.raises(ValueError, match="batch must be a PrefixBatch, got dict"):
        rlkernel.packed_logprobs(packed_model(), {})


def test_a_model_that_does_more_to_its_logits(monkeypatch):
    model = packed_model()
    real = type(model).forward

    def doubled(self, *args, **kwargs):
        out = real(self, *args, **kwargs)
        out.logits = out.logits * 2
        return out

    monkeypatch.setattr(type(model), "forward", doubled)
    with pytest.raises(
        ValueError, match=r"logits must be scaled by 1.0 and capped at None.*got \[-80.0, -6.0"
    ):
        rlkernel.packed_logprobs(model, pack())
    model.config.logit_scale = 2.0  # as Cohere's
    rlkernel.packed_logprobs(model, pack())


def test_logits_are_looked_at_once(monkeypatch):
    model, looks = packed_model(), []
    real = lm_head.LmHead._check_probe
    monkeypatch.setattr(lm_head.LmHead, "_check_probe", lambda *a: looks.append(1) or real(*a))
    for _ in range(3):
        rlkernel.packed_logprobs(model, pack())
    assert len(looks) == 1


@pytest.mark.parametrize("option, value", (("logit_scale", 2.0), ("final_logit_softcapping", 5.0)))
def test_a_config_that_changes_after_a_good_call(option, value):
    """The look at the logits is of one scale and one softcap."""
    model = packed_model()
    first = rlkernel.packed_logprobs(model, pack()).logprobs
    setattr(model.config, option, value)  # which the model does not do
    for _ in range(2):
        with pytest.raises(
            ValueError, match="its logits must be scaled by .* and capped at .*, as its config"
        ):
            rlkernel.packed_logprobs(model, pack())
    setattr(model.config, option, None)
    assert torch.equal(rlkernel.packed_logprobs(model, pack()).logprobs, first)


def test_a_head_that_is_called_twice_or_never(monkeypatch):
    model = packed_model()
    real = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, **k: (real(self, **k), real(self, **k))[1])
    with pytest.raises(ValueError, match="must call its lm_head once, got a second call"):
        rlkernel.packed_logprobs(model, pack())
    monkeypatch.setattr(type(model), "forward", lambda self, **k: self.model(**k))
    with pytest.raises(ValueError, match="must call its lm_head once, got no call"):
        rlkernel.packed_logprobs(model, pack())


def test_a_head_of_another_kind():
    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + x.sum()

    model = packed_model()
    model.lm_head = Adapted(32, models.VOCAB)
    with pytest.raises(ValueError, match=r"its lm_head must be a torch.nn.Linear, got .*Adapted"):
        rlkernel.packed_logprobs(model, pack())


def test_refused_models_say_why():
    with pytest.raises(ValueError, match="model must run packed batches exactly: .* dropout must be 0"):
        rlkernel.packed_logprobs(packed_model(attention_dropout=0.1), pack())


def test_the_example():
    path = Path(__file__).parents[2] / "examples" / "packed_grpo.py"
    spec = importlib.util.spec_from_file_location("packed_grpo", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.make_model(layers=2, hidden=32)
    rollout = example.make_rollout(prompt=24, length=6, group=4, groups=2)
    dense, packed = (
        example.step(model, rollout, score, 4) for score in (example.dense_logprobs, example.packed_logprobs)
    )
    assert abs(dense[0] - packed[0]) <= 1e-6
    assert error(dense[1], packed[1]) <= 1e-5 * float(dense[1].abs().max())
