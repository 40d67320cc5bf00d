"""ZeRO-3 in small: parameters whose memory is there only inside the gathering context."""

import contextlib

import torch


def gathering(gathers):
    """What stands for TRL's ``maybe_gather_lm_head_ctx``, of parameters whose ``full`` is all of them; each
    that it gathers is added to ``gathers``."""

    @contextlib.contextmanager
    def gather(*parameters):
        away = [p for p in parameters if p is not None and not p.numel()]
        for p in away:
            gathers.append(p)
            p.data = p.full
        yield
        for p in away:
            p.data = torch.empty(0)

    return gather
