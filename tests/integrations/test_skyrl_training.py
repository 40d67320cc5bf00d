"""Steps of GRPO and of PPO by SkyRL's own workers, patched and stock."""

import types

import pytest
import tiny
import torch
from skyrl_cases import BACKEND, algorithm, load, nothing_left_behind, ppo_utils, upstream

import rlkernel

pytest.importorskip("transformers", reason="needs transformers, which rlkernel does not need")
pytest.importorskip("peft", reason="needs PEFT, which rlkernel does not need")
model_wrapper = load(f"{BACKEND}.workers.model_wrapper")
workers = load(f"{BACKEND}.workers.worker")
worker_utils = load(f"{BACKEND}.workers.worker_utils")
training_batch = load(f"{BACKEND}.training_batch")

assert nothing_left_behind and upstream  # fixtures of every test here

VOCAB, PROMPT, ANSWER = 97, 5, 7


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    """A worker puts its batches where the GPU of its process is."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def worker(kind, model, config):
    """One of SkyRL's workers, without Ray, a GPU and a strategy that shares the model out."""
    made = object.__new__(kind)
    made.model = model
    made.cfg = types.SimpleNamespace(algorithm=config)
    made.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made.scheduler = types.SimpleNamespace(get_last_lr=lambda: [0.1])
    made.strategy = types.SimpleNamespace(backward=lambda loss, model, optimizer: loss.backward())
    made.mesh_rank = types.SimpleNamespace(dp_size=1)
    made.policy_loss_fn = ppo_utils.PolicyLossRegistry.get(config.policy_loss_type)
    made.critic_loss_fn = workers.ppo_critic_loss
    return made


def actor(**options):
    return model_wrapper.HFModelWrapper(tiny.make_model(vocab=VOCAB, hidden=32), **options)


def critic():
    from transformers import Qwen2Model, Qwen2PreTrainedModel

    kind = model_wrapper._get_critic_model(Qwen2PreTrainedModel, Qwen2Model)
    config = tiny.make_model(vocab=VOCAB, hidden=32).config
    torch.manual_seed(2)
    return kind(config)


def rollouts(step):
    """Two prompts of two responses each, padded as SkyRL pads them; one response is empty."""
    g = torch.Generator().manual_seed(step)
    sequences = torch.randint(3, VOCAB, (4, PROMPT + ANSWER), generator=g)
    place = PROMPT + ANSWER - torch.arange(PROMPT + ANSWER)
    prompts, answers = torch.tensor([5, 5, 3, 3])[:, None], torch.tensor([7, 2, 5, 0])[:, None]
    mask = (place <= prompts + answers).long()
    response = (place <= answers)[:, PROMPT:].long()
    loss_mask = response.clone()
    loss_mask[0, 2:4] = 0  # a tool spoke
    token_level = torch.zeros(4, ANSWER)
    token_level[:, -1] = torch.randn(4, generator=g)
    made = training_batch.TrainingInputBatch(
        {
            "sequences": sequences, "attention_mask": mask, "response_mask": response,
            "loss_mask": loss_mask, "rewards": token_level,
        }
    )  # fmt: skip
    made.metadata = {"response_length": ANSWER, "uids": ["a", "a", "b", "b"]}
    return made


def train(estimator, steps=2, options=None, **fields):
    config = algorithm(
        temperature=0.9, use_kl_loss=True, use_entropy_loss=True, kl_loss_coef=0.1,
        advantage_estimator=estimator, **fields,
    )  # fmt: skip
    policy = worker(workers.PolicyWorkerBase, actor(**options or {}), config)
    reference = worker(workers.RefWorkerBase, actor(), config)
    values = worker(workers.CriticWorkerBase, critic(), config)
    told = []
    for step in range(steps):
        data = rollouts(step)
        old = policy._forward_micro_batch(rollouts(step))["output"]
        noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(50 + step))
        data["action_log_probs"], data["rollout_logprobs"] = old, old + 0.1 * noise
        data["base_action_log_probs"] = reference._forward_micro_batch(rollouts(step))["output"]
        data["values"] = values._forward_micro_batch(rollouts(step))["output"]
        advantages, returns = ppo_utils.compute_advantages_and_returns(
            token_level_rewards=data["rewards"], response_mask=data["response_mask"],
            index=data.metadata["uids"], adv_estimator=estimator, config=config, values=data["values"],
            gamma=config.gamma, lambd=config.lambd, grpo_norm_by_std=config.grpo_norm_by_std,
        )  # fmt: skip
        data["returns"] = returns
        data["advantages"] = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
            advantages, data["loss_mask"], config.loss_reduction, 4, PROMPT + ANSWER
        )
        for _ in range(2):  # the second is off the policy
            experience = worker_utils.BatchIterator.batch_to_experience(data)
            policy.optimizer.zero_grad()
            status = policy._forward_backward_micro(experience, 1.0)
            policy.optimizer.step()
            logprobs = status.pop("loss_fn_outputs")
            told.append(status | {"logprobs": sum(sum(x["logprobs"]) for x in logprobs)})
        values.optimizer.zero_grad()
        told.append(values._forward_backward_micro(worker_utils.BatchIterator.batch_to_experience(data)))
        values.optimizer.step()
    return told, [*policy.model.parameters(), *values.model.parameters()]


CASES = {
    "grpo": ("grpo", {}),
    "ppo": ("gae", {"lambd": 0.9, "policy_loss_type": "dual_clip"}),
    "gspo": ("rloo", {"policy_loss_type": "gspo", "loss_reduction": "sequence_mean"}),
    "tis": ("maxrl", {"off_policy_correction__tis_ratio_type": "token"}),
    "rollout": ("reinforce++", {"policy_loss_type": "rollout_is"}),
    "packed": ("grpo", {}),
}


@pytest.mark.filterwarnings("error:rlkernel.patch_skyrl")
@pytest.mark.parametrize("name", CASES)
def test_a_few_steps(name):
    estimator, fields = CASES[name]
    options = {"remove_microbatch_padding": True, "use_flash_attention_2": True} if name == "packed" else None
    want = train(estimator, options=options, **fields)
    with rlkernel.patch_skyrl() as patch:
        got = train(estimator, options=options, **fields)
        assert patch.calls["HFModelWrapper"] == 8 and patch.calls["ppo_critic_loss"] == 2
        assert patch.calls.total() == 16, patch.calls
        assert dict(patch.fallbacks) == {"compute_approx_kl: the KL has a gradient": 4}
    for mine, theirs in zip(got[0], want[0], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert value == pytest.approx(theirs[key], rel=2e-4, abs=2e-5), key
    for mine, theirs in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)
    again = train(estimator, options=options, **fields)
    assert str(again[0]) == str(want[0]), "after the undo the bits are SkyRL's"


def test_supervised_fine_tuning():
    """Whose weights are in the mask of the loss."""
    config = algorithm(temperature=1.0, policy_loss_type="cross_entropy")

    def run():
        tuner = worker(workers.PolicyWorkerBase, actor(), config)
        data = rollouts(0)
        data["loss_mask"] = data["loss_mask"].float() / data["loss_mask"].sum()
        status = tuner._forward_backward_micro(
            worker_utils.BatchIterator.batch_to_experience(data), 1.0, loss_fn="cross_entropy"
        )
        return status["loss"], [p.grad for p in tuner.model.parameters()]

    want = run()
    with rlkernel.patch_skyrl() as patch:
        got = run()
        assert patch.calls == {"HFModelWrapper": 1, "cross_entropy_loss": 1} and not patch.fallbacks
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    for mine, theirs in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
