"""What stands beside the recipes: their page, and the Dockerfile, as far as no Docker is needed."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import dockerfile
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
TEXT = (EXAMPLES / "Dockerfile").read_text()
PATTERNS = (EXAMPLES / "Dockerfile.dockerignore").read_text().split()
HELPERS = {"apart.py", "arithmetic.py", "before_after.py"}  # which recipes import


def test_every_example_is_on_the_page_and_the_ratio_comes_first():
    page = (ROOT / "docs/examples.md").read_text()
    named = re.findall(r"examples/([\w.]+)", page)
    assert named[0] == "rollout_ratio.py"
    assert re.findall(r"examples/(\w+\.\w+)", (ROOT / "README.md").read_text())[0] == "rollout_ratio.py"
    here = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert here - set(named) == HELPERS | {"Dockerfile.dockerignore", "README.md"}
    assert set(named) <= here


@pytest.fixture
def faults(tmp_path):
    files = dockerfile.tracked(ROOT)
    if files is None:
        pytest.skip("not a git checkout")

    def find(text=TEXT, patterns=PATTERNS, **build_args):
        return dockerfile.faults(text, ROOT, files, patterns, tmp_path, **build_args)

    return find


def test_the_image(faults):
    found, ran = faults()
    assert not found
    assert [line.split()[0] for line in ran].count("pip") == 3
    assert "pip wheel --no-deps --wheel-dir /wheels ." in ran
    (frameworks,) = (line for line in ran if "-c /wheels/constraints.txt" in line)
    pinned = (ROOT / "requirements/constraints.txt").read_text()
    for name in frameworks.split("constraints.txt ")[1].split(" /wheels")[0].split():
        assert f"\n{name}==" in pinned
    assert (ROOT / "requirements/constraints.txt").exists() and "torch>=2.11" in str(ran)


def test_the_image_with_cuda(faults):
    found, ran = faults(BACKENDS="cpu,cuda")
    assert not found
    (line,) = (line for line in ran if "nvidia-cuda-nvcc" in line)
    assert {word.split("==")[1] for word in line.split()[2:]} == {"13.0.*"}, "pieces of one version"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "COPY requirements/constraints.txt",
            "COPY constraints.txt",
            "COPY constraints.txt, which is not in",
        ),
        ("COPY --from=build", "COPY --from=builder", "COPY from builder, which is no stage"),
        ("RUN useradd", "RUN adduser", "RUN adduser --create-home rl: "),
        ("${FRAMEWORKS}", "${FRAMEWORK}", "FRAMEWORK"),
        ("rlkernel.info\n", "rlkernel.information\n", "no module rlkernel.information"),
        ('"rollout_ratio.py"', '"ratio.py"', "CMD ratio.py, which is not in examples"),
    ],
)
def test_a_fault_is_seen(faults, before, after, said):
    assert TEXT.count(before) >= 1
    found, _ = faults(TEXT.replace(before, after))
    assert any(said in fault for fault in found), found


def test_a_file_that_the_build_needs_must_be_sent(faults):
    found, _ = faults(patterns=[*PATTERNS, "csrc"])
    assert any("leaves out csrc/bindings.cpp" in fault for fault in found)
    found, _ = faults(BACKEND="cpu")
    assert found == ["no ARG BACKEND"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--largest", "10"], "--largest must be from 0 to 9, got 10"),
        (["--batch", "12"], "--batch must be a multiple of 8, got 12"),
        (["--short", "--largest", "2"], "--batch must be at most 8 x the 9 sums up to 2, got 128"),
        (
            ["--json", "nowhere/found.json"],
            "--json must name a file in a folder that is there, got nowhere/found.json",
        ),
        ([], "grpo_lora.py needs packages that are not here: pip install trl peft"),
    ],
)
def test_what_cannot_run_is_said_at_once(words, said):
    """Not after the warm-up, by a traceback of a process that was started."""
    command = [sys.executable, "-E", "-S", EXAMPLES / "grpo_lora.py", *words]  # without any package
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode and run.stderr.splitlines()[-1].endswith(said), run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ("areal_step.py", "areal transformers"),
        ("deepspeed_step.py", "transformers deepspeed"),
        ("grpo_arithmetic.py", "trl"),
        ("grpo_prefix.py", "trl"),
        ("grpo_sharded.py zero3", "trl deepspeed"),
        ("grpo_vllm.py", "trl vllm"),
        ("llamafactory_step.py", "llamafactory transformers trl"),
        ("megatron_step.py", "megatron.core"),
        ("openrlhf_step.py", "openrlhf deepspeed peft pylatexenc"),
        ("packed_grpo.py", "transformers"),
        ("routing_replay.py", "transformers"),
        ("sglang_sampler.py", "sglang"),
        ("skyrl_step.py", "skyrl"),
        ("swift_step.py", "ms-swift trl"),
        ("torchtitan_step.py", "torchtitan"),
        ("verl_step.py", "verl"),
        ("vllm_attention.py", "vllm"),
        ("vllm_rollout.py", "vllm"),
        ("vllm_support.py", "vllm"),
        ("zero_kl.py", "transformers"),
        ("zero_kl.py --vllm", "transformers vllm"),
    ],
)
def test_a_framework_that_is_missing_is_named(words, missing, monkeypatch, tmp_path):
    """In one line, before anything is computed, by every recipe that needs more than torch."""
    frameworks = (
        "areal", "datasets", "deepspeed", "llamafactory", "megatron", "openrlhf", "peft", "sglang", "skyrl",
        "swift", "torchtitan",
        "transformers", "trl", "verl", "vllm",
    )  # fmt: skip
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # which some set for what they start
    name, *arguments = words.split()
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *arguments])
    for module in frameworks:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert ended.value.code == f"{name} needs packages that are not here: pip install {missing}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rollout_ratio.py --batch 0", "--batch must be 1 or more, got 0"),
        ("packed_grpo.py --steps 0", "--steps must be 1 or more, got 0"),
        ("packed_grpo.py --json nowhere/found.json", "in a folder that is there, got nowhere/found.json"),
        ("zero_kl.py --steps 0", "--steps must be 1 or more, got 0"),
        ("zero_kl.py --short --prompts 3 0", "--prompts must be 1 or more, got 0"),
        ("megatron_step.py --steps 0", "--steps must be 1 or more, got 0"),
        ("sglang_sampler.py --requests 0", "--requests must be 1 or more, got 0"),
        ("llamafactory_step.py --steps 0", "--steps must be 1 or more, got 0"),
        ("areal_step.py --steps 0", "--steps must be 1 or more, got 0"),
        ("skyrl_step.py --steps 0", "--steps must be 1 or more, got 0"),
        ("verl_step.py --steps 0", "--steps must be 1 or more, got 0"),
        ("swift_step.py --steps 0", "--steps must be 1 or more, got 0"),
        ("torchtitan_step.py --steps 0", "--steps must be 1 or more, got 0"),
        ("openrlhf_step.py --steps 0", "--steps must be 1 or more, got 0"),
        ("ppo_update.py --updates 0", "--updates must be 1 or more, got 0"),
        ("routing_replay.py --top-k 0", "--top-k must be 1 or more, got 0"),
        ("vllm_support.py --prompt-tokens 0", "--prompt-tokens must be 1 or more, got 0"),
        ("vllm_rollout.py --runs 0", "--runs must be 1 or more, got 0"),
        ("vllm_rollout.py --json nowhere/found.json", "in a folder that is there, got nowhere/found.json"),
        ("vllm_attention.py --requests 16 0", "--requests must be 1 or more, got 0"),
        ("vllm_attention.py --apart -1", "--apart must be 0 or more, got -1"),
        ("grpo_prefix.py --group 0", "--group must be 1 or more, got 0"),
        ("grpo_arithmetic.py --vocabulary 0", "--vocabulary must be 1 or more, got 0"),
        ("grpo_arithmetic.py --seed -1", "--seed must be 0 or more, got -1"),
    ],
)
def test_a_count_of_none_is_refused(words, said, monkeypatch, capsys):
    name, *arguments = words.split()
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *arguments])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert ended.value.code == 2 and capsys.readouterr().err.splitlines()[-1].endswith(said)
