"""Models of transformers cut over 2 and 4 ranks, over gloo: the bits of the whole model on one."""

import contextlib

import pytest
import ranks
import torch
from bitwise import assert_equal

import rlkernel

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = ranks.pytestmark

SIZES = {
    "vocab_size": 152,
    "hidden_size": 48,
    "intermediate_size": 104,  # 13 in a segment
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.3,
}
LEVEL = "tensor_parallel"
CASES = {
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, torch.float32),
    "qwen2": ("Qwen2", {"pad_token_id": 3}, torch.float32),  # with biases
    "llama, bf16": ("Llama", {}, torch.bfloat16),
}
# what others do: a plain product of a part, and a library's sum; each of them with the rest as it must be
MUTANTS = ("plain products", "all_reduce")


def made(case):
    family, options, dtype = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for p in model.parameters():  # also of norms, and biases
        p.data.add_(torch.randn(p.shape) * 0.1)
    return model.to(dtype).eval()


def scored(model):
    """Log-probabilities of a padded batch, and every gradient."""
    g = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(SIZES["vocab_size"], (3, 17), generator=g), torch.ones(3, 17, dtype=torch.int64)
    mask[1, :6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    logprobs = rlkernel.logprob(logits[:, :-1], ids[:, 1:]).logprobs
    (logprobs * mask[:, 1:] * torch.linspace(-1, 1, 16)).sum().backward()
    grads = {
        name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()
    }
    return logprobs.detach()[mask[:, 1:] == 1], grads


def _on_ranks(rank, kind, count):
    import torch.distributed as dist

    from rlkernel import tensor_parallel
    from rlkernel.drivers import rank_tree
    from rlkernel.tensor_parallel import functional

    case, mutant = kind.split("/")
    model = tensor_parallel.parallelize(made(case), dist.init_device_mesh("cpu", (count,)))
    attention = model.model.layers[0].self_attn
    assert attention.o_proj.weight.to_local().shape[1] * count == attention.o_proj.in_features
    with contextlib.ExitStack() as stack:
        if mutant == "all_reduce":

            def library(node, dtype, group):
                node = node.contiguous()
                dist.all_reduce(node, group=group)
                return node.to(dtype)

            mutated = pytest.MonkeyPatch.context()
            stack.enter_context(mutated).setattr(rank_tree, "summed", library)
        elif mutant:
            mutated = pytest.MonkeyPatch.context()
            stack.enter_context(mutated).setattr(functional, "SEGMENTS", count)
        stack.enter_context(rlkernel.batch_invariant(LEVEL, strict=not mutant))
        return scored(model)


@pytest.mark.parametrize("count", [2, 4], ids="{} ranks".format)
def test_a_model_on_ranks_has_the_bits_of_the_whole_one(count, tmp_path):
    from rlkernel import tensor_parallel

    kinds = [f"{case}/" for case in (CASES if count == 2 else ["qwen3"])]
    kinds += [f"qwen3/{mutant}" for mutant in MUTANTS if (mutant == "all_reduce") == (count == 4)]
    found = ranks.run(_on_ranks, kinds, tmp_path, count, count=count)
    for kind in kinds:
        case, mutant = kind.split("/")
        with rlkernel.batch_invariant(LEVEL):
            logprobs, grads = scored(tensor_parallel.parallelize(made(case)))
        same = []
        for rank, (got, got_grads) in enumerate(found[kind]):
            assert grads.keys() == got_grads.keys()
            pairs = [(got, logprobs), *((got_grads[name], grads[name]) for name in grads)]
            same.append([torch.equal(a, b) for a, b in pairs])
            if not mutant:
                assert_equal(f"{kind} on rank {rank} of {count}: logprobs", got, logprobs)
                for name, want in grads.items():
                    assert_equal(f"{kind} on rank {rank} of {count}: {name}", got_grads[name], want)
        assert all(x == same[0] for x in same)
        assert not (mutant and same[0][0]), mutant
        if case != "qwen3":  # without norms of heads the model as it is has these bits
            with rlkernel.batch_invariant(LEVEL):
                plain, plain_grads = scored(made(case))
            assert_equal("as it is", plain, logprobs)
            for name, want in grads.items():
                assert_equal(f"as it is: {name}", plain_grads[name], want)
