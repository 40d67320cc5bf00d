"""The log-probabilities of prompts, patched beside unpatched, from SGLang's own processor."""

import pytest
import steps
import torch
from accuracy import check
from sglang.srt.layers.logits_processor import LogitsMetadata
from sglang.srt.layers.logprob_processor import InputLogprobProcessor
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel

V, H = 300, 16
LENGTHS = [5, 0, 8, 3]  # of what of each prompt has a log-probability; of one nothing, it is sampled from
CASES = {
    "tokens": (None, None),
    "top": ([3, 2, 0, 5], None),
    "given": (None, [[4, 4, 9], [5], None, [V - 1]]),
    "both": ([1, 2, 0, 4], [None, [7], [8, 9], []]),
}
CALL = "InputLogprobProcessor._forward_by_chunk"


class Head:
    """What makes logits; it notes what it is told, as one with LoRA is."""

    def __init__(self, dtype=torch.float32):
        made = torch.Generator().manual_seed(2)
        self.weight = torch.randn(V, H, generator=made).to(dtype)
        self.states = torch.randn(sum(LENGTHS) + 1, H, generator=made).to(dtype)
        self.told = []

    def logits(self, states, head, metadata, use_logits_buffer):
        return states @ head.weight.T

    def set_lm_head_pass(self, i):
        self.told.append(i)

    def reset_lm_head_pass(self):
        self.told.append("reset")


def scored(head, tops=None, given=None, chunk=None, lengths=LENGTHS, processor=None):
    """Each sequence's rows, as SGLang lays them out; from the last one is sampled."""
    rows, sampled, of_sequence = [], [], []
    for i, n in enumerate(lengths):
        rows += range(len(of_sequence), len(of_sequence) + n)
        of_sequence += [i] * max(n, 1)
        sampled.append(len(of_sequence) - 1)
    targets = torch.arange(len(rows)) * 7 % V
    metadata = LogitsMetadata(
        forward_mode=ForwardMode.EXTEND,
        extend_return_logprob=True,
        extend_return_top_logprob=tops is not None,
        extend_token_ids_logprob=given is not None,
        extend_logprob_pruned_lens_cpu=list(lengths),
        top_logprobs_nums=tops or [0] * len(lengths),
        token_ids_logprobs=given or [None] * len(lengths),
        extend_input_logprob_token_ids_gpu=targets,
        sample_indices_cpu=sampled,
        input_logprob_indices_cpu=rows,
    )
    own = processor or InputLogprobProcessor(V)
    own.logprobs_chunk_size = chunk or own.logprobs_chunk_size
    found, logits = own.forward(
        head.states[: len(of_sequence)], torch.tensor(sampled), torch.tensor(rows), of_sequence, head,
        head.logits, metadata,
    )  # fmt: skip
    return found, logits, torch.tensor(rows), targets


@pytest.mark.parametrize("chunk", [None, 4, 1])
@pytest.mark.parametrize("name", CASES)
def test_what_a_prefill_returns_is_sglangs(name, chunk):
    tops, given = CASES[name]
    head, other = Head(), Head()
    stock, want_logits, *_ = scored(head, tops, given, chunk)
    with rlkernel.patch_sglang() as patch:
        found, logits, rows, targets = scored(other, tops, given, chunk)
        assert patch.calls[CALL] == 1 and not patch.fallbacks
    assert torch.equal(logits, want_logits) and head.told == other.told
    truth = torch.log_softmax((head.states.double() @ head.weight.double().T)[rows], -1)
    check("tokens", found.token_logprobs, stock.token_logprobs, truth.gather(1, targets[:, None])[:, 0], 10.0)
    assert found.top_logprobs_idx == stock.top_logprobs_idx
    assert found.token_ids_logprobs_idx == stock.token_ids_logprobs_idx
    for field in ("top_logprobs_val", "token_ids_logprobs_val"):
        ours, theirs = getattr(found, field), getattr(stock, field)
        assert shape(ours) == shape(theirs)
        if ours is not None:
            torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-6, atol=2e-6)


def shape(lists):
    return None if lists is None else [[len(row) for row in sequence] for sequence in lists]


