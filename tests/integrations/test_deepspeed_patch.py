"""What rlkernel.patch_deepspeed() replaces in the real DeepSpeed, restores and refuses; distillation."""

import sys
import types

import chat_trainer
import pytest
import tiny
import torch
from accuracy import check
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel.integrations._patch import PatchError
from rlkernel.runtime import workspace

deepspeed = pytest.importorskip("deepspeed", reason="needs DeepSpeed, which is not installed")
opsd = pytest.importorskip("deepspeed.runtime.rollout.opsd")
from deepspeed.runtime import rollout  # noqa: E402
from deepspeed.sequence import cross_entropy, vocab_parallel_ops  # noqa: E402

from rlkernel.integrations import deepspeed as adapter  # noqa: E402
from rlkernel.integrations.deepspeed import chat  # noqa: E402

PLACES = (
    (cross_entropy, "_VocabParallelCrossEntropy"),
    (vocab_parallel_ops, "_VocabParallelLogProbs"),
    (vocab_parallel_ops, "_VocabParallelEntropy"),
    (vocab_parallel_ops, "_VocabParallelKLDiv"),
    (opsd, "generalized_jsd_loss"),
    (rollout, "generalized_jsd_loss"),
    (chat_trainer, "gather_log_probs"),
    *((chat_trainer.DeepSpeedPPOTrainer, name) for name in ("train_rlhf", "actor_loss_fn")),
)
UPSTREAM = [vars(owner)[name] for owner, name in PLACES]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    for (owner, name), original in zip(PLACES, UPSTREAM, strict=True):
        assert vars(owner)[name] is original, f"a test left {owner.__name__}.{name} patched"


def test_what_is_replaced():
    with rlkernel.patch_deepspeed(trainer_module=chat_trainer) as patch:
        assert all(vars(owner)[name] is not old for (owner, name), old in zip(PLACES, UPSTREAM, strict=True))
        replaced = patch.replaced["deepspeed.sequence.cross_entropy._VocabParallelCrossEntropy"]
        assert replaced == "rlkernel.logprob"
        assert "train_rlhf -> rlkernel.linear_logprob" in str(patch)
        assert "actor_loss_fn -> rlkernel.policy_loss" in str(patch) and "<locals>" not in str(patch)
        with rlkernel.patch_deepspeed() as inner:
            assert inner is patch
        assert patch.active
        other = types.ModuleType("other")
        with pytest.raises(PatchError, match="must be what the patch in place has, chat_trainer, got other"):
            rlkernel.patch_deepspeed(trainer_module=other)


def test_refusals(monkeypatch):
    with pytest.raises(ValueError, match="trainer_module must be a module or None, got str"):
        rlkernel.patch_deepspeed(trainer_module="dschat.rlhf.ppo_trainer")
    with pytest.raises(ValueError, match="strict must be True or False, got 1"):
        rlkernel.patch_deepspeed(strict=1)
    with monkeypatch.context() as upstream:
        upstream.setattr(deepspeed, "__version__", "0.20.0")
        with pytest.raises(PatchError, match=r"version of deepspeed must be >=0\.19,<0\.20, got 0\.20\.0"):
            rlkernel.patch_deepspeed()
        with pytest.warns(
            UserWarning, match=r"run with DeepSpeed >=0\.19,<0\.20, and this is 0\.20\.0"
        ) as told:
            patch = rlkernel.patch_deepspeed(strict=False)
        with patch:
            assert patch.replaced and len(told) == 1 and told[0].filename == __file__
    with monkeypatch.context() as upstream:
        upstream.setattr(vocab_parallel_ops, "_VocabParallelEntropy", lambda logits: logits)
        with pytest.raises(
            PatchError, match=r"must take \(vocab_parallel_logits, tp_group\), got \(logits\)"
        ):
            rlkernel.patch_deepspeed()
        assert cross_entropy._VocabParallelCrossEntropy is UPSTREAM[0]
    with monkeypatch.context() as upstream:
        upstream.setattr(chat_trainer.DeepSpeedPPOTrainer, "critic_loss_fn", lambda self, values: values)
        with pytest.raises(PatchError, match=r"critic_loss_fn must take \(self, .*\), got \(self, values\)"):
            rlkernel.patch_deepspeed(trainer_module=chat_trainer)
        upstream.setattr(chat_trainer, "DeepSpeedPPOTrainer", None)
        with pytest.raises(PatchError, match="chat_trainer.DeepSpeedPPOTrainer must be a class, got None"):
            rlkernel.patch_deepspeed(trainer_module=chat_trainer)
    with monkeypatch.context() as upstream:
        upstream.setitem(sys.modules, "deepspeed", None)
        with pytest.raises(ImportError, match=r"needs DeepSpeed: pip install 'deepspeed>=0\.19,<0\.20'"):
            rlkernel.patch_deepspeed()


