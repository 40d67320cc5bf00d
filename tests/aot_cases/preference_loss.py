"""Calls of ``preference_loss``, forward and backward, with terms of every kind."""

import torch

from rlkernel.calls.preference_loss import PreferenceLossCall
from rlkernel.ops.preference_loss import DEFAULTS
from rlkernel.ops.preference_loss.rule import build
from rlkernel.triton_ops import preference_loss


def cases():
    def case(loss_type, extras=False, unpaired=False, **options):
        rule = build(**DEFAULTS | options | {"loss_type": loss_type})
        x, mask = torch.zeros(4, 64), torch.ones(4, 64, dtype=torch.bool)
        offsets = torch.arange(5) * 64 if extras else None
        tokens = x.view(-1) if extras else x
        kept = mask.view(-1) if extras else mask
        labels = mask[:, 0].clone() if unpaired else None
        number = torch.ones(1, dtype=torch.float64) if extras else None
        delta = torch.zeros(2) if extras and not unpaired else None
        more = tokens if extras else None
        kl = x[0, :4] if unpaired else None
        tensors = tokens, tokens, kept, kept if extras else None, more, offsets, labels, kl, number, number
        call = PreferenceLossCall(*tensors, delta, rule)

        def run():
            preference_loss.backward(call, preference_loss.forward(call), x[0, 0])

        return run

    several = ("sigmoid", "bco_pair", "sft", "aot", "orpo", "exo_pair")
    return {
        "sigmoid": case("sigmoid"),
        "several, everything": case(several, True, ld_alpha=0.5, label_smoothing=0.1),
        "weighted, js": case(("sigmoid_norm", "ipo"), use_weighting=True, f_divergence_type="js_divergence"),
        "discopop, alpha": case("discopop", f_divergence_type="alpha_divergence"),
        "simpo": case("simpo", nll_coef=1.0),
        "aot_unpaired": case("aot_unpaired"),
        "kto packed": case("kto", True, unpaired=True),
    }
