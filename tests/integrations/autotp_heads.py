"""DeepSpeed's automatic tensor parallelism, two ranks over gloo: heads that are cut, gathered and whole."""

import tiny
import torch

import rlkernel

VOCAB = 97  # which two ranks share out unevenly
STEPS = 3


def _specs(head, **options):
    """How DeepSpeed is told of each layer."""
    layers = {
        r".*\.([qkv]|gate|up)_proj\.weight$": {"partition_type": "column"},
        r".*\.(o|down)_proj\.weight$": {"partition_type": "row"},
        r".*lm_head\.weight$": {"partition_type": head, **options},
    }
    specs = [{"patterns": [pattern], **how} for pattern, how in layers.items()]
    return {"partition_config": {"use_default_specs": False, "layer_specs": specs}}


HEADS = {
    "gathered": {"vocab_parallel_lm_head": False},  # as transformers plans it
    "tied": {},
    "cut": {"vocab_parallel_lm_head": True},
    "column": _specs("column", gather_output=False),
    "whole": _specs("skip"),
    "row": _specs("row"),
}
KINDS = ("zero0-gathered", "zero0-tied", "zero0-cut", "zero1-column", "zero0-whole", "zero0-row")
LOSSES = ("zero0-tied", "zero0-cut")  # which DeepSpeed takes over the parts of a head
REFUSED = "must be a torch.nn.Linear, got deepspeed.module_inject.layers.LinearAllreduceWithReplicatedInput"


def _model(kind):
    model = tiny.make_model(vocab=VOCAB, hidden=32)
    if "tied" in kind:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def _engine(kind, head=None):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "tensor_parallel": {"autotp_size": 2, **HEADS[head or kind[6:]]},
        "zero_optimization": {"stage": int(kind[4])},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    model = _model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]


def _train(engine, score):
    """The losses of a few steps, and the rows of the head behind them."""
    g, losses = torch.Generator().manual_seed(3), []
    for _ in range(STEPS):
        ids = torch.randint(3, VOCAB, (2, 17), generator=g)
        logprobs, entropy = score(engine, ids)
        weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
        loss = (logprobs * weights).mean() + 0.1 * entropy.mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses), engine.module.lm_head.weight.detach()


def _by_logits(engine, ids):
    logp = (engine(ids).logits[:, :-1] / 0.8).log_softmax(-1)
    return logp.gather(-1, ids[:, 1:, None])[..., 0], -(logp.exp() * logp).sum(-1)


def _scored(rank, kind):
    """How long a rank's part of the head is, and how far an engine is from one whose logits are gathered."""
    from rlkernel.integrations import deepspeed as adapter

    def by_score(engine, ids):
        return adapter.score(engine, ids, temperature=0.8, return_entropy=True)

    try:
        losses, head = _train(_engine(kind), by_score)
    except ValueError as error:
        return str(error)
    want, stock = _train(_engine(kind, "gathered"), _by_logits)
    rows = min(len(head), len(stock))
    part = slice(0, rows) if rank == 0 else slice(-rows, None)
    apart = losses - want, head[part] - stock[part]
    return len(head), *(float(x.abs().max()) for x in apart)


def _loss_of_labels(kind):
    """DeepSpeed's own loss over a head that it does not gather: how far patched is from stock, and counts."""
    engine = _engine(kind)
    ids = torch.randint(3, VOCAB, (2, 17), generator=torch.Generator().manual_seed(3))

    def run():
        loss = engine.module(ids, labels=ids).loss
        gradient = torch.autograd.grad(loss, [p for p in engine.module.parameters() if p.requires_grad])
        return loss.detach(), *gradient

    stock = run()
    with rlkernel.patch_deepspeed() as patch:
        found = run()
        counts = dict(patch.calls), dict(patch.fallbacks)
    after = run()
    assert all(map(torch.equal, after, stock))
    return max(float((a - b).abs().max()) for a, b in zip(found, stock, strict=True)), *counts


def job(rank, kind):
    return _scored(rank, kind), _loss_of_labels(kind) if kind in LOSSES else None


def check(kind, reports):
    """Scores to 1e-6 of an engine with gathered logits, or refused by name; losses of labels are stock's."""
    rows = [VOCAB, VOCAB] if kind == "zero0-whole" else [49, 48]
    for (scored, labelled), length in zip(reports, rows, strict=True):
        if kind == "zero0-row":
            assert scored.endswith(REFUSED)
        else:
            assert scored[0] == length and max(scored[1:]) <= 1e-6, f"{kind}: {scored}"
        if kind in LOSSES:
            apart, *counts = labelled
            assert apart <= 1e-6, f"{kind}: losses and gradients differ by {apart}"
            assert counts == [{"_VocabParallelCrossEntropy": 1}, {}]
