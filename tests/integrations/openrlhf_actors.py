"""Actors of OpenRLHF with a tiny model, and samples for them; what they compute, and what is true in fp64."""

import tiny
import torch
from doors import random
from openrlhf_cases import actors

VOCAB = 96


def actor(temperature=1.0, packed=False, model=None, **sizes):
    """As one that loaded its model itself, which would be in bf16 or fp16 alone."""
    made = actors.Actor(
        model or tiny.make_model(**{"vocab": VOCAB, "hidden": 32} | sizes), temperature=temperature
    )
    made.packing_samples = packed
    return made


def samples(seed=0, rows=5, tokens=13, actions=9):
    """Prompts of one length and answers of several, one of them empty, padded on the right."""
    g = torch.Generator().manual_seed(seed)
    sequences = torch.randint(3, VOCAB, (rows, tokens), generator=g)
    lengths = torch.randint(1, actions + 1, (rows,), generator=g)
    lengths[0], lengths[rows - 1] = actions, 0
    places = torch.arange(tokens)
    attention_mask = (places < (tokens - actions + lengths)[:, None]).long()
    action_mask = torch.arange(actions) < lengths[:, None]
    action_mask[0, 3:5] = False  # a tool spoke
    return {
        "sequences": sequences.masked_fill(attention_mask == 0, tiny.PAD),
        "attention_mask": attention_mask,
        "action_mask": action_mask,
    }


def upstream(given):
    return random(90, *given["sequences"].shape), random(91, *given["sequences"].shape)


def step(made, given, **options):
    """Log-probabilities, entropy or None, and the gradient of every parameter."""
    made.zero_grad()
    found = made(**given, **options)
    logprobs, output = found if isinstance(found, tuple) else (found, None)
    entropy = getattr(output, "entropy", None)
    of_logprobs, of_entropy = upstream(given)
    total = (logprobs.double() * of_logprobs[:, : logprobs.shape[1]]).sum()
    if entropy is not None:
        total = total + (entropy.double() * of_entropy[:, : entropy.shape[1]] * shown(given)).sum()
    total.backward()
    grads = {name: p.grad.clone() for name, p in made.named_parameters()}
    return logprobs.detach(), None if entropy is None else entropy.detach(), grads


def shown(given):
    """Where an entropy counts: of tokens that are there."""
    return given["attention_mask"][:, :-1]


def exact(made, given, temperature, return_entropy=False):
    """The same in fp64, of logits."""
    import copy

    model = copy.deepcopy(made.model).double()
    mask = given["attention_mask"]
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    logits = model(given["sequences"], attention_mask=mask, position_ids=positions).logits / temperature
    logp = logits.log_softmax(-1)
    logprobs = logp.gather(-1, given["sequences"].roll(-1, 1)[..., None])[..., 0][:, :-1]
    entropy = -(logp.exp() * logp).sum(-1)[:, :-1]
    if (actions := given.get("action_mask")) is not None:
        logprobs = logprobs[:, -actions.shape[1] :] * actions
    of_logprobs, of_entropy = upstream(given)
    total = (logprobs * of_logprobs[:, : logprobs.shape[1]]).sum()
    if return_entropy:
        total = total + (entropy * of_entropy[:, : entropy.shape[1]] * shown(given)).sum()
    total.backward()
    return (
        logprobs.detach(),
        entropy.detach(),
        {f"model.{name}": p.grad for name, p in model.named_parameters()},
    )