def flat(lists):
    return torch.tensor([x for sequence in lists for row in sequence for x in row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_a_trainer_and_of_the_sampler(dtype):
    head = Head(dtype)
    with rlkernel.patch_sglang(), rlkernel.batch_invariant():
        plain, _, rows, targets = scored(head)
        logits = head.logits(head.states, head, None, False)[rows]
        want = rlkernel.logprob(logits, targets).logprobs
        assert torch.equal(plain.token_logprobs, want)
        with_tops, *_ = scored(head, *CASES["both"])
        assert torch.equal(with_tops.token_logprobs, want)
        out = rlkernel.score_tokens(logits, targets, return_logprobs=("tempered",))
        assert torch.equal(out.tempered_logprobs, want)


def test_the_slow_path_of_sglang_is_replaced_too():
    """That of deterministic inference, with log_softmax."""
    processor = InputLogprobProcessor(V)
    processor.enable_fast_input_logprobs = False
    head = Head()
    stock, *_ = scored(head, processor=processor)
    with rlkernel.patch_sglang() as patch:
        found, *_ = scored(head, processor=processor)
    assert patch.calls[CALL] == 1
    torch.testing.assert_close(found.token_logprobs, stock.token_logprobs, rtol=1e-6, atol=2e-6)


@pytest.mark.filterwarnings("ignore:rlkernel.patch_sglang")
@pytest.mark.parametrize("ids", [[-1], [3, -V]])
def test_ids_that_torch_counts_from_behind_are_left_to_sglang(ids):
    head = Head()
    stock, *_ = scored(head, given=[ids, None, None, None])
    with rlkernel.patch_sglang() as patch:
        found, *_ = scored(head, given=[ids, None, None, None])
    assert not patch.calls and "outside the vocabulary" in str(patch.fallbacks)
    assert found.token_ids_logprobs_val == stock.token_ids_logprobs_val


DETERMINISTIC = {
    "without the part 'sampler'": {},
    "rl_on_policy_target": {"rl_on_policy_target": "fsdp"},
    "speculative decoding": {"speculative_algorithm": "EAGLE"},
}


@pytest.mark.filterwarnings("ignore:rlkernel.patch_sglang")
@pytest.mark.parametrize("reason", DETERMINISTIC)
def test_where_steps_are_sglangs_deterministic_inference_has_its_prompts_too(reason):
    """It promises that a prompt has the bits that its tokens had when they were drawn."""
    parts = ["prompt_logprobs"] if "part" in reason else None
    head = Head()
    with steps.arguments(enable_deterministic_inference=True, **DETERMINISTIC[reason]):
        stock, *_ = scored(head, *CASES["both"])
        with rlkernel.patch_sglang(parts) as patch:
            found, *_ = scored(head, *CASES["both"])
    assert not patch.calls and reason in str(patch.fallbacks)
    assert torch.equal(found.token_logprobs, stock.token_logprobs)
    assert found.top_logprobs_val == stock.top_logprobs_val


def test_deterministic_inference_has_both_from_rlkernel():
    head = Head()
    with steps.arguments(enable_deterministic_inference=True), rlkernel.patch_sglang() as patch:
        found, _, rows, targets = scored(head)
        logits = head.logits(head.states, head, None, False)[rows]
        assert patch.calls[CALL] == 1 and not patch.fallbacks
        assert torch.equal(found.token_logprobs, rlkernel.logprob(logits, targets).logprobs)


def test_fewer_than_none_of_the_likeliest_are_none():
    """SGLang lets a request ask for -1 of them."""
    head = Head()
    with rlkernel.patch_sglang():
        found, *_ = scored(head, [-1, 2, -1, 0])
    assert shape(found.top_logprobs_idx) == [[0] * 5, [], [0] * 8, [0] * 3]


class Largest(TorchDispatchMode):
    """How many numbers torch has made beside the logits, in the largest tensor."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                self.numbers = max(self.numbers, x.numel())
        return out


def test_no_copy_of_the_logits_is_made(monkeypatch):
    head = Head()
    logits = head.states @ head.weight.T
    monkeypatch.setattr(head, "logits", lambda states, *_, **named: logits[: len(states)])

    def largest():
        with Largest() as made:
            scored(head)
        return made.numbers

    sampled = len(LENGTHS) * V  # the rows that are handed to the sampler
    stock = largest()
    with rlkernel.patch_sglang():
        assert largest() == sampled < sum(LENGTHS) * V <= stock
