"""Every public function has an example in its docstring, and what stands there is what it prints."""

import base64
import doctest
import functools
import importlib
import inspect
import operator
import re
import tempfile
from pathlib import Path

import numpy
import pytest
import torch

import rlkernel
from rlkernel import testing

# Their examples need the framework; those of vLLM, SGLang, OpenRLHF, SkyRL, AReaL, axolotl, SWIFT and
# LLaMA-Factory run where these are (tests/integrations: in_vllm, in_sglang, in_axolotl, in_swift,
# in_llamafactory, test_{openrlhf,skyrl,areal}_patch.py).
ELSEWHERE = ("areal", "axolotl", "llamafactory", "openrlhf", "sglang", "skyrl", "swift", "vllm")
FRAMEWORK = {
    "packed_logprobs": "transformers",
    "patch_areal": "areal",
    "patch_axolotl": "axolotl",
    "patch_swift": "swift",
    "patch_deepspeed": "deepspeed",
    "patch_llamafactory": "llamafactory",
    "patch_megatron": "megatron",
    "patch_openrlhf": "openrlhf",
    "patch_sglang": "sglang",
    "patch_skyrl": "skyrl",
    "patch_trl": "trl",
    "patch_verl": "verl",
    "patch_vllm": "vllm",
    "register_hf": "transformers",
}
MODULES = ("consistency", "debug", "routing_replay", "testing", "workspace")
PUBLIC = [
    *rlkernel.__all__,
    "batch_invariant",
    *(f"{module}.{name}" for module in MODULES for name in getattr(rlkernel, module).__all__),
]
RESULTS = {"Difference", "Report", "Routes", "Trace", "WorstToken"}  # of functions of these modules


def public(name):
    return operator.attrgetter(name)(rlkernel)


def is_made_by_users(name):
    """Functions, and the classes that are arguments: results come from rlkernel.calls."""
    thing = public(name)
    is_result = name.rpartition(".")[2] in RESULTS or getattr(thing, "__module__", "").startswith(
        "rlkernel.calls."
    )
    return callable(thing) and not is_result


NAMES = sorted(filter(is_made_by_users, PUBLIC))
OF_MODELS = ("deterministic", "moe_layers", "record", "replay")  # of a mixture of experts


@functools.cache
def model():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 16, "moe_intermediate_size": 16, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**sizes, **heads, **experts)
    return transformers.Qwen3MoeForCausalLM(config).eval()


def failures(name, text):
    """What differs from what the examples of a docstring say, and how many there are."""
    names = {"torch": torch, "rlkernel": rlkernel, "np": numpy, "base64": base64, "tempfile": tempfile}
    names["testing"] = testing
    if name.startswith("routing_replay.") and name.endswith(OF_MODELS):
        names["model"] = model()
    if FRAMEWORK.get(name) == "transformers":
        names["transformers"] = importlib.import_module("transformers")
    test = doctest.DocTestParser().get_doctest(inspect.cleandoc(text), names, name, None, 0)
    told = []
    doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    return "".join(told), len(test.examples)


@pytest.mark.parametrize("name", [name for name in NAMES if FRAMEWORK.get(name) not in ELSEWHERE])
def test_the_example_prints_what_it_says(name):
    if name in FRAMEWORK:
        pytest.importorskip(FRAMEWORK[name])
    told, count = failures(name, public(name).__doc__)
    assert count, f"rlkernel.{name} has no example"
    assert not told, told


@pytest.mark.parametrize("name", [n for n in NAMES if "\nArgs:" in inspect.getdoc(public(n))])
def test_the_arguments_that_it_tells_of_are_there(name):
    """``k, v: ...`` tells of two, which is more than tools that read docstrings can check."""
    function = public(name)
    section = re.split(r"\n(?=\S)", inspect.getdoc(function).partition("\nArgs:\n")[2])[0]
    told = [word for line in re.findall(r"^    (\w[^:]*):", section, re.M) for word in line.split(", ")]
    assert told and set(filter(str.isidentifier, told)) <= {
        *inspect.signature(function).parameters,
        "options",
    }


def test_an_example_that_is_wrong_is_seen():
    told, count = failures("gae", rlkernel.gae.__doc__.replace("0.2500", "0.2501"))
    assert count and "0.2501" in told


def test_the_landing_page_runs():
    page = (Path(__file__).parents[1] / "docs/index.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.S)[1]
    names = {}
    exec(compile(code, "docs/index.md", "exec"), names)
    assert names["hidden"].grad.isfinite().all() and names["advantages"].shape == (names["G"],)
