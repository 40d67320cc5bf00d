"""sampling under torch.compile: one node of the graph, the same bits, a fake that has the right shapes."""

import pytest
import torch
from bitwise import assert_equal

import rlkernel
from rlkernel.ops.sampling import drawing as op
from rlkernel.reference.sampling import make_inputs

OPTIONS = {
    "plain": {},
    "numbers": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "top_n_sigma": 2.0},
    "rows": {"temperature": torch.tensor([0.0, 0.7, 1.0]), "top_k": torch.tensor([3, 0, 60]),
             "top_p": torch.tensor([0.5, 1.0, 0.9])},
    "everything": {"top_p": 0.9, "return_entropy": True, "return_rank": True, "return_support": 70,
                   "top_logprobs": 3, "token_bitmask": torch.full((3, 3), 0x0F0F0F0F, dtype=torch.int32),
                   "logit_bias": {4: 2.0}, "method": "gumbel", "filter_order": "joint"},
    "thresholds": {"epsilon_cutoff": 0.01, "eta_cutoff": torch.tensor([0.0, 0.02, 0.1]), "top_a": 0.1,
                   "return_support": 70, "top_logprobs": 2},
    "band": {"typical_p": torch.tensor([0.3, 0.9, 1.0]), "xtc_probability": 0.5, "top_k": 30,
             "return_support": 70, "top_logprobs": 2, "ranking": "processed"},
    "one logprob": {"return_logprobs": ("processed",), "top_k": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("name", OPTIONS)
def test_one_graph_gives_the_same_bits(name):
    inputs = make_inputs(3, 70)

    def step(x):
        return rlkernel.sample(**(x | {"logits": x["logits"] * 1}), **OPTIONS[name])

    def score(x):
        key = {name: x[name] for name in ("seeds", "positions")}
        return rlkernel.score_tokens(x["logits"] * 1, x["positions"] % 70, **key, **{
            k: v for k, v in OPTIONS[name].items() if k != "method"
        })  # fmt: skip

    for function in (step, score):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for field, got, want in zip(
            compiled(inputs)._fields, compiled(inputs), function(inputs), strict=True
        ):
            assert (got is None) == (want is None), field
            if want is not None:
                assert_equal(field, got, want)


@pytest.mark.parametrize("shape", [(70,), (3, 70)])
def test_sizes_of_a_bias_and_of_ids_may_be_symbols(shape):
    inputs, ids = make_inputs(3, 70), torch.tensor([[4, 9], [69, -1], [0, 1]])
    given = {"logit_bias": torch.linspace(-2, 2, 210).view(3, 70)[(0, slice(None))[len(shape) - 1]]}
    given["logprob_token_ids"] = ids if len(shape) > 1 else ids[0]

    def step(x, given):
        out = rlkernel.sample(**x, **given)
        return out.raw_logprobs, out.id_logprobs

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for name, got, want in zip(("raw", "ids"), compiled(inputs, given), step(inputs, given), strict=True):
        assert_equal(name, got, want)


@pytest.mark.parametrize("name", OPTIONS)
def test_opcheck(name):
    kept = []

    def note(*arguments):
        kept.append(arguments)
        return original(*arguments)

    original = op.op.node
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op.op, "node", note)
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        rlkernel.sample(**make_inputs(3, 70), **OPTIONS[name])
    for arguments in kept:
        torch.library.opcheck(original, arguments, test_utils=("test_schema", "test_faketensor"))