def test_a_deepspeed_without_what_is_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed.sequence.vocab_parallel_ops", None)
    monkeypatch.delattr("deepspeed.sequence.vocab_parallel_ops")
    with pytest.raises(PatchError, match="DeepSpeed must have what is replaced.*vocab_parallel_ops"):
        rlkernel.patch_deepspeed(strict=False)


def test_an_entropy_is_masked_in_place():
    """As callers do and DeepSpeed's own tests; also of a row without a distribution."""
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    logits[1] = -torch.inf
    mask = torch.tensor([False, True, False])

    def run():
        leaf = logits.clone().requires_grad_()
        entropy = vocab_parallel_ops.vocab_parallel_entropy(leaf)
        entropy.masked_fill_(mask, 0.0).sum().backward()
        return leaf.grad

    stock = run()
    with rlkernel.patch_deepspeed():
        found = run()
    assert (found - stock).abs().max() < 1e-6 and not found[1].any()


def test_what_a_trainer_does_to_its_engines_stays():
    """An attribute that it sets or deletes, an engine that it exchanges; one of its methods calls another."""
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))

    class DeepSpeedPPOTrainer(chat_trainer.DeepSpeedPPOTrainer):
        def generate_experience(self, prompts, mask, step):
            self.actor_model.generated, self.ref_model = step, "another"
            del self.actor_model.old
            return self.train_rlhf(prompts)

        def train_rlhf(self, inputs):
            self.actor_model.module_of = self
            return module.gather_log_probs(self.actor_model(inputs).logits[:, :-1], inputs[:, 1:])

        actor_loss_fn = chat_trainer.DeepSpeedPPOTrainer.actor_loss_fn
        critic_loss_fn = chat_trainer.DeepSpeedPPOTrainer.critic_loss_fn
        get_advantages_and_returns = chat_trainer.DeepSpeedPPOTrainer.get_advantages_and_returns

    module = types.ModuleType("trainer")
    module.DeepSpeedPPOTrainer, module.gather_log_probs = DeepSpeedPPOTrainer, chat_trainer.gather_log_probs
    trainer, model = object.__new__(DeepSpeedPPOTrainer), tiny.make_model(vocab=64, hidden=32)
    trainer.actor_model, trainer.ref_model, model.old = model, tiny.make_model(vocab=64, hidden=32), 1
    want = chat_trainer.gather_log_probs(model(ids).logits[:, :-1], ids[:, 1:])
    with rlkernel.patch_deepspeed(trainer_module=module) as patch:
        found = trainer.generate_experience(ids, None, 7)
        assert patch.calls == {"DeepSpeedPPOTrainer's logits": 1} and not patch.fallbacks
    assert (found - want).abs().max() < 1e-5
    assert trainer.actor_model is model and trainer.ref_model == "another"
    assert model.generated == 7 and model.module_of is trainer and not hasattr(model, "old")


def test_logits_that_are_logprobs_are_nothing_else():
    """A trainer that took an entropy of them would get zeros."""
    ids = torch.randint(0, 9, (2, 5), generator=torch.Generator().manual_seed(0))
    with rlkernel.patch_deepspeed(trainer_module=chat_trainer):
        scored = torch.randn(2, 5, 1).as_subclass(chat.Scored)
        given = scored.to(torch.float)[:, :-1, :]
        assert given.shape == (2, 4, 1) and given.dtype == torch.float32
        assert chat_trainer.gather_log_probs(given, ids[:, 1:]).shape == (2, 4)
        for use in (lambda x: x.softmax(-1), lambda x: torch.log_softmax(x, -1), lambda x: x / 2):
            with pytest.raises(ValueError, match="must hand its logits to gather_log_probs alone"):
                use(given)
        with pytest.raises(ValueError, match=r"labels must be the next tokens, \(2, 4\), got \(2, 5\)"):
            chat_trainer.gather_log_probs(given, ids)


# distillation

