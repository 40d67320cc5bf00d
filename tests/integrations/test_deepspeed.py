"""rlkernel.patch_deepspeed() on the real DeepSpeed: two ranks over gloo, ZeRO-1 to 3, against stock."""

import importlib
import sys
from types import SimpleNamespace

import autotp_heads
import peer_sources
import pytest
import ranks
import rounded_engines
import tiny
import torch
import zero_engines
from bitwise import assert_equal

import rlkernel

pytest.importorskip("transformers", reason="needs transformers, which is not installed")
pytestmark = [ranks.pytestmark, pytest.mark.slow]

VOCAB = zero_engines.VOCAB
STEPS = 5


def zero_kinds(*names):
    return ranks.kinds(*names, apart=True)[0]


class _Values(torch.nn.Module):
    """What an engine of a critic and of a reward model is to its trainer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.table = torch.nn.Embedding(VOCAB, 1)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.module = SimpleNamespace(training=True)

    def forward_value(self, input_ids, attention_mask=None, return_value_only=False, **_):
        values = self.table(input_ids)[..., 0]
        return values if return_value_only else {"chosen_end_scores": values[:, -1]}

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


# DeepSpeed-Chat's PPO


def _trainer_module(source):
    if source == "own":
        return importlib.import_module("chat_trainer")
    sys.path.insert(0, source)
    return importlib.import_module("dschat.rlhf.ppo_trainer")


def _train(rank, kind, module):
    engines = SimpleNamespace(
        actor=zero_engines.engine(kind, seed=1), ref=zero_engines.engine(kind, trained=False, seed=2),
        critic=_Values(), reward=_Values(), tokenizer=tiny.make_tokenizer(),
    )  # fmt: skip
    args = SimpleNamespace(
        max_answer_seq_len=12, end_of_conversation_token="a", actor_zero_stage=int(kind[4]),
        compute_fp32_loss=True, align_overflow=False, print_answers=False, dtype="fp32", local_rank=rank,
    )  # fmt: skip
    trainer = module.DeepSpeedPPOTrainer(engines, args)
    g = torch.Generator().manual_seed(3 + rank)

    def rollout(prompts, mask, step):  # of any tokens: generation is not what is looked at
        trainer.prompt_length = prompts.shape[1]
        sequences = torch.cat([prompts, torch.randint(3, VOCAB, (2, 12), generator=g)], 1)
        sequences[0, 15:] = tiny.PAD
        return sequences

    trainer._generate_sequence = rollout
    losses, skipped = [], []
    for step in range(STEPS):
        prompts = torch.randint(3, VOCAB, (2, 8), generator=g)
        experience = trainer.generate_experience(prompts, torch.ones_like(prompts), step)
        trainer.train()
        losses += [x.detach() for x in trainer.train_rlhf(experience)]
        skipped.append(engines.actor.skipped_steps)
    assert trainer.actor_model is engines.actor and trainer.ref_model is engines.ref
    assert not any(k == "forward" for k in vars(engines.actor.module.lm_head))
    widths = {*engines.actor.widths, *engines.ref.widths}
    return (
        torch.stack(losses),
        [*zero_engines.weights(engines.actor), engines.critic.table.weight.detach()],
        widths,
        skipped,
    )


def _chat(rank, kind, source):
    module = _trainer_module(source)
    before = dict(vars(module.DeepSpeedPPOTrainer)), dict(vars(module))
    stock = _train(rank, kind, module)
    with rlkernel.patch_deepspeed(trainer_module=module) as patch:
        patched = _train(rank, kind, module)
        counts = dict(patch.calls), dict(patch.fallbacks)
    assert (dict(vars(module.DeepSpeedPPOTrainer)), dict(vars(module))) == before
    return stock, patched, _train(rank, kind, module), counts


def _source(name):
    if name == "own":
        return name
    path = "applications/DeepSpeed-Chat/dschat/rlhf/ppo_trainer.py"
    peer_sources.load("deepspeed-examples", path)  # skips where it is not that commit's
    return str((peer_sources._folder("deepspeed-examples") / path).parents[2])


@pytest.mark.parametrize("source", ["own", "dschat"])
@pytest.mark.parametrize("kinds", [zero_kinds("zero2", "zero3", "zero2-fp16dynamic", "zero3-tied-bf16")])
def test_ppo(kinds, source, tmp_path):
    """Losses and weights to 1e-6 or the dtype's error, the same steps skipped, no logits; after the undo the
    bits of before."""
    for kind, reports in ranks.run(_chat, kinds, tmp_path, _source(source)).items():
        for rank, (stock, patched, after, (calls, left)) in enumerate(reports):
            where = f"{kind}, rank {rank}"
            assert stock[2] == {VOCAB} and VOCAB not in patched[2], f"{where}: {patched[2]}"
            apart = (patched[0] - stock[0]).abs().max().item()
            most = max(1e-6, 4 * torch.finfo(zero_engines.dtype(kind)).eps)
            assert 0 < apart <= most, f"{where}: losses differ by {apart}"
            assert patched[3] == stock[3] == after[3] and bool(stock[3][-1]) == ("fp16" in kind), where
            for a, b, c in zip(patched[1], stock[1], after[1], strict=True):
                assert (a - b).abs().max() <= max(1e-6, most / 4), where
                assert_equal(where, c, b)
            assert_equal(where, after[0], stock[0])
            assert not left and calls == {
                "DeepSpeedPPOTrainer's logits": 3 * STEPS,
                "actor_loss_fn": STEPS,
                "critic_loss_fn": STEPS,
                "get_advantages_and_returns": STEPS,
            }


# any engine


def _plain(rank, kind):
    """Losses, gradients and weights of five steps, by logits and by scores; of a policy and its entropy."""
    from deepspeed.utils import safe_get_full_grad

    from rlkernel.integrations import deepspeed as adapter

    found = []
    for scored in (False, True):
        engine = zero_engines.engine(kind)
        g, losses, grads = torch.Generator().manual_seed(3 + rank), [], []
        for _ in range(STEPS):
            ids = torch.randint(3, VOCAB, (2, 17), generator=g)
            if scored:
                logprobs, entropy = adapter.score(engine, ids, temperature=0.8, return_entropy=True)
            else:
                logp = (engine(ids).logits[:, :-1] / 0.8).log_softmax(-1)
                logprobs = logp.gather(-1, ids[:, 1:, None])[..., 0]
                entropy = -(logp.exp() * logp).sum(-1)
            weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
            loss = (logprobs * weights).mean() + 0.1 * entropy.mean()
            engine.backward(loss)
            grads.append([safe_get_full_grad(p).clone() for p in engine.module.parameters()])
            engine.step()
            losses.append(loss.detach())
        found.append(
            (
                torch.stack(losses),
                [x for step in grads for x in step],
                zero_engines.weights(engine),
                engine.widths,
            )
        )
    (a, grads, weights, wide), (b, own_grads, own_weights, narrow) = found
    assert set(wide) == {VOCAB} and VOCAB not in narrow
    return [
        max(float((x - y).abs().max()) for x, y in pairs)
        for pairs in ([(a, b)], zip(grads, own_grads, strict=True), zip(weights, own_weights, strict=True))
    ]


def _check_plain(kind, reports):
    for apart in reports:
        assert max(apart) <= 1e-6, f"{kind}: losses, gradients, weights differ by {apart}"


PLAIN = ("zero1", "zero2", "zero3", "zero3-tied", "zero3-offload", "zero2-tied")
JOBS = (
    dict.fromkeys(PLAIN, (_plain, _check_plain))
    | dict.fromkeys(rounded_engines.KINDS, (rounded_engines.job, rounded_engines.check))
    # last, because DeepSpeed keeps what it is told of tensor parallelism
    | dict.fromkeys(autotp_heads.KINDS, (autotp_heads.job, autotp_heads.check))
)


def _scores(rank, kind):
    return JOBS[kind][0](rank, kind)


@pytest.mark.parametrize("kinds", [zero_kinds(*JOBS)])
def test_scores_of_an_engine(kinds, tmp_path):
    """In one start of the processes, which takes longer than all kinds."""
    found = ranks.run(_scores, kinds, tmp_path)
    assert all(len(reports) == ranks.RANKS for reports in found.values())
    for kind, reports in found.items():
        JOBS[kind][1](kind, reports)


# losses over a split vocabulary, and distillation


def _apart(x, y):
    """The largest difference, of numbers above 1 relative; the same infinities and two NaN have none."""
    same = (x == y) | (x.isnan() & y.isnan())
    far = torch.where(same, 0, (x - y).abs() / y.abs().clamp(min=1))
    return float(far.max()) if far.numel() else 0.0


def _losses(rank, kind):
    """Each of DeepSpeed's functions, stock and patched: how far values and gradients are apart."""
    from deepspeed.sequence import cross_entropy, linear_cross_entropy, vocab_parallel_ops

    world, cuts = torch.distributed.group.WORLD, (0, 37, VOCAB)
    g = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(3, 7, 16, generator=g), torch.randn(VOCAB, 16, generator=g)
    bias, ids = torch.randn(VOCAB, generator=g), torch.randint(0, VOCAB, (3, 7), generator=g)
    ids[0, :3] = -100
    logits = hidden @ weight.T + bias
    divergence = vocab_parallel_ops.vocab_parallel_kl_div
    student = logits / 4  # log-probabilities of -50 have no sixth digit behind the point, in fp32
    teacher, holes = student.roll(1, 1) * 1.5, student.clone()
    # of one of the two, of both, of a whole row; NaN where a rank has nothing else
    holes[1, 5, :37] = -torch.inf
    holes[1, 5, 3] = torch.nan
    holes[0, 0, 3:9], holes[0, 6, 5:40], holes[1, 2], holes[2, :, 50] = (-torch.inf,) * 4
    a, b = cuts[rank], cuts[rank + 1]
    shard = {"tp_group": world, "vocab_start_index": a, "vocab_end_index": b}
    # as sequence parallelism has it: ranks with rows of their own and a whole vocabulary
    own = ids.roll(rank, 1)
    linear = linear_cross_entropy.vocab_parallel_linear_cross_entropy
    head = hidden, weight[a:b], bias[a:b]
    cases = {
        "linear": (lambda h, w, c: linear(h, w, ids, c, **shard), head),
        "linear, none": (lambda h, w, c: linear(h, w, ids, c, reduction="none", **shard), head),
        "linear, sequences": (lambda h, w, c: linear(h, w, own, c, sp_group=world), (hidden, weight, bias)),
        "logits": (
            lambda x: cross_entropy.vocab_parallel_cross_entropy(x, ids, **shard),
            (logits[..., a:b],),
        ),
        "logits, sequences": (
            lambda x: cross_entropy.vocab_parallel_cross_entropy(x, own, sp_group=world, reduction="sum"),
            (logits,),
        ),
        "logprobs": (
            lambda x: vocab_parallel_ops.vocab_parallel_logprobs(x, ids, **shard),
            (logits[..., a:b],),
        ),
        "several": (
            lambda x: vocab_parallel_ops.vocab_parallel_logprobs(
                x, torch.stack([ids, ids.clamp(0), ids.roll(3, 1).clamp(0)], -1), **shard
            ),
            (logits[..., a:b],),
        ),
        "several logprobs of nothing": (
            lambda x: vocab_parallel_ops.vocab_parallel_logprobs(
                x, torch.stack([ids, ids.roll(1, 0)], -1), **shard
            ),
            (holes[..., a:b],),
        ),
        "logprobs of nothing": (
            lambda x: vocab_parallel_ops.vocab_parallel_logprobs(x, ids, **shard),
            (holes[..., a:b],),
        ),
        "entropy of nothing": (
            lambda x: vocab_parallel_ops.vocab_parallel_entropy(x, world),
            (holes[..., a:b],),
        ),
        "entropy": (lambda x: vocab_parallel_ops.vocab_parallel_entropy(x, world), (logits[..., a:b],)),
        "entropy, a rank without an entry": (
            lambda x: vocab_parallel_ops.vocab_parallel_entropy(x, world),
            (logits[..., :0] if rank else logits,),
        ),
        "kl": (lambda x, y: divergence(x, y, tp_group=world), (student[..., a:b], teacher[..., a:b])),
        "kl, reverse": (
            lambda x, y: divergence(x, y, reverse=True, tp_group=world),
            (student[..., a:b], teacher[..., a:b]),
        ),
        "kl of the teacher alone": (
            lambda x: divergence(student[..., a:b], x, tp_group=world),
            (teacher[..., a:b],),
        ),
        "kl, a rank without an entry": (
            lambda x, y: divergence(x, y, tp_group=world),
            (student[..., :0], teacher[..., :0]) if rank else (student, teacher),
        ),
        "kl of one rank": (lambda x, y: divergence(x + 1e3, y), (student, teacher)),
        "kl with holes": (
            lambda x, y: divergence(x, y, reverse=True, tp_group=world),
            (holes[..., a:b], holes.flip(1)[..., a:b]),
        ),
        "kl in bf16": (
            lambda x, y: divergence(x, y, tp_group=world),
            (student[..., a:b].bfloat16(), teacher[..., a:b].bfloat16()),
        ),
        "kl in fp64": (lambda x: divergence(x, x.flip(0)), (student.double(),)),
        "fp64": (lambda x: vocab_parallel_ops.vocab_parallel_entropy(x), (logits.double(),)),
    }

    def run(function, tensors):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = function(*leaves)
        (out * torch.linspace(0.5, 1, out.numel()).view_as(out)).sum().backward()
        return [out.detach(), *(x.grad for x in leaves)]

    stock = {name: run(*case) for name, case in cases.items()}
    with rlkernel.patch_deepspeed() as patch, pytest.warns(UserWarning, match="leaves .* to DeepSpeed"):
        patched = {name: run(*case) for name, case in cases.items()}
        counts = dict(patch.calls), dict(patch.fallbacks)
    after = {name: run(*case) for name, case in cases.items()}
    apart = {}
    for name, want in stock.items():
        assert all(x.dtype == y.dtype for x, y in zip(patched[name], want, strict=True)), name
        assert not any(_apart(x, y) for x, y in zip(after[name], want, strict=True)), name
        if name.endswith("logprobs of nothing"):
            # a row without a distribution has no gradient, DeepSpeed says; but at its tokens it has
            want[1][1, 2] = 0
        apart[name] = max(_apart(x, y) for x, y in zip(patched[name], want, strict=True))
    return apart, counts


@pytest.mark.parametrize("kinds", [zero_kinds("zero-losses")])
def test_losses_over_a_split_vocabulary(kinds, tmp_path):
    for apart, (calls, left) in ranks.run(_losses, kinds, tmp_path)["zero-losses"]:
        bounds = {name: 1e-6 for name in apart if name.startswith("kl")} | {"kl in bf16": 2**-10}
        assert {name: x for name, x in apart.items() if not x <= bounds.get(name, 5e-6)} == {}
        assert calls == {
            "_VocabParallelLinearCrossEntropy": 3,
            "_VocabParallelCrossEntropy": 2,
            "_VocabParallelLogProbs": 4,
            "_VocabParallelEntropy": 3,
            "_VocabParallelKLDiv": 7,
        }
        assert left == {
            "_VocabParallelKLDiv: student_logits is torch.float64": 1,
            "_VocabParallelEntropy: logits is torch.float64": 1,
        }
