"""What stands in the place of AReaL's gathered log-probabilities and entropies, beside AReaL's own."""

import contextlib
import math
import random as python_random

import pytest
import torch
from accuracy import check
from areal_cases import (
    DOOR,
    check_against_areal,
    check_left_to_areal,
    load,
    nothing_left_behind,
    upstream,
    vocab_parallel,
)
from doors import random
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel.integrations.areal import logprobs

assert nothing_left_behind and upstream  # fixtures of every test here
tree_functional = load("areal.models.tree_attn.functional")

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
NAMES = pytest.mark.parametrize("name", ["gather_logprobs", "gather_logprobs_entropy"])


def labels_of(*shape, vocab, seed=1):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def exact(logits, labels, temperature, entropy):
    logs = (logits.double() / temperature).log_softmax(-1)
    found = logs.gather(-1, labels[..., None])[..., 0]
    return (found, -(logs.exp() * logs).sum(-1)) if entropy else found


def compare(name, logits, labels, dtype, temperature=1.0, magnitude=0.0, **options):
    """Forward and gradient."""
    entropy, rows = name.endswith("entropy"), logits.shape[:-1]

    def call(x):
        return getattr(vocab_parallel, name)(x, labels, temperature, **options)

    found, _ = check_against_areal(
        call, [logits], dtype, [random(2 + i, *rows) for i in range(1 + entropy)], name,
        exact=lambda x: exact(x, labels, temperature, entropy), magnitude=magnitude,
    )  # fmt: skip
    outputs, (grad,) = found
    assert all(x.dtype == torch.float32 and x.shape == rows for x in outputs) and grad.dtype == dtype
    return outputs


@pytest.mark.parametrize("shape", [(1, 7), (11, 33), (3, 2, 50), (1, 1)], ids=str)
@NAMES
@DTYPES
def test_gathered(dtype, name, shape):
    labels = labels_of(*shape[:-1], vocab=shape[-1])
    compare(name, random(0, *shape, scale=3.0), labels, dtype)
    compare(name, random(0, *shape, scale=3.0), labels, dtype, temperature=0.6, chunk_size=2)


@NAMES
def test_any_options_together(name):
    """Drawn at random, of which each is one that AReaL's engines pass."""
    draw = python_random.Random(7)
    for seed in range(40):
        rows, vocab = draw.randint(1, 20), draw.choice([2, 5, 40, 257])
        shape = draw.choice([(rows,), (rows, 2), (1, rows)])
        scale = draw.choice([0.01, 1.0, 8.0, 60.0])
        compare(
            name, random(seed, *shape, vocab, scale=scale), labels_of(*shape, vocab=vocab, seed=seed),
            draw.choice([torch.float32, torch.bfloat16, torch.float16]),
            temperature=draw.choice([1.0, 1, 0.3, 2, 1.7]), chunk_size=draw.choice([1, 3, 1024]),
            magnitude=float(scale >= 8),  # entropies are next to none there, of logarithms that are not
        )  # fmt: skip


def test_the_gradient_of_one_output_alone():
    for chosen in (0, 1):

        def call(x, chosen=chosen):
            return vocab_parallel.gather_logprobs_entropy(x, labels_of(6, vocab=40), 0.8)[chosen]

        def truth(x, chosen=chosen):
            return exact(x, labels_of(6, vocab=40), 0.8, True)[chosen]

        logits = random(0, 6, 40, scale=2.0)
        check_against_areal(
            call, [logits], torch.float32, [random(3, 6)], "gather_logprobs_entropy", exact=truth
        )


