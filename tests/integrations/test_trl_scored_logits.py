"""What stands for the logits of a TRL before 1.15 answers what TRL asks of logits, and nothing else."""

import types

import pytest
import torch
from torch.nn import functional as F

from rlkernel.integrations._scored_logits import COLUMNS, ScoredLogits, Scores
from rlkernel.integrations.hf.lm_head import IGNORED

V = 53


def scored(temperature=1.0, columns=range(COLUMNS), seed=0):
    """Logits [2, 5, V], labels, and the same as scored."""
    g = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(2, 5, V, generator=g)).requires_grad_()
    labels = torch.where(
        torch.rand(2, 5, generator=g) < 0.5, logits.argmax(-1), torch.randint(0, V, (2, 5), generator=g)
    )
    logp = (logits / temperature).log_softmax(-1)
    values = [
        logp.gather(-1, labels[..., None])[..., 0],
        -(logp.exp() * logp).sum(-1),
        logits.mean(-1).detach(),
        (logits.argmax(-1) == labels).float(),
        labels.float(),
    ]
    head = types.SimpleNamespace(check_labels=lambda *_: None)
    return logits, labels, ScoredLogits.of(torch.stack(values, -1), Scores(head, temperature, tuple(columns)))


def test_rows_are_chosen_as_of_logits():
    logits, labels, ours = scored()
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]]).bool()
    index = torch.tensor([1])
    choices = {
        "slice": lambda x: x[:, :-1][:, -3:],
        "contiguous": lambda x: x[..., :-1, :].contiguous(),
        "chunk": lambda x: x[:, :-1].detach().chunk(2, dim=0)[0],
        "mask": lambda x: x[:, :-1][mask],
        "index_select": lambda x: x.index_select(0, index),
    }
    for name, choose in choices.items():
        theirs, mine = choose(logits), choose(ours)
        wanted = choose(labels[..., None])[..., 0]
        assert isinstance(mine, ScoredLogits) and mine.shape[:-1] == theirs.shape[:-1], name
        logp = theirs.log_softmax(-1)
        torch.testing.assert_close(mine.logprobs(wanted), logp.gather(-1, wanted[..., None])[..., 0])
        torch.testing.assert_close(mine.entropies(), -(logp.exp() * logp).sum(-1))
        torch.testing.assert_close(mine.mean(-1), theirs.mean(-1))
        torch.testing.assert_close(mine.mean(), theirs.mean())
        assert torch.equal(mine.argmax(dim=-1) == wanted, theirs.argmax(dim=-1) == wanted), name
        if theirs.dim() == 2:
            torch.testing.assert_close(F.cross_entropy(mine, wanted), F.cross_entropy(theirs, wanted))
        assert type(mine.logprobs(wanted)) is torch.Tensor and type(mine.mean(-1)) is torch.Tensor


def test_gradients_and_writes_go_where_those_of_logits_do():
    logits, labels, ours = scored()
    logp = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    mask = torch.rand(2, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    grads = []
    for values in (logp, ours.logprobs(labels)):
        values[mask] = 0.0  # as DPO does
        grads.append(
            torch.autograd.grad((values * torch.arange(10.0).view(2, 5)).sum(), logits, retain_graph=True)[0]
        )
    torch.testing.assert_close(*grads)


def test_a_temperature_is_divided_by_once():
    _, labels, ours = scored(0.7)
    want = ours.as_subclass(torch.Tensor)[..., 0]
    in_place = ours[:, :]
    assert in_place.div_(0.7) is in_place
    for divided in (in_place, ours / 0.7, ours.div(0.7)):
        assert torch.equal(divided.logprobs(labels), want)
        assert torch.equal(divided[:, 1:].logprobs(labels[:, 1:]), want[:, 1:])
    assert torch.equal(ours.logprobs(labels, 0.7), want)  # TRL 1.14 gives its temperature to the function
    for wrong in (
        lambda: ours.logprobs(labels),
        lambda: (ours / 0.7).logprobs(labels, 0.7),
        lambda: ours.entropies(),
    ):
        with pytest.raises(RuntimeError, match="TRL must divide its logits by its temperature, 0.7, got"):
            wrong()


@pytest.mark.parametrize(
    "name, use",
    [
        ("softmax", lambda x: x.softmax(-1)),
        ("log_softmax", lambda x: F.log_softmax(x, -1)),
        ("logsumexp", lambda x: torch.logsumexp(x, -1)),
        ("add", lambda x: x + 1),
        ("mul", lambda x: 2.0 * x),
        ("nansum", lambda x: x.nansum()),
        ("cat", lambda x: torch.cat([x, x])),
        ("float", lambda x: x.float()),
        ("div", lambda x: x / torch.tensor(0.5)),
        (r"mean\(dim=0\)", lambda x: x.mean(0)),
        (r"argmax\(dim=None\)", lambda x: x.argmax()),
        (
            r"cross_entropy\(reduction='sum'\)",
            lambda x: F.cross_entropy(x[0], torch.zeros(5).long(), reduction="sum"),
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_else_is_done_with_logits_is_an_error(name, use):
    with pytest.raises(RuntimeError, match=f"TRL must do with its logits what .* knows, got .*{name}"):
        use(scored()[2])


def test_what_was_not_computed_is_an_error():
    _, labels, ours = scored(columns=(0, 4))
    assert ours.logprobs(labels).shape == labels.shape
    for use in (lambda: ours.entropies(), lambda: ours.mean(-1), lambda: ours.argmax(-1)):
        with pytest.raises(RuntimeError, match=r"must ask for what it was scored for, columns \(0, 4\), got"):
            use()


def test_a_row_without_a_label_predicts_none():
    _, labels, ours = scored()
    values = ours.detach().as_subclass(torch.Tensor).clone()
    values[..., 3], values[..., 4] = 0, IGNORED
    none = ScoredLogits.of(values, ours.scores)
    assert not (none.argmax(-1) == labels).any() and not (none.argmax(-1) == IGNORED).any()
