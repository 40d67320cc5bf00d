"""Worker processes and the OpenAI server: ours runs where the model runs, and says so."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import engines
import pytest
from server import Server

import rlkernel


@pytest.fixture(scope="module")
def bodies():
    """40 requests over HTTP, the first 8 of them greedy."""
    made = []
    for i, prompt in enumerate(engines.prompts(40, longest=60)):
        body = {"prompt": prompt["prompt_token_ids"], "max_tokens": 8, "logprobs": 3, "ignore_eos": True}
        body |= {"temperature": 0.0} if i < 8 else {"temperature": 0.9, "top_p": 0.9, "seed": i}
        made.append(body | ({"presence_penalty": 0.5} if i % 3 == 0 else {}))
    return made


def answers(server, bodies):
    with ThreadPoolExecutor(16) as clients:
        return [one["choices"][0] for one in clients.map(lambda body: server.complete(**body), bodies)]


@pytest.fixture(scope="module")
def served(model, bodies, tmp_path_factory):
    """What a patched server answers, alone, together and with the support, and what its worker counted."""
    log, ops = tmp_path_factory.mktemp("log") / "patched", "sampler,support,prompt_logprobs"
    with Server(model, log, "--enable-scale-out", VLLM_RLKERNEL=ops) as server:
        alone = answers(server, bodies[8:12])
        together = answers(server, bodies)
        scored = server.complete(prompt=bodies[0]["prompt"], max_tokens=1, prompt_logprobs=2)["choices"][0]
        params = {"n": 3, "seed": 8, "top_p": 0.8, "max_tokens": 8, "extra_args": {"rlkernel_support": 99}}
        body = {"token_ids": bodies[0]["prompt"], "sampling_params": params}
        kept = server.post("/inference/v1/generate", body)["choices"]
        return alone, together, scored, kept, server.post("/collective_rpc", {"method": "rlkernel_stats"})


def test_ours_runs_in_the_worker_of_the_server(served):
    alone, together, scored, _, counted = served
    (worker,) = counted["results"]
    worker = worker if isinstance(worker, dict) else json.loads(worker)
    assert worker["calls"]["Sampler.forward"] > 8
    assert worker["calls"]["GPUModelRunner._get_prompt_logprobs_dict"] > 0
    assert worker["fallbacks"] == worker["refused"] == {}
    # by its seed, not by who else is asking
    assert [one["logprobs"]["tokens"] for one in alone] == [
        one["logprobs"]["tokens"] for one in together[8:12]
    ]
    assert len(scored["prompt_logprobs"]) > 3 and scored["prompt_logprobs"][0] is None


def test_the_server_answers_what_an_engine_without_us_answers(served, llm, bodies):
    """Greedy requests; over HTTP there and in this process without a patch here."""
    from vllm import SamplingParams

    _, together, *_ = served
    for body, mine in zip(bodies[:8], together[:8], strict=True):
        options = {name: value for name, value in body.items() if name != "prompt"}
        (want,) = llm.generate(
            [{"prompt_token_ids": body["prompt"]}], SamplingParams(**options), use_tqdm=False
        )
        sample = want.outputs[0]
        assert mine["logprobs"]["tokens"] == [f"token_id:{token}" for token in sample.token_ids]
        steps = zip(
            mine["logprobs"]["top_logprobs"], mine["logprobs"]["token_logprobs"], sample.logprobs, strict=True
        )
        for (top, own, theirs), token in zip(steps, sample.token_ids, strict=True):
            assert own == pytest.approx(theirs[token].logprob, abs=5e-4)
            assert set(top) == {f"token_id:{id}" for id in theirs}
            for id, entry in theirs.items():
                assert top[f"token_id:{id}"] == pytest.approx(entry.logprob, abs=5e-4)


def test_the_support_comes_over_http(served):
    from rlkernel.integrations.vllm import support_of

    *_, kept, _ = served
    assert len(kept) == 3
    support = support_of([choice["sampling_mask"] for choice in kept])
    begin = support.offsets.tolist()
    for row, choice in enumerate(kept):
        for place, token in enumerate(choice["token_ids"]):
            assert support.known[row, place]
            at = row * support.known.shape[1] + place
            assert token in support.ids[begin[at] : begin[at + 1]]


def test_ours_runs_in_a_worker_process_that_was_spawned(model):
    from vllm import SamplingParams

    with rlkernel.patch_vllm(strict=True, return_support=100) as patch:
        llm = engines.worker_processes(model)
        try:
            prompts, kinds = engines.prompts(20), engines.mixed(20, seeded=True)
            out = llm.generate(prompts, kinds, use_tqdm=False)
            llm.generate(prompts[:1], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
            (worker,) = patch.stats(llm)
        finally:
            engines.shut_down(llm)
        (here,) = patch.stats()
    assert worker["pid"] != here["pid"] == os.getpid()
    assert here["calls"] == {} and worker["fallbacks"] == {} and worker["refused"] == {}
    replaced = {"Sampler.forward", "GPUModelRunner.sample_tokens", "GPUModelRunner._get_prompt_logprobs_dict"}
    assert worker["calls"].keys() == replaced
    assert "VLLM_RLKERNEL" not in os.environ
    # the same in this process: by its seed, not by where it runs
    with rlkernel.patch_vllm(return_support=100):
        same = engines.in_process(model).generate(prompts, kinds, use_tqdm=False)
    assert engines.tokens(same) == engines.tokens(out)
    kept = [one.outputs[0].sampling_mask.token_ids for one in out]
    assert kept == [one.outputs[0].sampling_mask.token_ids for one in same]
    assert {min(len(ids), 2) for sample in kept for ids in sample} == {0, 1, 2}  # all, one, some
    assert any(ids == [-1] for sample in kept for ids in sample)
