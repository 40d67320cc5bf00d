"""A PPO trainer that calls its engines and its own functions as DeepSpeed-Chat's does, for runs without it.

The names, the arguments and who calls whom are DeepSpeed-Chat's; the real file runs the same tests where
``RLKERNEL_PEERS`` has it.
"""

import torch


def gather_log_probs(logits, labels):
    return torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]


class DeepSpeedPPOTrainer:
    def __init__(self, engines, args):
        self.actor_model, self.ref_model = engines.actor, engines.ref
        self.critic_model, self.reward_model = engines.critic, engines.reward
        self.tokenizer, self.compute_fp32_loss = engines.tokenizer, args.compute_fp32_loss
        self.kl_ctl, self.cliprange, self.cliprange_value, self.gamma, self.lam = 0.1, 0.2, 0.2, 1.0, 0.95

    def train(self):
        self.actor_model.train()
        self.critic_model.train()

    def eval(self):
        for engine in (self.actor_model, self.critic_model, self.reward_model, self.ref_model):
            engine.eval()

    def generate_experience(self, prompts, mask, step):
        self.eval()
        seq = self._generate_sequence(prompts, mask, step)
        self.train()
        attended = (seq != self.tokenizer.pad_token_id).long()
        with torch.no_grad():
            logits = self.actor_model(seq, attention_mask=attended).logits.to(torch.float)
            reference = self.ref_model(seq, attention_mask=attended).logits.to(torch.float)
            rewards = self.reward_model.forward_value(seq, attended, prompt_length=self.prompt_length)
            values = self.critic_model.forward_value(seq, attended, return_value_only=True)
        return {
            "prompts": prompts,
            "logprobs": gather_log_probs(logits[:, :-1, :], seq[:, 1:]),
            "ref_logprobs": gather_log_probs(reference[:, :-1, :], seq[:, 1:]),
            "value": values.detach()[:, :-1],
            "rewards": rewards["chosen_end_scores"].detach(),
            "input_ids": seq,
            "attention_mask": attended,
        }

    def train_rlhf(self, inputs):
        seq, attended = inputs["input_ids"], inputs["attention_mask"]
        start, mask = inputs["prompts"].shape[1] - 1, attended[:, 1:]
        old, values = inputs["logprobs"], inputs["value"]
        with torch.no_grad():
            rewards = -self.kl_ctl * (old - inputs["ref_logprobs"])
            last = rewards.shape[1] - 1
            for row, end in enumerate((start + mask[:, start:].sum(1)).clamp(max=last).tolist()):
                rewards[row, end] += inputs["rewards"][row].clamp(-5, 5)
                rewards[row, end + 1 :] = values[row, end + 1 :] = 0
            advantages, returns = self.get_advantages_and_returns(values, rewards, start)
        logits = self.actor_model(input_ids=seq, attention_mask=attended, use_cache=False).logits
        new = gather_log_probs(logits[:, :-1, :], seq[:, 1:])
        actor = self.actor_loss_fn(new[:, start:], old[:, start:], advantages, mask[:, start:])
        self.actor_model.backward(actor)
        self.actor_model.step()
        value = self.critic_model.forward_value(
            input_ids=seq, attention_mask=attended, return_value_only=True, use_cache=False
        )
        critic = self.critic_loss_fn(value[:, :-1][:, start:], values[:, start:], returns, mask[:, start:])
        self.critic_model.backward(critic)
        self.critic_model.step()
        return actor, critic

    def actor_loss_fn(self, logprobs, old_logprobs, advantages, mask):
        ratio = ((logprobs - old_logprobs) * mask).exp()
        clipped = ratio.clamp(1 - self.cliprange, 1 + self.cliprange)
        return -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum() / mask.sum()

    def critic_loss_fn(self, values, old_values, returns, mask):
        clipped = values.clamp(old_values - self.cliprange_value, old_values + self.cliprange_value)
        worse = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
        return (worse * mask).sum() / mask.sum() / 2

    def get_advantages_and_returns(self, values, rewards, start):
        carried, advantages = 0.0, []
        for t in range(rewards.shape[1] - 1, start - 1, -1):
            following = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
            carried = rewards[:, t] + self.gamma * following - values[:, t] + self.gamma * self.lam * carried
            advantages.insert(0, carried)
        found = torch.stack(advantages, 1)
        return found.detach(), found + values[:, start:]
