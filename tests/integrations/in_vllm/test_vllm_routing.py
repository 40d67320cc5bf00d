"""vLLM's own capture of routed experts in an engine on a CPU, replayed in transformers.

The option ``enable_return_routed_experts`` needs Model Runner V2, and with it Triton, which vLLM has not on a
CPU. So the capturer that it starts is bound to the engine's routers here, and its rows are joined as vLLM's
output processor joins them.
"""

import engines
import numpy
import pytest
import tiny
import torch
import transformers
from routing_capture import generate

from rlkernel import routing_replay

VOCAB, EXPERTS, NEW = 512, 8, 8


@pytest.fixture(scope="module")
def model():
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=256,
        num_experts=EXPERTS, num_experts_per_tok=2, mlp_only_layers=[1], norm_topk_prob=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2 if parameter.ndim > 1 else 0.5)
    return model


@pytest.fixture(scope="module")
def llm(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    model.save_pretrained(path)
    tiny.make_tokenizer().save_pretrained(path)
    llm = engines.in_process(str(path))
    yield llm
    engines.shut_down(llm)


def test_a_rollouts_experts_are_replayed_in_the_trainer(model, llm):
    layers = routing_replay.moe_layers(model)
    assert layers == [0, 2, 3]
    for prompt in engines.prompts(2, shortest=20, longest=40):
        output, routed_experts = generate(llm, prompt, NEW)
        ids = [*prompt["prompt_token_ids"], *output.outputs[0].token_ids]
        assert routed_experts.dtype == numpy.uint8 and routed_experts.shape == (len(ids) - 1, 4, 2)
        assert not routed_experts[:, 1].any()  # the layer without a router
        routes = routing_replay.from_vllm(routed_experts, EXPERTS, layers=layers, tokens=len(ids))
        batch = torch.tensor([ids])
        with torch.no_grad(), routing_replay.record(model) as own:
            model(batch)
        assert float(own.routes.overlap(routes).min()) > 0.97  # fp32 on both sides, in another order of sums
        with torch.no_grad(), routing_replay.replay(model, routes) as replay:
            logprobs = model(batch).logits[0].log_softmax(-1)
        assert float(replay.overlap.min()) > 0.97
        drawn = range(len(ids) - NEW, len(ids))
        theirs = [step[ids[i]].logprob for i, step in zip(drawn, output.outputs[0].logprobs, strict=True)]
        ours = [float(logprobs[i - 1, ids[i]]) for i in drawn]
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=1e-3)
        wrong = routing_replay.from_vllm(routed_experts, EXPERTS, layers=[2, 0, 3], tokens=len(ids))
        with pytest.raises(ValueError, match="min_overlap"), routing_replay.replay(model, wrong):
            model(batch)


def test_the_option_needs_what_a_cpu_lacks(llm, tmp_path):
    """When it no longer does, the test above can ask for the field itself."""
    from vllm.engine.arg_utils import EngineArgs

    options = {"model": llm.llm_engine.vllm_config.model_config.model, "enable_return_routed_experts": True}
    with pytest.raises(ValueError, match="requires Model Runner V2"):
        EngineArgs(**options | engines.SIZES).create_engine_config()
