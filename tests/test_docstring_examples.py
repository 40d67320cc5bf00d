"""Every public function has an example in its docstring, and what stands there is what it prints."""

import doctest
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

import rlkernel

# Their examples need the framework; vLLM's runs in its own environment (tests/integrations/in_vllm).
FRAMEWORK = {
    "packed_logprobs": "transformers",
    "patch_deepspeed": "deepspeed",
    "patch_trl": "trl",
    "patch_vllm": "vllm",
    "register_hf": "transformers",
}
PUBLIC = [*rlkernel.__all__, "batch_invariant"]


def is_made_by_users(thing):
    """Functions, and the classes that are arguments: results come from rlkernel.calls."""
    return callable(thing) and not thing.__module__.startswith("rlkernel.calls.")


NAMES = sorted(name for name in PUBLIC if is_made_by_users(getattr(rlkernel, name)))


def failures(name, text):
    """What differs from what the examples of a docstring say, and how many there are."""
    names = {"torch": torch, "rlkernel": rlkernel}
    if FRAMEWORK.get(name) == "transformers":
        names["transformers"] = importlib.import_module("transformers")
    test = doctest.DocTestParser().get_doctest(inspect.cleandoc(text), names, name, None, 0)
    told = []
    doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    return "".join(told), len(test.examples)


@pytest.mark.parametrize("name", [name for name in NAMES if FRAMEWORK.get(name) != "vllm"])
def test_the_example_prints_what_it_says(name):
    if name in FRAMEWORK:
        pytest.importorskip(FRAMEWORK[name])
    told, count = failures(name, getattr(rlkernel, name).__doc__)
    assert count, f"rlkernel.{name} has no example"
    assert not told, told


@pytest.mark.parametrize("name", [n for n in NAMES if "\nArgs:" in inspect.getdoc(getattr(rlkernel, n))])
def test_the_arguments_that_it_tells_of_are_there(name):
    """``k, v: ...`` tells of two, which is more than tools that read docstrings can check."""
    function = getattr(rlkernel, name)
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
