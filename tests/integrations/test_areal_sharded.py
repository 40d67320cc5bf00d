"""AReaL's FSDP engine and its gathered log-probabilities over ranks, over gloo."""

import contextlib

import areal_engines as engines
import pytest
import ranks
import torch
from accuracy import check
from areal_cases import eager, nothing_left_behind, upstream, vocab_parallel
from bitwise import assert_equal
from doors import random

import rlkernel

assert nothing_left_behind and upstream  # fixtures of every test here
pytestmark = [ranks.pytestmark, pytest.mark.filterwarnings("ignore")]

LAYOUTS = {  # by the number of ranks
    2: {"data": {"data": 2}, "sequence": {"sequence": 2}, "tensor": {"tensor": 2}},
    4: {"data and tensor": {"data": 2, "tensor": 2}},
}
ROWS, VOCAB = 9, 42
NAMES = ("gather_logprobs", "gather_logprobs_entropy")


def _engine(rank, kind, path, layouts):
    """What rlkernel's engine gives and AReaL's own, and who ran."""
    made = engines.make(path, **layouts[kind])
    given, found = engines.batch(made.dp_rank), {}
    with eager():
        found["stock"] = engines.everything(made, given)
        with rlkernel.patch_areal() as patch:
            found["ours"] = engines.everything(made, given)
        return found, dict(patch.calls), dict(patch.fallbacks)


@pytest.mark.parametrize("count", LAYOUTS)
def test_an_engine_of_ranks(count, tmp_path):
    path = str(engines.save(tmp_path / "model"))
    found = ranks.run(_engine, list(LAYOUTS[count]), tmp_path, path, LAYOUTS[count], count=count)
    for kind, of_ranks in found.items():
        for rank, (found, calls, fallbacks) in enumerate(of_ranks):
            where = f"{kind}, rank {rank}"
            assert calls == {"FSDPEngine": 3} and not fallbacks, (where, calls, fallbacks)
            ours, stock = found["ours"], found["stock"]
            assert len(ours[0]) == len(stock[0]) and ours[1].keys() == stock[1].keys()
            for a, b in zip(ours[0], stock[0], strict=True):
                torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, msg=where)
            for name, grad in ours[1].items():
                scale = stock[1][name].abs().max().item()
                apart = (grad - stock[1][name]).abs().max().item()
                assert apart <= 3e-5 * scale + 1e-7, f"{where}: {name} differs by {apart} of {scale}"


def _inputs(seed=0, scale=3.0):
    labels = torch.randint(VOCAB, (ROWS,), generator=torch.Generator().manual_seed(seed + 1))
    return random(seed, ROWS, VOCAB, scale=scale), labels


def _gathered(rank, kind):
    """By function, dtype and side: outputs, and the gradient of this rank's logits."""
    found, group = {}, torch.distributed.group.WORLD
    with eager():
        for name in NAMES:
            for dtype in (torch.float32, torch.bfloat16):
                for side in ("stock", "ours"):
                    logits, labels = _inputs()
                    shard = logits.to(dtype).chunk(2, -1)[rank].clone().requires_grad_()
                    with rlkernel.patch_areal() if side == "ours" else contextlib.nullcontext() as patch:
                        out = getattr(vocab_parallel, name)(shard * 1, labels, 0.7, group, 4)
                        if patch:
                            assert patch.calls == {name: 1} and not patch.fallbacks
                    out = out if isinstance(out, tuple) else (out,)
                    total = sum((x * random(7 + i, ROWS)).sum() for i, x in enumerate(out))
                    if side == "ours":
                        total.backward(retain_graph=True)  # AReaL's may not
                        again = shard.grad.clone()
                        shard.grad = None
                    total.backward()
                    if side == "ours":
                        assert torch.equal(again, shard.grad)
                    found[name, dtype, side] = [x.detach() for x in out], shard.grad
        with rlkernel.patch_areal() as patch:  # what each rank has alone is no part of anything
            logits, labels = _inputs()
            alone = (
                torch.distributed.new_group([0]) if rank == 0 else torch.distributed.new_group([0]) and None
            )
            got = vocab_parallel.gather_logprobs(logits, labels, 0.7, alone)
            logs = (logits / 0.7).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
            torch.testing.assert_close(got, logs)
            assert not patch.fallbacks
    return found


def test_logprobs_and_entropies_over_ranks(tmp_path):
    found = ranks.run(_gathered, ["tp"], tmp_path)["tp"]
    for name, dtype in {key[:2] for key in found[0]}:
        logits, labels = _inputs()
        exact = logits.to(dtype).double().requires_grad_()
        logs = (exact / 0.7).log_softmax(-1)
        truth = [logs.gather(-1, labels[:, None])[:, 0], -(logs.exp() * logs).sum(-1)]
        truth = truth[: len(found[0][name, dtype, "ours"][0])]
        sum((x * random(7 + i, ROWS)).sum() for i, x in enumerate(truth)).backward()
        for i, want in enumerate(truth):
            ours, stock = (found[0][name, dtype, side][0][i] for side in ("ours", "stock"))
            assert ours.dtype == torch.float32
            assert_equal("the other rank's", ours, found[1][name, dtype, "ours"][0][i])
            check(f"{name} {dtype} {i}", ours, stock, want.detach())
        ours, stock = (
            torch.cat([of[name, dtype, side][1] for of in found], -1) for side in ("ours", "stock")
        )
        check(f"{name} {dtype} gradient", ours, stock, exact.grad)


def _unknown(rank, kind):
    """A group that torch does not know by its name, and labels that no rank has."""
    group, found = torch.distributed.group.WORLD, []
    logits, labels = _inputs()
    shard = logits.chunk(2, -1)[rank]
    with eager(), rlkernel.patch_areal() as patch:
        found.append(vocab_parallel.gather_logprobs(shard, torch.full_like(labels, -100), 1.0, group))
        from rlkernel.integrations.areal import logprobs

        stock, logprobs.registered = logprobs.registered, lambda group: None
        try:
            found.append(vocab_parallel.gather_logprobs(shard, labels, 1.0, group))
        finally:
            logprobs.registered = stock
        return found, dict(patch.calls), dict(patch.fallbacks)


def test_what_is_left_and_what_is_ignored(tmp_path):
    for (ignored, left), calls, fallbacks in ranks.run(_unknown, ["tp"], tmp_path)["tp"]:
        logits, labels = _inputs()
        assert not ignored.any() and calls == {"gather_logprobs": 1}
        assert list(fallbacks) == ["gather_logprobs: the group of ranks is none that torch knows by its name"]
        torch.testing.assert_close(left, logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0])