def test_logits_that_are_not_dense():
    labels = labels_of(6, vocab=40)
    wide = random(0, 6, 80)
    for logits in (
        wide[:, ::2],
        wide.T.contiguous().T[:, :40],
        wide[:, 3:43],
        random(1, 1, 40).expand(6, 40),
    ):
        with rlkernel.patch_areal():
            got = vocab_parallel.gather_logprobs_entropy(logits, labels)
        for a, b in zip(got, exact(logits, labels, 1.0, True), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_a_second_backward():
    logits = random(0, 5, 30).requires_grad_()
    with rlkernel.patch_areal():
        out = vocab_parallel.gather_logprobs(logits * 1, labels_of(5, vocab=30)).sum()
        (first,) = torch.autograd.grad(out, logits, retain_graph=True)
        (second,) = torch.autograd.grad(out, logits)
    assert torch.equal(first, second) and first.any()


def test_a_token_that_cannot_be_has_an_entropy():
    """Of logits of -inf AReaL's own entropy is NaN, as 0 times -inf is, and so is every gradient of it."""
    logits = random(0, 2, 5)
    logits[:, 3] = -math.inf
    labels = torch.tensor([1, 3])
    _, stock = vocab_parallel.gather_logprobs_entropy(logits, labels)
    assert stock.isnan().all()
    leaf = logits.clone().requires_grad_()
    with rlkernel.patch_areal():
        got, entropy = vocab_parallel.gather_logprobs_entropy(leaf, labels)
        entropy.sum().backward()
    kept = logits[:, [0, 1, 2, 4]].double().log_softmax(-1)
    torch.testing.assert_close(entropy.double(), -(kept.exp() * kept).sum(-1), rtol=1e-6, atol=1e-6)
    assert got[1] == -math.inf and leaf.grad.isfinite().all() and not leaf.grad[:, 3].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_a_number_stays_so(value):
    logits = random(0, 3, 50)
    logits[1, 7] = value
    labels = torch.tensor([1, 2, 3])
    stock = vocab_parallel.gather_logprobs_entropy(logits, labels)
    with rlkernel.patch_areal():
        got = vocab_parallel.gather_logprobs_entropy(logits, labels)
    for a, b in zip(got, stock, strict=True):
        assert a.isnan().tolist() == b.isnan().tolist() == [False, True, False]


def test_a_label_outside_the_vocabulary_is_an_error():
    for label in (50, -1, -100):
        labels = torch.tensor([1, label])
        with pytest.raises(RuntimeError, match="out of bounds"):
            vocab_parallel.gather_logprobs(random(0, 2, 50), labels)
        with rlkernel.patch_areal(), pytest.raises(ValueError, match="is outside"):
            vocab_parallel.gather_logprobs(random(0, 2, 50), labels)


def test_no_copy_of_the_logits_is_kept_for_backward():
    """Of which AReaL keeps one where torch does not compile it."""
    logits = random(0, 64, 1000).bfloat16().requires_grad_()
    sizes = {}
    for side in ("stock", "ours"):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            if side == "ours":
                with rlkernel.patch_areal():
                    vocab_parallel.gather_logprobs_entropy(logits, labels_of(64, vocab=1000))
            else:
                vocab_parallel.gather_logprobs_entropy(logits, labels_of(64, vocab=1000))
        own = {x.data_ptr(): x.nbytes for x in kept if x.data_ptr() != logits.data_ptr()}
        sizes[side] = sum(own.values())
    assert sizes["stock"] >= 2 * logits.nbytes and sizes["ours"] < logits.nbytes / 50, sizes


def test_backward_makes_one_gradient_of_the_logits():
    """AReaL cuts rows out of the logits, and autograd makes of each part's gradient one of all rows."""
    logits, labels = random(0, 64, 50), labels_of(64, vocab=50)
    made = {}
    for side in ("stock", "ours"):
        leaf = logits.clone().requires_grad_()
        with rlkernel.patch_areal() if side == "ours" else contextlib.nullcontext():
            total = vocab_parallel.gather_logprobs(leaf, labels, 1.0, None, 8).sum()
            with Counted(logits.shape) as counted:
                torch.autograd.grad(total, leaf)
        made[side] = counted.times
    assert made["ours"] == 1 and made["stock"] >= 8, made


class Counted(TorchDispatchMode):
    """How many tensors of a shape anything makes."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.times = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.times += isinstance(out, torch.Tensor) and out.shape == self.shape and not out._is_view()
        return out


def test_as_compiled_as_areal_has_it():
    """The one test in which torch compiles AReaL's own."""
    logits, labels = random(0, 9, 60, scale=2.0), labels_of(9, vocab=60)
    with torch.compiler.set_stance("default"):
        stock = vocab_parallel.gather_logprobs(logits, labels, 0.7)
    with rlkernel.patch_areal():
        got = vocab_parallel.gather_logprobs(logits, labels, 0.7)
    check("compiled", got, stock, exact(logits, labels, 0.7, False))


LEFT = {
    "logits is torch.float64": lambda: (random(0, 3, 5).double(), torch.zeros(3, dtype=torch.int64)),
    "logits is on a device of type meta": lambda: (
        torch.zeros(3, 5, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta"),
    ),
    "logits is no tensor": lambda: ([[0.0]], torch.zeros(1, dtype=torch.int64)),
    "labels is no tensor": lambda: (random(0, 3, 5), [0, 1, 2]),
    "labels have not the shape of the rows of logits": lambda: (
        random(0, 4, 3, 5), torch.zeros(4, dtype=torch.int64),
    ),
    "labels are torch.float32": lambda: (random(0, 3, 5), torch.zeros(3)),
    "logits are not [..., V] with rows": lambda: (random(0, 0, 5), torch.zeros(0, dtype=torch.int64)),
    "the temperature is no number above 0": lambda: (
        random(0, 3, 5), torch.zeros(3, dtype=torch.int64), torch.tensor(0.7),
    ),
    "chunk_size is no number above 0": lambda: (
        random(0, 3, 5), torch.zeros(3, dtype=torch.int64), 1.0, None, 0,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:rlkernel.patch_areal")
@pytest.mark.parametrize("reason", LEFT)
@NAMES
def test_what_is_left_to_areal(name, reason):
    check_left_to_areal(lambda: getattr(vocab_parallel, name)(*LEFT[reason]()), reason)


@pytest.mark.filterwarnings("ignore:rlkernel.patch_areal")
@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan, True])
def test_temperatures_that_are_left_to_areal(temperature):
    logits, labels = random(0, 3, 5), torch.tensor([1, 2, 3])
    check_left_to_areal(
        lambda: vocab_parallel.gather_logprobs(logits, labels, temperature), "the temperature is no number"
    )


def test_what_is_left_is_told_once():
    logits, labels = LEFT["logits is torch.float64"]()
    DOOR.check_told_once(
        lambda: vocab_parallel.gather_logprobs(logits, labels), "gather_logprobs", "logits is torch.float64"
    )


@pytest.mark.parametrize("of", ["logprobs", "entropy", "tree"])
def test_packed_trees(of):
    """[A B C D] and [A B E F] in one tree: the nodes AB, CD and EF, and the steps between them."""

    class Trie:
        all_sequence_ids = (0, 1)

        @staticmethod
        def get_sequence_tree_indices(sequence):
            return [(0, 1), (2, 3)] if sequence == 0 else [(0, 1), (4, 5)]

    ids = torch.tensor([[3, 5, 7, 9, 11, 13]])
    logits = random(0, 6, 20, scale=2.0)

    def call(x):
        if of == "logprobs":
            found = tree_functional._gather_packed_tree_logprobs(x, Trie, ids, 0.7)
            return tuple(found[i] for i in (0, 1))
        found, entropy = tree_functional._gather_packed_tree_logprobs_entropy(x, Trie, ids, 0.7)
        return (*(found[i] for i in (0, 1)), *(entropy[i] for i in (0, 1)))

    leaf = logits.clone().requires_grad_()
    want = call(leaf)
    (theirs,) = torch.autograd.grad(sum(x.cos().sum() for x in want), leaf)
    with rlkernel.patch_areal() as patch:
        got = call(leaf)
        (ours,) = torch.autograd.grad(sum(x.cos().sum() for x in got), leaf)
        assert patch.calls and not patch.fallbacks
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


MUTANTS = {
    "no temperature": lambda x, i, temperature, **o: rlkernel.logprob(x, i, **o),
    "of other labels": lambda x, i, **o: rlkernel.logprob(x, i.roll(1), **o),
    "fp16 logits": lambda x, i, **o: rlkernel.logprob(x.bfloat16(), i, **o),
    "overwritten logits": lambda x, i, **o: rlkernel.logprob(x.mul(1.0001), i, **o),
    "ignored": lambda x, i, ignore_index, **o: rlkernel.logprob(x, i, ignore_index=3, **o),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_one_is_seen(monkeypatch, mutant):
    monkeypatch.setattr(logprobs, "logprob", MUTANTS[mutant])
    labels = torch.tensor([3, 5, 7, 9, 11])
    with pytest.raises(AssertionError):
        compare("gather_logprobs_entropy", random(0, 5, 60, scale=3.0), labels, torch.float32, 0.7)
