"""Batches and heads for the peers that begin with hidden states."""

from types import SimpleNamespace

import torch

IGNORED = -100
PAIRS, LENGTH, HIDDEN, VOCAB = 3, 11, 8, 29


def batch_of_trl():
    """Chosen and rejected sequences as TRL's collators give them, and what they are to us: the targets, of
    which tokens count, and which belong to the sequence at all."""
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCAB, (2 * PAIRS, LENGTH), generator=g)
    prompt = torch.tensor([2, 4, 3] * 2)[:, None]
    end = torch.tensor([9, 11, 6, 8, 7, 11])[:, None]
    places = torch.arange(LENGTH)
    attention = (places < end).long()
    labels = torch.where((places >= prompt) & (places < end), ids, IGNORED)
    batch = {}
    for side, rows in (("chosen", slice(0, PAIRS)), ("rejected", slice(PAIRS, None))):
        batch[f"{side}_input_ids"] = ids[rows]
        batch[f"{side}_attention_mask"] = attention[rows]
        batch[f"{side}_labels"] = labels[rows]
    # hidden state t predicts token t + 1
    shifted = labels[:, 1:]
    return {
        "trl": batch,
        "labels": shifted.contiguous(),
        "targets": ids[:, 1:],
        "counted": shifted != IGNORED,
        "attended": attention[:, 1:] != 0,
    }


def head(batch, seed=4):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*batch["targets"].shape, HIDDEN, generator=g)
    return hidden, torch.randn(VOCAB, HIDDEN, generator=g) / 2


def trl_batch_loss(trainer, this, batch, hidden, weight):
    """``get_batch_loss_metrics`` of TRL's CPO and ORPO trainers, unbound, with a model that is its head."""
    this.is_encoder_decoder = this.aux_loss_enabled = False
    this.accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x)
    for name in ("concatenated_inputs", "get_batch_logps"):
        setattr(this, name, getattr(trainer, name))
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(trainer, name):
            setattr(this, name, getattr(trainer, name).__get__(this))
    last = torch.zeros_like(hidden[:, :1])  # predicts nothing
    logits = torch.cat([hidden, last], 1) @ weight.T
    return trainer.get_batch_loss_metrics(this, lambda *a, **k: SimpleNamespace(logits=logits), batch["trl"])[
        0
    ]
