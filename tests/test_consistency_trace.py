"""``consistency.trace``: the first module at which two runs part, whatever parts them."""

import copy
import dataclasses
import math
import re

import pytest
import torch
from torch import nn

from rlkernel.consistency import fingerprints, packed_rows, padded_rows, trace


class Block(nn.Module):
    """Attention within a sequence, and a layer behind it; ``between`` and ``behind`` are planted faults."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)
        self.between = self.behind = 0.0

    def forward(self, x, seen):
        h = self.norm(x)
        q = self.q(h)
        scores = (q[..., :, None, :] * h[..., None, :, :]).sum(-1).masked_fill(~seen, -math.inf)
        mixed = (scores.softmax(-1)[..., None] * h[..., None, :, :]).sum(-2)
        x.add_(self.drop(self.out(mixed + self.between)))  # in place, behind what was recorded
        return x + self.behind


class Exact(nn.Linear):
    """The same bits for a row in any batch."""

    def forward(self, x):
        return sum(x[..., k, None] * self.weight[:, k] for k in range(x.shape[-1])) + self.bias


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    past: object = None


class Model(nn.Module):
    def __init__(self, width=8, blocks=3, vocab=11):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        for block in self.blocks:
            block.q, block.out = Exact(width, width), Exact(width, width)
        self.head = Exact(width, vocab)

    def forward(self, ids, seen):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, seen)
        return Output(self.head(x))


def make(**sizes):
    torch.manual_seed(0)
    return Model(**sizes).requires_grad_(False).eval()


IDS = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))
CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()
BATCH = {"ids": IDS, "seen": CAUSAL}


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def names(found):
    return [x.module for x in found.differences]


@pytest.mark.parametrize("train", [False, True], ids=["eval", "dropout"])
def test_a_model_is_itself(train):
    model = make().train(train)
    found = trace(model, model, BATCH)
    assert found.identical and found.first is None and found.compared == 3 * 5 + 3
    assert str(found).splitlines()[0] == "all that was compared has the same bits"
    assert hooks(model) == 0 and not found.unmatched and not found.incomparable


def test_the_first_of_a_chain():
    """A weight that was not sent."""
    model, other = make(), make()
    other.blocks[1].out.weight[3, 2] += 1e-3
    found = trace(model, other, BATCH)
    assert names(found) == [
        "blocks.1.out", "blocks.1.drop", "blocks.1",
        *(f"blocks.2{x}" for x in (".norm", ".q", ".out", ".drop", "")), "head", "",
    ]  # fmt: skip
    first = found.first
    assert first.kind == "Exact" and first.inputs_equal and first.inputs_compared == 1
    assert first.weights_equal is False and first.distance.rows == 10 and first.distance.differ == 10
    assert first.place == (0, 0) and first.distance.exact and 0 < first.distance.difference < 1e-2
    assert [x.weights_equal for x in found.differences[1:3]] == [True, False]
    assert found.differences[1].inputs_equal is False and found.differences[-1].output == "logits"
    lines = str(found).splitlines()
    assert lines[0] == "blocks.1.out (Exact) is the first whose output differs, and its weights differ"
    assert lines[1] == "18 outputs compared, 10 differ" and len(lines) == 13
    assert lines[3].split()[:4] == ["blocks.1.out", "equal", "differ", "10"]


class Tiled(Exact):
    """A layer whose last bit depends on how many rows there are."""

    def forward(self, x):
        y = super().forward(x)
        return torch.nextafter(y, y + 1) if x.flatten(0, -2).shape[0] > 5 else y


def test_a_module_that_depends_on_its_batch():
    model = make()
    model.blocks[1].q = Tiled(8, 8)
    alone = {"ids": IDS[1:], "seen": CAUSAL}
    found = trace(model, model, BATCH, alone, rows_a=lambda x: x[1] if x.dim() == 3 else None,
                  rows_b=lambda x: x[0] if x.dim() == 3 else None)  # fmt: skip
    assert found.verdict == "blocks.1.q (Tiled) gives other bits for equal inputs"
    assert found.first.distance.ulps == 1 and found.first.place == (0,) and found.first.weights_equal
    assert names(found)[:3] == ["blocks.1.q", "blocks.1.out", "blocks.1.drop"]


def test_what_lies_between_modules():
    model, other = make(), make()
    other.blocks[1].between = 1e-3
    found = trace(model, other, BATCH)
    assert found.verdict == (
        "blocks.1.out is the first whose inputs differ, and no output differs before: "
        "the runs part in what blocks.1 does between its modules"
    )
    assert found.first.module == "blocks.1.out" and found.first.inputs_equal is False


def test_what_a_module_does_behind_its_own():
    model, other = make(), make()
    other.blocks[1].behind = 1e-3
    found = trace(model, other, BATCH)
    want = (
        "blocks.1 (Block) gives other bits for equal inputs, in what it does itself: the modules in it agree"
    )
    assert found.verdict == want and names(found)[0] == "blocks.1"


def test_other_inputs():
    model = make()
    found = trace(model, model, BATCH, {"ids": (IDS + 1) % 11, "seen": CAUSAL})
    assert found.verdict == "the two models get different inputs"


def test_padded_against_packed():
    """Rows of a padded batch and of one packed row, where a module in it looks at the padding."""
    model = make()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    padded = {"ids": IDS, "seen": CAUSAL}
    ids = IDS[mask.bool()][None]
    sequence = mask.cumsum(1).new_tensor([0] * 3 + [1] * 5)
    together = (sequence[:, None] == sequence) & torch.ones(8, 8, dtype=torch.bool).tril()
    packed = {"ids": ids, "seen": together}
    rows = {"rows_a": padded_rows(mask), "rows_b": packed_rows(8)}
    found = trace(model, model, padded, packed, **rows)
    # torch's sums between the modules may part, the modules do not
    assert found.compared == 18
    assert re.match(r"all that|blocks.\d.out is the first whose inputs differ", found.verdict)
    model.blocks[1].norm.register_forward_hook(lambda module, args, y: y + y.mean(1, keepdim=True) * 1e-3)
    found = trace(model, model, padded, packed, **rows)
    exact = next(x for x in found.differences if x.module == "blocks.1.norm")
    assert exact.distance.rows == 8
    assert hooks(model) == 1  # the one that was there


def test_rows_of_other_tensors_are_none():
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    padded, packed = padded_rows(mask), packed_rows(4)
    x = torch.arange(12.0).view(2, 3, 2)
    assert padded(x).tolist() == [[0, 1], [4, 5], [8, 9], [10, 11]]
    assert padded(x[0]) is None and padded(x[:, 0]) is None and padded(x[0, 0]) is None
    assert packed(x.view(1, 6, 2)).equal(packed(x.view(6, 2))) and packed(x.view(1, 6, 2)).shape == (4, 2)
    assert (
        packed(x[0]) is None and packed(torch.tensor(1.0)) is None and packed(x.view(1, 6, 2)[:, :3]) is None
    )


def test_runs_under_contexts_and_of_several_steps():
    model = make()

    def steps(model, batch):
        for length in (3, 5):
            model(ids=batch["ids"][:, :length], seen=CAUSAL[:length, :length])

    found = trace(model, model, BATCH, run_a=steps, run_b=steps)
    assert found.identical and found.compared == 36
    found = trace(model, model, BATCH, run_a=steps, run_b=lambda m, b: m(**b))
    assert "blocks.0.q#1" in found.unmatched
    assert any(x.startswith("blocks.0.q [6, 8] and [10, 8]") for x in found.incomparable)
    assert hooks(model) == 0


@pytest.mark.parametrize("where", ["model_a", "model_b", "rows"])
def test_hooks_go_also_after_an_error(where):
    model, other = make(), make()

    def fail(*_):
        raise RuntimeError("planted")

    rows = fail if where == "rows" else None
    faulty = {"model_a": model, "model_b": other}.get(where)
    state = torch.get_rng_state()
    if faulty is not None:
        faulty.blocks[1].q.forward = fail
    with pytest.raises(RuntimeError, match="planted"):
        trace(model, other, BATCH, rows_a=rows)
    assert hooks(model) == hooks(other) == 0 and torch.equal(torch.get_rng_state(), state)


def test_without_room_hashes_tell_which_and_some_rows_how_much():
    model, other = make(), make()
    other.embed.weight[IDS[1, 4]] += 1e-3
    ids = torch.arange(66)[None] % 11
    seen = torch.ones(66, 66, dtype=torch.bool).tril()
    full = trace(model, other, {"ids": ids, "seen": seen})
    none = trace(model, other, {"ids": ids, "seen": seen}, memory=0)
    some = trace(model, other, {"ids": ids, "seen": seen}, memory=66 * 8 * 4)
    assert full.first.distance.difference == pytest.approx(1e-3, rel=1e-3)  # before the block adds to it
    assert names(full) == names(none) == names(some)
    assert [x.distance[:3] for x in full.differences] == [x.distance[:3] for x in none.differences]
    assert [x.distance.exact for x in some.differences[:2]] == [True, False]
    for a, b in zip(full.differences, none.differences, strict=True):
        assert a.distance.exact and not b.distance.exact
        assert b.distance.ulps is None or 0 < b.distance.ulps <= a.distance.ulps
    assert any(x.distance.ulps for x in none.differences) and ">= " in str(none)


def test_models_of_other_names_and_of_two_dtypes():
    model = make()
    other = nn.ModuleDict({"wrapped": copy.deepcopy(model)})

    def unwrapped(name):
        return name.removeprefix("wrapped").removeprefix(".") if name else None

    run = {"run_b": lambda m, batch: m["wrapped"](**batch), "names_b": unwrapped}
    assert trace(model, other, BATCH, **run).identical
    lower = copy.deepcopy(model)
    lower.embed = lower.embed.bfloat16()  # its values change, and so its dtype
    model.embed.weight.copy_(lower.embed.weight)
    found = trace(model.embed, lower.embed, IDS)
    assert found.identical  # equal numbers in two dtypes
    with pytest.raises(
        ValueError, match=r"under model_a's names \['', 'blocks.0', 'blocks.0.drop'\], got \['x"
    ):
        trace(model, model, BATCH, names_b=lambda name: f"x{name}")


def test_outputs_of_another_shape_or_kind():
    class Split(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.n = n

        def forward(self, x):
            return x[: self.n], (x.argmax(-1), None, "text"), {"most": x.amax()}

    x = torch.rand(4, 3)
    found = trace(Split(2), Split(3), x)
    assert found.incomparable == ("(model)[0] [2, 3] and [3, 3]",) and found.compared == 2
    assert trace(Split(2), Split(2), (x,)).identical
    changed = trace(Split(2), Split(2), [x], [x + torch.eye(4, 3)])
    by_output = {d.output: d for d in changed.differences}
    assert set(by_output) == {"0", "1.0", "2.most"} and by_output["1.0"].distance.ulps is None
    assert by_output["2.most"].place == (0,) and by_output["1.0"].place in ((0,), (1,), (2,))
    nothing = trace(
        Split(2), Split(2), x, rows_a=lambda x: x[:1] if x.dim() == 2 else None, rows_b=lambda x: x
    )
    assert not nothing.identical and nothing.compared == 0 and nothing.verdict == "nothing could be compared"


def test_hashes_of_rows(monkeypatch):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(50, 40, generator=g)
    want = fingerprints.hashes(x)
    assert len(set(want.tolist())) == 50
    for size in (1, 100, 1 << 20):
        monkeypatch.setattr(fingerprints, "_CHUNK", size)
        assert fingerprints.hashes(x).equal(want)
    assert fingerprints.hashes(x.t().contiguous().t()).equal(want)
    assert fingerprints.hashes(x.view(50, 5, 8)).equal(want)
    swapped = x.clone()
    swapped[7, 3], swapped[7, 4] = x[7, 4], x[7, 3]
    assert (fingerprints.hashes(swapped) != want).nonzero().tolist() == [[7]]
    for bit in range(32):
        flipped = x.view(torch.int32).clone()
        flipped[:, 17] ^= -(2**31) if bit == 31 else 1 << bit
        assert (fingerprints.hashes(flipped.view(torch.float32)) != want).all()
    narrow = x.bfloat16()
    assert fingerprints.hashes(narrow).equal(fingerprints.hashes(narrow.float()))
    special = torch.tensor([[0.0], [-0.0], [math.nan], [-math.nan], [math.inf]])
    found = fingerprints.hashes(special).tolist()
    assert found[2] == found[3] and len(set(found)) == 4
    for kind in (torch.bool, torch.uint8, torch.int64, torch.complex64, torch.float64, torch.float8_e4m3fn):
        assert len(fingerprints.hashes(torch.ones(3, 2).to(kind))) == 3
    assert (
        fingerprints.hashes(torch.empty(0, 4)).shape == (0,)
        and len(fingerprints.hashes(torch.empty(4, 0))) == 4
    )


ERRORS = {
    "model_a must be a torch.nn.Module, got function": lambda m: trace(lambda x: x, m, BATCH),
    "model_b must be a torch.nn.Module, got NoneType": lambda m: trace(m, None, BATCH),
    "memory must be >= 0 and finite, got -1": lambda m: trace(m, m, BATCH, memory=-1),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_name_the_argument(text):
    with pytest.raises(ValueError, match=text):
        ERRORS[text](make())
