"""rlkernel.patch_megatron() on the real Megatron-Core: two ranks over gloo, against its own functions."""

import contextlib
import functools
import warnings

import megatron_models
import pytest
import ranks
import torch
from accuracy import check
from bitwise import assert_equal
from doors import random
from megatron_models import BATCH, HIDDEN, LENGTH, VOCAB

import rlkernel

pytest.importorskip("megatron.core", reason="needs Megatron-Core, which is not installed")
pytestmark = [ranks.pytestmark, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HALF = VOCAB // 2
PADDING = ((0, 0), (5, 1))  # of the rows of logits [L, B, V] whose target is outside of the vocabulary


def _logits(case, dtype):
    """Of the whole vocabulary, and targets."""
    logits = random(5, LENGTH, BATCH, VOCAB, scale=3.0)
    g = torch.Generator().manual_seed(6)
    target = torch.randint(0, VOCAB, (LENGTH, BATCH), generator=g)
    if case == "masked":  # as slime replays a sampler's filters: some rows keep nothing of one rank's
        gone = torch.rand(logits.shape, generator=g) < 0.5
        gone[1, :, :HALF] = gone[2, :, HALF:] = True
        gone.scatter_(-1, target[..., None], False)
        target[1] = HALF + 1
        target[2] = 1
        gone[1, :, HALF + 1] = gone[2, :, 1] = False
        logits[gone] = -torch.inf
    if case == "large":
        logits *= 1e4
    for row, value in zip(PADDING, (-100, VOCAB), strict=True):
        target[row] = value
    return logits.to(dtype), target


CASES = [
    ("plain", torch.float32),
    ("plain", torch.bfloat16),
    ("masked", torch.float32),
    ("large", torch.float32),
]
UPSTREAM = random(7, LENGTH, BATCH)
for row in PADDING:  # as a loss mask has it
    UPSTREAM[row] = 0


def _functions(group):
    from megatron.core import tensor_parallel
    from megatron.core.fusions import fused_cross_entropy

    fused = functools.partial(fused_cross_entropy.fused_vocab_parallel_cross_entropy, tp_group=group)
    return {"fused": fused, "plain": tensor_parallel.vocab_parallel_cross_entropy}


def _losses(rank, kind):
    """Of each function, case and side: the loss and the gradient of this rank's logits."""
    group = megatron_models.begin(2)
    found = {}
    for side in ("stock", "ours"):
        with rlkernel.patch_megatron() if side == "ours" else contextlib.nullcontext() as patch:
            for name, function in _functions(group).items():
                for case, dtype in CASES:
                    logits, target = _logits(case, dtype)
                    shard = logits[..., rank * HALF : (rank + 1) * HALF].clone().requires_grad_()
                    given = shard * 1  # Megatron writes over fp32 logits
                    before = given.detach().clone()
                    loss = function(given, target)
                    if side == "ours":
                        assert_equal("logits", given.detach(), before)
                    loss.mul(UPSTREAM).sum().backward()
                    found[name, case, dtype, side] = loss.detach(), shard.grad
            if patch:
                assert patch.calls.total() == 2 * len(CASES) and not patch.fallbacks
                logits, target = _logits("plain", torch.float32)
                held = _functions(_Holder(group))["fused"](logits.chunk(2, -1)[rank], target)
                assert_equal("by slime's group", held, found["fused", "plain", torch.float32, "ours"][0])
                assert patch.calls.total() == 2 * len(CASES) + 1
    return found


class _Holder(torch.distributed.ProcessGroup):
    """As slime's groups are, which it takes down while it generates."""

    def __init__(self, group):
        super().__init__(rank=group.rank(), size=group.size())
        self.group = group

    def rank(self):
        return self.group.rank()

    def size(self):
        return self.group.size()


def test_losses_of_logits_that_ranks_share_out(tmp_path):
    found = ranks.run(_losses, ["tp"], tmp_path)["tp"]
    kept = torch.ones(LENGTH, BATCH, dtype=torch.bool)
    for row in PADDING:
        kept[row] = False
    for name, case, dtype in {key[:3] for key in found[0]}:
        logits, target = _logits(case, dtype)
        exact = logits.double().requires_grad_()
        truth = torch.nn.functional.cross_entropy(
            exact.flatten(0, 1), target.flatten().where(kept.flatten(), -100), reduction="none"
        ).view(LENGTH, BATCH)
        truth.mul(UPSTREAM).sum().backward()
        losses = {side: found[0][name, case, dtype, side][0] for side in ("stock", "ours")}
        assert losses["ours"].dtype == losses["stock"].dtype == torch.float32
        assert_equal("the other rank's", losses["ours"], found[1][name, case, dtype, "ours"][0])
        check(f"{name} {case} loss", losses["ours"][kept], losses["stock"][kept], truth[kept])
        assert not losses["ours"][~kept].any(), "padding"
        grads = {
            side: torch.cat([of[name, case, dtype, side][1] for of in found], -1)
            for side in ("stock", "ours")
        }
        assert grads["ours"].dtype == dtype
        check(f"{name} {case} gradient", grads["ours"], grads["stock"], exact.grad)
        assert not grads["ours"][~kept].any()


def _compiled(rank, kind):
    """Of each function: the loss by torch.compile, without it, and the gradients of this rank's logits."""
    group = megatron_models.begin(2)
    torch.compiler.set_stance("default")
    found = {}
    with rlkernel.patch_megatron(["cross_entropy"]):
        for name, function in _functions(group).items():
            logits, target = _logits("plain", torch.float32)
            for made in ("compiled", "eager"):
                shard = logits.chunk(2, -1)[rank].clone().requires_grad_()
                call = torch.compile(function, backend="eager") if made == "compiled" else function
                loss = call(shard, target)
                loss.mul(UPSTREAM).sum().backward()
                found[name, made] = loss.detach(), shard.grad
    return found


def test_losses_of_logits_under_torch_compile(tmp_path):
    for found in ranks.run(_compiled, ["tp"], tmp_path)["tp"]:
        for name in ("fused", "plain"):
            for got, want in zip(found[name, "compiled"], found[name, "eager"], strict=True):
                assert_equal(name, got, want)


# models that are given labels


def _step(model, call, zero=True):
    """Its losses, and the gradients of its parameters and of the hidden states that it was given."""
    if zero:
        model.zero_grad_buffer() if hasattr(model, "zero_grad_buffer") else model.zero_grad()
    loss = call(model)
    weights = random(8, BATCH, LENGTH)
    weights[0, 0] = weights[1, -1] = 0
    loss.mul(weights).sum().backward()
    if hasattr(model, "finish_grad_sync"):
        model.finish_grad_sync()
    leaves = dict(model.named_parameters()) | ({"hidden": model.hidden} if hasattr(model, "hidden") else {})
    grads = {name: getattr(p, "main_grad", p.grad) for name, p in leaves.items()}  # its own DDP's
    return loss.detach(), {name: grad.clone() for name, grad in grads.items() if grad is not None}


def _whole(model):
    given, labels = megatron_models.inputs()
    return model(*given, labels=labels)


def _after_the_decoder(rank, sequence_parallel):
    """What follows the decoder, where each rank has some rows: of the rest, norms need Transformer Engine."""

    def call(model):
        _, labels = megatron_models.inputs()
        model.output_layer.sequence_parallel = sequence_parallel
        model.output_layer.allreduce_dgrad = not sequence_parallel
        hidden = random(9, LENGTH, BATCH, HIDDEN)
        if sequence_parallel:
            hidden = hidden.chunk(2)[rank]
        model.hidden = hidden.to(model.output_layer.weight.dtype).requires_grad_()
        return model._postprocess(model.hidden, None, None, labels, None, None, None)

    return call


def _models(rank, kind):
    megatron_models.begin(2)
    from megatron.core.tensor_parallel import ColumnParallelLinear

    stock, multiplied = ColumnParallelLinear._forward_impl, []

    def noted(layer, **given):
        multiplied.append(layer)
        return stock(layer, **given)

    calls = {"gpt": _whole, "tied": _whole, "fused loss": _whole, "mamba": _whole, "ddp": _whole}
    calls["ddp untied"] = _whole
    calls |= {"rows": _after_the_decoder(rank, True), "bf16": _after_the_decoder(rank, False)}
    found = {}
    for name, call in calls.items():
        make = megatron_models.mamba if name == "mamba" else megatron_models.gpt
        options = {
            "tied": {"tied": True},
            "ddp": {"tied": True},
            "fused loss": {"cross_entropy_loss_fusion": True},
        }.get(name, {})
        model = make(2, **options)
        if name == "bf16":
            model.bfloat16()
        layer = model.output_layer
        if name.startswith("ddp"):
            model = megatron_models.ddp(model)
        want = _step(model, call)
        with rlkernel.patch_megatron() as patch:
            ColumnParallelLinear._forward_impl = noted
            got = _step(model, call)
            ColumnParallelLinear._forward_impl = stock
            assert dict(patch.calls) == {"compute_language_model_loss": 1} and not patch.fallbacks
            if name == "ddp untied":  # as a call without labels leaves it, whose gradient is in main_grad
                model.zero_grad_buffer()
                layer.gradient_accumulation_fusion = layer.weight.grad_added_to_main_grad = True
                beside = _step(model, call, zero=False)[1]
                layer.gradient_accumulation_fusion = False
                head = "module.output_layer.weight"
                assert_equal("beside logits", beside[head], got[1][head])
        assert layer not in multiplied, "the logits were made"
        assert "forward" not in vars(layer)
        after = _step(model, call)
        assert_equal("a model that is Megatron's again", after[0], want[0])
        found[name] = want, got
    return found


def test_models_make_no_logits(tmp_path):
    found = ranks.run(_models, ["tp"], tmp_path)["tp"]
    kept = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    kept[0, 0] = kept[1, -1] = False
    for models in found:
        for name, (want, got) in models.items():
            rounded = name in ("bf16", "fused loss")  # the gradients of whose logits Megatron rounds to bf16
            slack = {"rtol": 2e-2, "atol": 2e-2} if rounded else {"rtol": 1e-5, "atol": 3e-6}
            torch.testing.assert_close(got[0][kept], want[0][kept], **slack)
            assert not got[0][~kept].any()
            assert_equal(f"{name}, the other rank's", got[0], found[0][name][1][0])
            assert got[1].keys() == want[1].keys()
            if name == "fused loss":
                for parameter, grad in models["gpt"][1][1].items():
                    assert_equal(parameter, got[1][parameter], grad)
            for parameter in want[1]:
                of = f"{name} {parameter}"
                torch.testing.assert_close(got[1][parameter], want[1][parameter], **slack, msg=of)
            assert ("hidden" in got[1]) == (name in ("rows", "bf16"))


# bits


def _bits(rank, kind, count):
    """The same, of a row alone, and of any number of ranks."""
    group = megatron_models.begin(count)
    logits, target = _logits("plain", torch.bfloat16)
    shard = logits.chunk(count, -1)[rank].clone().requires_grad_()
    with rlkernel.patch_megatron(["cross_entropy"]), rlkernel.batch_invariant(level="tensor_parallel"):
        function = _functions(group)["fused"]
        loss = function(shard, target)
        loss.mul(UPSTREAM).sum().backward()
        assert_equal("a row alone", function(shard[3:4], target[3:4]).detach(), loss[3:4].detach())
    return loss.detach(), shard.grad


def test_no_number_of_ranks_shows_in_the_bits(tmp_path):
    two, one = (ranks.run(_bits, ["tp"], tmp_path / str(n), n, count=n)["tp"] for n in (2, 1))
    assert_equal("losses", two[0][0], one[0][0])
    assert_equal("gradients", torch.cat([grad for _, grad in two], -1), one[0][1])


# what is left to Megatron


def _changed(**fields):
    def change(model):
        for name, value in fields.items():
            owner, _, field = name.rpartition("__")
            setattr(getattr(model, owner) if owner else model, field, value)

    return change


def _hooked(model):
    model.output_layer.register_forward_hook(lambda *_: None)


class _Head(torch.nn.Module):
    """As an adapter puts it around a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.weight = layer, layer.weight

    def forward(self, *given, **named):
        return self.layer(*given, **named)


def _wrapped(model):
    model.output_layer = _Head(model.output_layer)


def _own_loss(model):
    model.compute_language_model_loss = functools.partial(type(model).compute_language_model_loss, model)


MODELS = {
    "the output layer has hooks": _hooked,
    "the output layer is not Megatron's ColumnParallelLinear as it is": _wrapped,
    "the model has a loss of its own": _own_loss,
    "the output layer gathers its logits": _changed(output_layer__gather_output=True),
    "the gradient of the head's weight is deferred": _changed(
        config__defer_embedding_wgrad_compute=True, config__wgrad_deferral_limit=0,
        output_layer__embedding_activation_buffer=[], output_layer__grad_output_buffer=[],
    ),
    "the output layer's gradients are not added up": _changed(output_layer__disable_grad_reduce=True),
    "logits are logged": _changed(config__config_logger_dir="logged"),
    "hidden_states is torch.float64": lambda model: model.double(),
}  # fmt: skip


def _left(rank, kind, folder):
    import os

    os.chdir(folder)  # where logits are logged
    warnings.simplefilter("ignore")
    group = megatron_models.begin(1)
    found = {}
    for reason, change in MODELS.items():
        model = megatron_models.gpt(1)
        change(model)
        call = _after_the_decoder(rank, False)
        want = call(model).detach()
        with rlkernel.patch_megatron(["fused_head"]) as patch:
            assert_equal(reason, call(model).detach(), want)
            found[reason] = dict(patch.fallbacks), dict(patch.calls)
    fused, plain = _functions(group).values()
    logits, target = _logits("plain", torch.float32)
    calls = {
        "label_smoothing is asked for": lambda: plain(logits.clone(), target, 0.1),
        "logits is torch.float64": lambda: fused(logits.double(), target),
        "labels have not the shape": lambda: plain(logits.flatten(0, 1).clone(), target.view(-1, 1)),
    }
    for reason, call in calls.items():
        want = call()
        with rlkernel.patch_megatron(["cross_entropy"]) as patch:
            fused, plain = _functions(group).values()
            assert_equal(reason, call(), want)
            found[reason] = dict(patch.fallbacks), dict(patch.calls)
    with rlkernel.patch_megatron() as patch:
        function = _functions(None)["fused"]
        with pytest.raises(AttributeError):  # Megatron's own
            function(logits.clone(), target)
        found["the group of ranks is none that torch knows by its name"] = (
            dict(patch.fallbacks),
            dict(patch.calls),
        )
        model = megatron_models.gpt(1)
        given, labels = megatron_models.inputs()
        assert model(*given).shape == (BATCH, LENGTH, VOCAB) and not patch.calls, (
            "logits, where none are asked"
        )
        model.output_layer.output_size_per_partition += 1
        with pytest.raises(RuntimeError, match="supplied weight's shape"):  # Megatron's own
            model.share_embeddings_and_output_weights = True
            model(*given, labels=labels)
        model.share_embeddings_and_output_weights = False
        model.output_layer.output_size_per_partition -= 1
        found["the weight has not as many rows as the output layer"] = (
            dict(patch.fallbacks),
            dict(patch.calls),
        )
        with pytest.raises((RuntimeError, IndexError)):
            model(*given, labels=labels[:, 1:])
        found["labels have not the shape of the hidden states' rows"] = (
            dict(patch.fallbacks),
            dict(patch.calls),
        )
    return found


def test_what_is_left_to_megatron(tmp_path):
    for reason, (fallbacks, calls) in ranks.run(_left, ["tp"], tmp_path, tmp_path, count=1)["tp"][0].items():
        assert any(reason in why for why in fallbacks) and not calls, (reason, fallbacks, calls)
