"""SGLang's engine on a CPU, whose scheduler is a process of its own, with a model made on the spot."""

import math

import generated
import torch
import transformers

V, NEW = 320, 6
PROMPTS, HEATS = [[1, 5, 9, 20, 33], [1, 7]], (1.0, 0.7)
REQUEST = {
    "input_ids": PROMPTS,
    "sampling_params": [
        {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True},
        {"temperature": 0.7, "top_p": 0.99, "max_new_tokens": NEW, "ignore_eos": True},
    ],
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": [2, 3],
    "token_ids_logprob": [[4, 5], [6]],
}
NEAR = {"abs_tol": 1e-3, "rel_tol": 1e-5}


def model(folder):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    made = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(300)  # the probabilities of most tokens are 0 in fp32
    made.save_pretrained(folder)
    return made


def test_the_engine_serves_from_a_process_of_its_own(tmp_path):
    """What shows that it has loaded the plugin is an unlikely token's log-probability, where SGLang's own
    sampler has the least number of fp32; not the name of the backend, which on a CPU is "pytorch" for all."""
    made = model(tmp_path)
    outputs, text = generated.run(tmp_path, REQUEST)
    assert outputs, text[-5000:]
    assert "leaves Sampler.forward to SGLang" not in text
    unlikely = 0
    for row, output in enumerate(outputs):
        prompt, ids, about = PROMPTS[row], output["output_ids"], output["meta_info"]
        assert len(ids) == NEW
        with torch.no_grad():
            logits = made(torch.tensor([prompt + ids])).logits[0].double()
        raw, tempered = torch.log_softmax(logits, -1), torch.log_softmax(logits / HEATS[row], -1)
        if row == 0:
            assert ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert [token for _, token, _ in about["output_token_logprobs"]] == ids
        assert_near(about["output_token_logprobs"], tempered[len(prompt) - 1 :])
        assert [token for _, token, _ in about["input_token_logprobs"][1:]] == prompt[1:]
        assert_near(about["input_token_logprobs"][1:], raw)
        for i, tops in enumerate(about["output_top_logprobs"], len(prompt) - 1):
            assert [token for _, token, _ in tops] == tempered[i].topk(2 + row).indices.tolist()
            assert_near(tops, tempered[i].expand(len(tops), V))
        for i, tops in enumerate(about["input_top_logprobs"][1:]):
            assert [token for _, token, _ in tops] == raw[i].topk(2 + row).indices.tolist()
            assert_near(tops, raw[i].expand(len(tops), V))
        for i, given in enumerate(about["output_token_ids_logprobs"], len(prompt) - 1):
            assert [token for _, token, _ in given] == REQUEST["token_ids_logprob"][row]
            assert_near(given, tempered[i].expand(len(given), V))
            unlikely += row == 1 and any(value < -110 for value, _, _ in given)
    assert unlikely, "of some tokens fp32 has no probability"


def assert_near(said, truth):
    for (value, token, _), row in zip(said, truth, strict=False):
        assert math.isclose(value, row[token].item(), **NEAR)
