"""TRL's client and its GRPOTrainer over a server of vLLM on loopback, with rlkernel in the server's worker.

TRL sends weights over NCCL, which needs GPUs and is refused here; they go over the disk instead, by the
server's own way to load them.
"""

import http.server
import json
import threading
import types

import pytest
import requests
import runs
import torch
from server import Server
from transformers import AutoModelForCausalLM
from trl.generation.vllm_client import VLLMClient

import rlkernel
from rlkernel.integrations.trl import rollouts

OPTIONS = (
    "--logprobs-mode",
    "processed_logprobs",
    "--max-logprobs",
    "-1",
)  # what TRL's documentation asks for


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "server"
    asked = {"VLLM_RLKERNEL": "sampler,prompt_logprobs,attention", "VLLM_RLKERNEL_BATCH_INVARIANT": "1"}
    with Server(model, log, *OPTIONS, **asked) as server:
        yield server


@pytest.fixture(scope="module")
def url(server):
    return f"http://127.0.0.1:{server.port}"


def counted(server):
    (worker,) = server.post("/collective_rpc", {"method": "rlkernel_stats"})["results"]
    worker = worker if isinstance(worker, dict) else json.loads(worker)
    assert worker["fallbacks"] == worker["refused"] == {}
    return worker["calls"].get("Sampler.forward", 0)


def test_what_the_client_gets_is_what_the_model_says(server, url, model):
    """Log-probabilities of sampled tokens beside those of the same model in transformers."""
    client = VLLMClient(base_url=url)
    prompts, temperature = [[5, 6, 7, 8], [9, 10, 11]], 0.8
    out = client.generate(prompts, n=3, temperature=temperature, max_tokens=12, logprobs=0)
    assert counted(server) >= 12
    policy = AutoModelForCausalLM.from_pretrained(model)
    assert len(out["completion_ids"]) == 6
    for i, (ids, logprobs) in enumerate(zip(out["completion_ids"], out["logprobs"], strict=True)):
        prompt = prompts[i // 3]
        with torch.no_grad():
            logits = policy(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / temperature
        want = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])
        torch.testing.assert_close(torch.tensor(logprobs), want, rtol=0, atol=5e-5)


def test_weights_over_nccl_are_trls_to_refuse_on_a_cpu(url):
    with pytest.raises(
        (NotImplementedError, RuntimeError), match="needs a CUDA device|no weight-transfer engine"
    ):
        VLLMClient(base_url=url).init_communicator(device="cpu")


def test_grpo_over_the_server(server, url, model, tmp_path, monkeypatch):
    """Three steps: rollouts by the server, each of the weights that the step before has made."""

    def over_the_disk(self, metadata, named):
        policy.load_state_dict(dict(named), strict=False)
        policy.save_pretrained(tmp_path / "weights")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "weights")}}
        server.post("/collective_rpc", body)
        sent.append(metadata)

    policy, sent = AutoModelForCausalLM.from_pretrained(model), []
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", over_the_disk)
    before = counted(server)
    with rlkernel.patch_trl(vllm="require", batch_invariant=True) as patch:
        trainer = runs.make_trainer(
            model, tmp_path, vllm_mode="server", vllm_server_base_url=url, max_steps=3, learning_rate=1e-4
        )
        trainer.train()
        with pytest.raises(ValueError, match="the server must have dtype torch.bfloat16, got torch.float32"):
            options = {"model_init_kwargs": {"dtype": torch.bfloat16}, "vllm_server_base_url": url}
            runs.make_trainer(model, tmp_path, vllm_mode="server", **options)
        assert patch.vllm is None and not patch.fallbacks  # in the server, and not here
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    differences = [entry[f"{runs.DIFFERENCE}/max"] for entry in log]
    print(differences, [entry["reward"] for entry in log])
    assert len(log) == len(sent) == 3 and differences == [0.0] * 3  # two programs, one number
    assert counted(server) >= before + 3 * 16
    first = policy.state_dict()["lm_head.weight"]  # what was sent last: that of two steps, of three
    assert not torch.equal(first, AutoModelForCausalLM.from_pretrained(model).lm_head.weight)


def test_a_server_without_rlkernel_is_told(monkeypatch):
    """By what it says of itself; one with rlkernel has just said so."""
    answers = {"vllm_env": {}}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers).encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{other.server_port}"
        client = types.SimpleNamespace(base_url=address, session=requests.Session())
        trainer = types.SimpleNamespace(
            args=types.SimpleNamespace(use_vllm=True, vllm_mode="server"),
            vllm_generation=types.SimpleNamespace(vllm_client=client),
        )
        assert not rollouts.runs_rlkernel(client)
        with (
            rlkernel.patch_trl() as patch,
            pytest.warns(UserWarning, match="start it with VLLM_RLKERNEL=samp"),
        ):
            patch.rollouts.prepare(trainer)
            assert list(patch.fallbacks) == [f"vLLM: {rollouts.WITHOUT}, {client.base_url}"]
        with (
            rlkernel.patch_trl(vllm="require") as patch,
            pytest.raises(RuntimeError, match="must run rlkernel"),
        ):
            patch.rollouts.prepare(trainer)
        answers["vllm_env"]["VLLM_RLKERNEL"] = "sampler"
        assert rollouts.runs_rlkernel(client)
        other.shutdown()