JSD = {
    "forward KL": {"beta": 0.0},
    "reverse KL": {"beta": 1.0, "temperature": 0.7},
    "mixture": {"beta": 0.3, "pointwise_clip": 0.02},
    "top k": {"teacher_top_k": 5, "temperature": 1.5},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", JSD)
def test_distillation(case, dtype, monkeypatch):
    """Values and gradients of both models; chunks of three rows."""
    monkeypatch.setattr(workspace, "limit", lambda *_: 3 * 12 * 4 * 41)
    g = torch.Generator().manual_seed(1)
    both = [(torch.randn(2, 9, 41, generator=g) * 2).to(dtype) for _ in range(2)]
    mask = torch.rand(2, 9, generator=g) < 0.7

    def run():
        leaves = [x.clone().requires_grad_() for x in both]
        out = rollout.generalized_jsd_loss(*leaves, mask, **JSD[case])
        (out.loss * 2 + out.loss_sum).backward()
        return [out.loss.detach(), out.loss_sum.detach(), out.valid_token_count, *(x.grad for x in leaves)]

    stock = run()
    with rlkernel.patch_deepspeed() as patch:
        found = run()
        assert patch.calls == {"generalized_jsd_loss": 1}
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for a, b in zip(found, stock, strict=True):
        assert a.dtype == b.dtype and torch.allclose(a.double(), b.double(), tolerance, tolerance)
    assert all(map(torch.equal, run(), stock))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_distillation_of_a_student_alone(beta, dtype):
    """By ``divergence`` but for fp64, with weights that are no mask; against DeepSpeed's formula in fp64."""
    g = torch.Generator().manual_seed(2)
    student, teacher = ((torch.randn(2, 9, 41, generator=g) * 2).to(dtype) for _ in range(2))
    weights = torch.rand(2, 9, generator=g).mul(3).floor() / 2

    def run(student, teacher, weights):
        leaf = student.clone().requires_grad_()
        out = opsd.generalized_jsd_loss(leaf, teacher, weights, beta=beta, temperature=0.8)
        (out.loss * 2 + out.loss_sum).backward()
        return [out.loss.detach(), out.loss_sum.detach(), out.valid_token_count, leaf.grad]

    want, stock = run(student.double(), teacher.double(), weights.double()), run(student, teacher, weights)
    with rlkernel.patch_deepspeed():
        found = run(student, teacher, weights)
        dirty = student.masked_fill(weights[..., None] == 0, torch.nan)
        assert all(map(torch.equal, run(dirty, teacher, weights), found))
    for ours, theirs, exact in zip(found, stock, want, strict=True):
        assert ours.dtype == theirs.dtype
        lost = (theirs.double() - exact).abs().max()
        assert (ours.double() - exact).abs().max() <= 2 * lost + torch.finfo(dtype).eps * exact.abs().max()


def test_distillation_under_autocast(monkeypatch):
    """Both directions, which on a GPU decides what its softmax computes in."""
    seen, real = [], torch.nn.functional.log_softmax
    monkeypatch.setattr(
        opsd.F, "log_softmax", lambda *a, **k: seen.append(torch.is_autocast_enabled("cpu")) or real(*a, **k)
    )
    student, teacher = torch.randn(2, 3, 11).requires_grad_(), torch.randn(2, 3, 11)
    with rlkernel.patch_deepspeed():
        with torch.autocast("cpu", torch.bfloat16):
            loss = opsd.generalized_jsd_loss(student, teacher, torch.ones(2, 3), teacher_top_k=5).loss
        forward = len(seen)
        loss.backward()
    assert all(seen) and len(seen) > forward


def test_distillation_is_checked_by_deepspeed():
    logits, mask = torch.zeros(2, 3, 5), torch.ones(2, 3)
    wrong = [
        ((logits, logits[:1], mask), {}),
        ((logits[0], logits[0], mask), {}),
        ((logits, logits, mask[:1]), {}),
        ((logits, logits, mask), {"beta": 2.0}),
        ((logits, logits, mask), {"teacher_top_k": 6}),
    ]
    with rlkernel.patch_deepspeed():
        for arguments, options in wrong:
            with pytest.raises(ValueError):
                opsd.generalized_jsd_loss(*arguments, **options)
        none = opsd.generalized_jsd_loss(logits, logits, torch.zeros(2, 3))
    assert none.loss == 0 and none.valid_token_count == 0


def test_distillation_holds_a_few_rows(monkeypatch):
    """What is made of the size of a row, at once; the gradient and the logits are the caller's."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(workspace, "limit", lambda *_: 2 * 12 * 4 * 101)
    student, teacher = torch.randn(2, 16, 101).requires_grad_(), torch.randn(2, 16, 101)
    aten, largest = torch.ops.aten, [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            whole = func.overloadpacket in (aten.zeros_like, aten.index_put_, aten.detach)
            a_row = isinstance(out, torch.Tensor) and out.shape[-1:] == (101,)
            if a_row and not whole:
                largest[0] = max(largest[0], out.numel() // 101)
            return out

    with rlkernel.patch_deepspeed(), Watch():
        opsd.generalized_jsd_loss(student, teacher, torch.ones(2, 16), pointwise_clip=1.0).loss.backward()
    assert 0 < largest[0] <= 2


# scores of a model in no engine


def test_scores():
    model = tiny.make_model(vocab=64, hidden=32)
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    found = adapter.score(model, ids, temperature=0.7, return_entropy=True, use_cache=False)
    logp = (model(ids).logits[:, :-1] / 0.7).log_softmax(-1)
    want = logp.gather(-1, ids[:, 1:, None])[..., 0], -(logp.exp() * logp).sum(-1)
    for a, b in zip(found, want, strict=True):
        assert a.shape == (2, 6) and (a - b).abs().max() < 1e-5
    assert adapter.score(model, ids).entropy is None


def test_scores_are_refused():
    model = tiny.make_model(vocab=64, hidden=32)
    ids = torch.ones(2, 7, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"input_ids must be \[B, L\] with L >= 2, got \(2, 1\)"):
        adapter.score(model, ids[:, :1])
    with pytest.raises(ValueError, match=r"input_ids must be \[B, L\] with L >= 2, got list"):
        adapter.score(model, ids.tolist())
    with pytest.raises(ValueError, match="fp32_head must be True or False, got 1"):
        adapter.score(model, ids, fp32_head=1)
    with pytest.raises(ValueError, match="labels must be None"):
        adapter.score(model, ids, labels=ids)
    with pytest.raises(ValueError, match="hidden states must be"):
        adapter.score(model, ids, logits_to_keep=1)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match=r"its lm_head must be a torch.nn.Linear, got torch.nn.*Sequential"):
        adapter.score(model, ids)


class Large(TorchDispatchMode):
    """How many tensors of so many bytes are made."""

    def __init__(self, size):
        super().__init__()
        self.size, self.seen = size, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().nbytes() >= self.size:
            self.seen.add(out.untyped_storage().data_ptr())
        return out


def test_several_tokens_hold_a_few_rows():
    """Nothing of the logits' size but their gradient."""
    leaf = torch.randn(20, 2**15, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.arange(60).view(20, 3)
    with rlkernel.patch_deepspeed() as patch, Large(leaf.nbytes) as large:
        vocab_parallel_ops.vocab_parallel_logprobs(leaf, ids).sum().backward()
        assert patch.calls == {"_VocabParallelLogProbs": 1}
    assert len(large.seen - {leaf.data_ptr()}) == 1
    assert torch.allclose(leaf.grad.sum(-1), torch.zeros(20), atol=1e-4)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_kl_div_holds_a_few_rows(reverse):
    """Nothing of the logits' size but the two gradients; values and gradients by fp64."""
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(3, 6, 2**15, generator=g).requires_grad_() for _ in range(2)]

    def run(leaves):
        with Large(leaves[0].nbytes) as large:
            out = vocab_parallel_ops.vocab_parallel_kl_div(*leaves, reverse=reverse)
            found = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        again = torch.autograd.grad(out.sum(), leaves)
        assert all(map(torch.equal, found, again))
        seen = len(large.seen - {x.data_ptr() for x in leaves})
        return [out.detach(), *found], seen

    stock, theirs = run(leaves)
    with rlkernel.patch_deepspeed() as patch:
        ours, mine = run(leaves)
        assert patch.calls == {"_VocabParallelKLDiv": 1}
        assert not patch.fallbacks
    assert mine == 2 < theirs
    wide = [x.detach().double().requires_grad_() for x in leaves]
    a, b = (x.log_softmax(-1) for x in (wide if reverse else wide[::-1]))
    kl = (a.exp() * (a - b)).sum(-1)
    for name, x, y, truth in zip(
        ("kl", "student", "teacher"),
        ours,
        stock,
        [kl.detach(), *torch.autograd.grad(kl.sum(), wide)],
        strict=True,
    ):
        check(name, x, y, truth)
