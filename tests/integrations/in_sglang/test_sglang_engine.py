"""The real engine of SGLang on a CPU, whose scheduler is a process of its own, with a model made on the spot."""

import math

import pytest
import torch
import transformers

import rlkernel

V = 320
PROMPTS = [[1, 5, 9, 20, 33], [1, 7]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
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
        made.lm_head.weight.mul_(20)  # or all tokens are as likely
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return folder, made


def engine(folder, **options):
    import sglang

    return sglang.Engine(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        mem_fraction_static=0.05,
        max_total_tokens=2048,
        max_running_requests=8,
        random_seed=0,
        log_level="info",
        **options,
    )


def test_the_engine_serves_from_its_own_processes(model, capfd):
    """``sampling_backend="rlkernel"`` is a name that only a process which has loaded the plugin knows."""
    folder, made = model
    asked = [
        {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 6, "ignore_eos": True},
    ]
    with rlkernel.patch_sglang():
        llm = engine(folder, sampling_backend="rlkernel")
        try:
            outputs = llm.generate(
                input_ids=PROMPTS,
                sampling_params=asked,
                return_logprob=True,
                logprob_start_len=0,
                top_logprobs_num=[2, 3],
                token_ids_logprob=[[4, 5], [6]],
            )
        finally:
            llm.shutdown()
    said = capfd.readouterr()
    assert "rlkernel serves sglang.srt.layers.sampler.Sampler.forward" in said.out + said.err
    assert "leaves Sampler.forward to SGLang" not in said.out + said.err
    for row, (prompt, output, heat) in enumerate(zip(PROMPTS, outputs, (1.0, 0.7), strict=True)):
        ids, about = output["output_ids"], output["meta_info"]
        assert len(ids) == 6
        with torch.no_grad():
            logits = made(torch.tensor([prompt + ids])).logits[0].double()
        raw, tempered = torch.log_softmax(logits, -1), torch.log_softmax(logits / heat, -1)
        if row == 0:
            assert ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        own = about["output_token_logprobs"]
        assert [token for _, token, _ in own] == ids
        for i, (value, token, _) in enumerate(own, len(prompt) - 1):
            assert math.isclose(value, tempered[i, token], abs_tol=1e-4)
        for i, (value, token, _) in enumerate(about["input_token_logprobs"][1:]):
            assert token == prompt[i + 1] and math.isclose(value, raw[i, token], abs_tol=1e-4)
        for i, tops in enumerate(about["output_top_logprobs"], len(prompt) - 1):
            want = tempered[i].topk(2 + row)
            assert [token for _, token, _ in tops] == want.indices.tolist()
            torch.testing.assert_close(
                torch.tensor([x[0] for x in tops]).double(), want.values, rtol=0, atol=1e-4
            )
        for i, tops in enumerate(about["input_top_logprobs"][1:]):
            assert [token for _, token, _ in tops] == raw[i].topk(2 + row).indices.tolist()
        given = about["output_token_ids_logprobs"]
        assert all([token for _, token, _ in each] == [[4, 5], [6]][row] for each in given)
