"""Each marked line has a mistake that a user could make; a type checker finds every one and no other."""

import torch

import rlkernel

logits, ids = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
hidden, weight = torch.zeros(2, 3), torch.zeros(5, 3)

rlkernel.policy_loss(logits, None, logits, ids, loss_type="grop")  # wrong: loss_type
rlkernel.policy_loss(logits, None, logits, ids, loss_agg_mode="token_mean")  # wrong: verl's dash
rlkernel.linear_policy_loss(hidden, weight, ids, None, logits, ids, epsilon_hi=0.3)  # wrong: handed on
rlkernel.logprob(logits, ids, temprature=0.7)  # wrong: a keyword of an overload
rlkernel.logprob(logits, ids).entropy.sum()  # wrong: None, which was not asked for
rlkernel.use_backend("cuda")  # wrong: no name of a backend
rlkernel.policy_loss_preset("gsop")  # wrong: a preset
rlkernel.patch_trl(prefix_shared=True)  # wrong: an option of a patch
rlkernel.patch_vllm(["samplers"])  # wrong: an op of vLLM
rlkernel.packed_logprobs(torch.nn.Linear(1, 1), [], return_entropy=True)  # wrong: no batch
rlkernel.group_advantages(logits[:, 0], group_size=2, scale_rewards="std")  # wrong: TRL's words are others
rlkernel.sample(logits, return_logprobs=("procesed",))  # wrong: the name of a distribution
rlkernel.batch_invariant(level="tp")  # wrong: a level
