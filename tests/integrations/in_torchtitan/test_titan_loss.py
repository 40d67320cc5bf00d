"""FusedLoss beside torchtitan's own wrapper and its losses of whole logits, on an lm_head alone."""

import pytest
import titan
import torch
from accuracy import check
from doors import Logits
from titan import HIDDEN, ROWS, VOCAB
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, compute_logprobs
from torchtitan.config import CompileConfig
from torchtitan.experiments.rl.losses import GRPOLoss
from torchtitan.experiments.rl.models.cast_linear import CastLinear
from torchtitan.models.common.linear import Linear
from torchtitan.models.muse_glimmer.model import SoftCappedLinear

import rlkernel
from rlkernel.integrations.torchtitan import FusedLoss

LOGPROB = 8.0  # as large as log-probabilities are here, of which the scalars are sums and differences
SIZES = {"in_features": HIDDEN, "out_features": VOCAB}
HEADS = {
    "plain": Linear.Config(**SIZES),
    "bias": Linear.Config(**SIZES, bias=True),
    "cast": CastLinear.Config(**SIZES, bias=True),
    "capped": SoftCappedLinear.Config(**SIZES, output_multiplier=0.5, output_soft_cap_temp=3.0),
    "multiplied": SoftCappedLinear.Config(**SIZES, output_multiplier=0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("inner", titan.INNER)
def test_everything_is_as_near_to_the_truth_as_stock(inner, kind, dtype):
    labels, inputs = titan.batch(inner)
    config, hidden = titan.INNER[inner], titan.hidden_states().to(dtype)
    module = titan.head(dtype, HEADS[kind])
    want = titan.exact(config, module, hidden, labels, inputs)
    stock = titan.outcome(titan.chunked(config).build(), module, hidden, labels, inputs)
    ours = titan.outcome(titan.fused(config).build(), module, hidden, labels, inputs)
    assert ours[0].dtype == torch.float32 and ours[1].keys() == stock[1].keys() == want[1].keys()
    check("loss", ours[0], stock[0], want[0], magnitude=LOGPROB)
    for name, value in want[1].items():
        if name.endswith("_frac"):
            assert torch.equal(ours[1][name].double(), value.float().double()), name
        else:
            check(name, ours[1][name], stock[1][name], value, magnitude=LOGPROB)
    for name, grad in want[2].items():
        assert ours[2][name].dtype == dtype
        check(f"the gradient of {name}", ours[2][name], stock[2][name], grad)


def both(inner, labels, inputs, **options):
    module, hidden = titan.head(), titan.hidden_states()
    config = titan.INNER[inner]
    stock = titan.outcome(titan.chunked(config).build(), module, hidden, labels, inputs, **options)
    return stock, titan.outcome(titan.fused(config).build(), module, hidden, labels, inputs, **options)


def test_nothing_has_the_size_of_logits():
    vocab, length = 5003, 256
    labels, inputs = titan.batch(length=length, vocab=vocab)
    module = titan.head(config=Linear.Config(in_features=HIDDEN, out_features=vocab))
    hidden = titan.hidden_states(length=length)
    found = []
    with rlkernel.workspace.limited(2**20):
        for config in (titan.chunked(titan.INNER["grpo"]), titan.fused(titan.INNER["grpo"])):
            with Logits(vocab) as seen:
                titan.outcome(config.build(), module, hidden, labels, inputs)
            found.append(seen.rows)
    assert found[0] == ROWS * length // 4 and found[1] <= 2**20 // (4 * vocab)


@pytest.mark.parametrize("inner", titan.INNER)
def test_a_factor_of_the_loss_reaches_every_gradient(inner):
    """The wrapper's backward leaves out what comes from above, which is 1 in its trainers."""
    labels, inputs = titan.batch(inner)
    module, hidden = titan.head(), titan.hidden_states()
    found = [
        titan.outcome(titan.fused(titan.INNER[inner]).build(), module, hidden, labels, inputs, factor=factor)
        for factor in (1.0, 4.0)
    ]
    assert all(torch.equal(4 * grad, found[1][2][name]) for name, grad in found[0][2].items())
    assert found[0][2]["hidden"].abs().max() > 0


@pytest.mark.parametrize("inner", titan.INNER)
def test_without_gradients_it_says_the_same(inner):
    labels, inputs = titan.batch(inner)
    module, hidden = titan.head(), titan.hidden_states()
    loss = titan.fused(titan.INNER[inner]).build()
    trained = titan.outcome(loss, module, hidden, labels, inputs)
    with torch.no_grad():
        total, metrics = loss(hidden, labels, 19, **inputs)
    assert torch.equal(total, trained[0]) and not total.requires_grad
    assert all(torch.equal(metrics[name], value) for name, value in trained[1].items())


@pytest.mark.parametrize("valid", [None, 19, torch.tensor(19.0)])
def test_any_number_of_valid_tokens(valid):
    labels, inputs = titan.batch()
    stock, ours = both("grpo", labels, inputs, valid=valid)
    torch.testing.assert_close(ours[0], stock[0])
    torch.testing.assert_close(ours[2], stock[2], rtol=1e-4, atol=1e-6)


def test_a_length_that_is_no_multiple_of_anything():
    labels, inputs = titan.batch(length=13)
    loss, module, hidden = titan.fused(titan.INNER["grpo"]).build(), titan.head(), titan.hidden_states()
    whole = titan.outcome(titan.INNER["grpo"].build(), module, hidden[:, :13], labels, inputs, whole=True)
    ours = titan.outcome(loss, module, hidden[:, :13], labels, inputs)
    torch.testing.assert_close(ours[0], whole[0])
    torch.testing.assert_close(ours[2], whole[2], rtol=1e-4, atol=1e-6)


def test_what_no_loss_looks_at_may_be_anything():
    """A prompt's rows are not computed: GRPO and DAPO have no use for them."""
    labels, inputs = titan.batch()
    module, hidden, mask = titan.head(), titan.hidden_states(), inputs["loss_mask"]
    loss = titan.fused(titan.INNER["grpo"]).build()
    want = titan.outcome(loss, module, hidden, labels, inputs)
    found = titan.outcome(loss, module, hidden.masked_fill(~mask[..., None], torch.inf), labels, inputs)
    assert torch.equal(found[0], want[0]) and torch.equal(found[2]["weight"], want[2]["weight"])
    assert not found[2]["hidden"][~mask].any()


def test_a_frozen_head():
    labels, inputs = titan.batch()
    module, hidden = titan.head(), titan.hidden_states()
    want = titan.outcome(titan.fused(titan.INNER["grpo"]).build(), module, hidden, labels, inputs)
    module.requires_grad_(False).zero_grad()
    module.weight.grad = None
    found = titan.fused(titan.INNER["grpo"]).build()
    found.set_lm_head(module)
    leaf = hidden.clone().requires_grad_()
    found(leaf, labels, 19, **inputs)[0].backward()
    torch.testing.assert_close(leaf.grad, want[2]["hidden"])
    assert module.weight.grad is None


class OfSomebody(BaseLoss):
    """A loss of a user: log-probabilities twice over, and an entropy with gradients."""

    def __init__(self, config, *, compile_config=None):
        self.fn = None

    def __call__(self, logits, labels, global_valid_tokens=None, *, loss_mask, **_):
        assert logits.shape == (*labels.shape, VOCAB) and logits.dtype == torch.float32
        targets = labels.masked_fill(~loss_mask, -100)
        first = compute_logprobs(logits, targets)
        flat = torch.log_softmax(logits, -1).view(-1, VOCAB)
        second = flat.gather(-1, labels.reshape(-1, 1)).view(labels.shape) * loss_mask
        entropy = -(torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum(-1)
        detached = compute_logprobs(logits.detach(), labels)
        assert not detached.requires_grad
        total = (first - 2 * second * detached + 0.1 * entropy).sum() / global_valid_tokens
        return total, {"sum/mean": total.detach()}


class SomebodysConfig(BaseLoss.Config):
    pass


OfSomebody.Config = SomebodysConfig
SomebodysConfig._owner = OfSomebody


def test_a_users_loss():
    labels, inputs = titan.batch()
    module, hidden = titan.head(), titan.hidden_states()
    want = titan.outcome(OfSomebody(None), module, hidden, labels, inputs, whole=True)
    found = titan.outcome(titan.fused(SomebodysConfig()).build(), module, hidden, labels, inputs)
    torch.testing.assert_close(found[0], want[0])
    torch.testing.assert_close(found[2], want[2], rtol=1e-4, atol=1e-5)


def of_every_row(logits, labels, valid, **_):
    """Entropies and log-sum-exps of all rows, with gradients, and log-probabilities of those with a label."""
    logprobs, told = compute_logprobs(logits, labels, return_entropy=True)
    entropy = -(torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum(-1)
    total = (0.1 * entropy + 0.01 * torch.logsumexp(logits, -1).square() - logprobs).sum() / valid
    return total, {"sum/mean": told.sum()}


def test_a_row_without_a_label_has_its_entropy_and_logsumexp():
    labels, _ = titan.batch("sft")
    module, hidden = titan.head(), titan.hidden_states()
    loss = titan.fused(titan.INNER["grpo"]).build()
    loss.loss_fn = of_every_row
    want = titan.outcome(of_every_row, module, hidden, labels, {}, whole=True)
    found = titan.outcome(loss, module, hidden, labels, {})
    assert (labels == -100).any()
    torch.testing.assert_close(found[0], want[0])
    torch.testing.assert_close(found[1], want[1])
    torch.testing.assert_close(found[2], want[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inner", ["grpo", "dapo"])
def test_a_completion_has_tokens_without_a_label(inner):
    labels, inputs = titan.batch(inner)
    labels[:, ::3] = -100
    stock, ours = both(inner, labels, inputs)
    torch.testing.assert_close(ours[:2], stock[:2])
    torch.testing.assert_close(ours[2], stock[2], rtol=1e-4, atol=1e-6)


UNKNOWN = {
    "topk": lambda logits, labels: logits.topk(2)[0].sum(),
    "exp": lambda logits, labels: logits.exp().sum(),
    "argmax": lambda logits, labels: logits.argmax(-1).sum(),
    "__getitem__": lambda logits, labels: logits[:, 1:].sum(),
    "div": lambda logits, labels: compute_logprobs(logits / 0.8, labels).sum(),
    "sum": lambda logits, labels: logits.sum(-1).sum(),
    "mul": lambda logits, labels: (logits * 2).sum(),
    "softmax": lambda logits, labels: torch.softmax(logits, 1).sum(),
    "logsumexp": lambda logits, labels: logits.logsumexp(1).sum(),
    "cross_entropy": lambda logits, labels: torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1
    ),
    "gather": lambda logits, labels: logits.gather(-1, labels[..., None]).sum(),
    "to": lambda logits, labels: logits.to(torch.bfloat16),
    "cat": lambda logits, labels: torch.cat([logits, logits]),
    "numpy": lambda logits, labels: logits.detach().numpy(),
    "mse_loss": lambda logits, labels: torch.nn.functional.mse_loss(logits, torch.zeros(())),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_it_cannot_answer_is_an_error_by_name(name):
    labels, inputs = titan.batch()
    loss = titan.fused(titan.INNER["grpo"]).build()
    loss.loss_fn = lambda logits, labels, valid, **_: (UNKNOWN[name](logits, labels), {})
    with pytest.raises(RuntimeError, match=rf"{name}.*ChunkedLossWrapper"):
        titan.outcome(loss, titan.head(), titan.hidden_states(), labels, inputs)


def test_other_labels_are_an_error():
    labels, inputs = titan.batch()
    loss = titan.fused(titan.INNER["grpo"]).build()
    loss.loss_fn = lambda logits, labels, valid, **_: (compute_logprobs(logits, labels + 1), {})
    with pytest.raises(ValueError, match="labels of FusedLoss's inner loss must be those"):
        titan.outcome(loss, titan.head(), titan.hidden_states(), labels, inputs)


class Strange(Linear):
    def forward(self, input):
        return super().forward(input).sigmoid()


def test_a_head_that_is_not_known_is_refused():
    loss = titan.fused(titan.INNER["grpo"]).build()
    with pytest.raises(ValueError, match="lm_head must be a Linear, CastLinear or SoftCappedLinear.*Strange"):
        loss.set_lm_head(Strange(HEADS["plain"]))
    with pytest.raises(ValueError, match=r"lm_head must be a torch.nn.Linear, got .*Embedding"):
        loss.set_lm_head(torch.nn.Embedding(VOCAB, HIDDEN))
    module = titan.head()
    module.forward = lambda hidden: hidden
    with pytest.raises(ValueError, match="with a forward of its own"):
        loss.set_lm_head(module)
    with pytest.raises(ValueError, match="lm_head must be set"):
        loss(titan.hidden_states(), *titan.batch())


def test_a_call_that_fails_leaves_the_head_as_it_was():
    labels, inputs = titan.batch()
    loss, module = titan.fused(titan.INNER["grpo"]).build(), titan.head()
    with pytest.raises(ValueError, match="target_ids"):
        titan.outcome(loss, module, titan.hidden_states(), labels[:, 1:], inputs | {"loss_mask": None})
    assert "forward" not in vars(module)


def test_its_config_is_a_wrappers():
    config = FusedLoss.Config(loss_fn=GRPOLoss.Config(clip_eps=0.1))
    assert isinstance(config, ChunkedLossWrapper.Config) and config.to_dict()["loss_fn"] == {"clip_eps": 0.1}
    compiled = titan.fused(titan.INNER["sft"]).build(compile_config=CompileConfig(enable=True))
    assert isinstance(compiled, ChunkedLossWrapper) and not hasattr(
        compiled.loss_fn.fn, "_torchdynamo_orig_callable"
    )
