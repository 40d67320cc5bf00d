"""Recipes of examples/, whose runs are made in this process where a user's have processes of their own."""

import importlib
import sys
import types

import before_after
import pytest


def load(name):
    return importlib.import_module(name)


def run(name, *arguments, start=None):
    """What ``python examples/<name>.py <arguments>`` finds, as ``before_after.compare`` returns it.

    ``start(command)`` stands in for each process that it would start; by default the recipe's ``main`` runs
    here.
    """
    recipe, found = load(name), []
    compare = before_after.compare

    def started(command, env, check):
        assert check and env["OMP_NUM_THREADS"]
        if start is None:
            worker(recipe, command[command.index(str(recipe.__file__)) :])
        else:
            start(command)

    def compared(*args, **options):
        result = compare(*args, **options)
        if result:
            found.append(result)
        return result

    with pytest.MonkeyPatch.context() as here:
        here.setattr(before_after, "subprocess", types.SimpleNamespace(run=started))
        here.setattr(before_after, "compare", compared)
        here.setenv("DS_ACCELERATOR", "cpu")
        here.setenv("HF_HUB_OFFLINE", "1")
        worker(recipe, [recipe.__file__, *arguments])
    return found[0]


def worker(recipe, argv):
    before = sys.argv
    sys.argv = list(argv)
    try:
        recipe.main()
    finally:
        sys.argv = before


def rise(rewards, share=4):
    """How much more the last ones of a run are than the first."""
    part = max(1, len(rewards) // share)
    return sum(rewards[-part:]) / part - sum(rewards[:part]) / part
