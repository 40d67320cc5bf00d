"""Patches of several frameworks, put on and taken off in any order, and what of the frameworks they touch."""

import sys

from hypothesis import strategies

FRAMEWORKS = ("trl", "deepspeed", "vllm", "verl")


def steps(which, most=10):
    """Patches to put on (True) and to take off, in any order."""
    return strategies.lists(strategies.tuples(which, strategies.booleans()), max_size=most)


def state(roots=FRAMEWORKS):
    """Every attribute of the frameworks' modules that are loaded, and of their classes."""
    found = {}
    for path, module in sorted(sys.modules.items()):
        if path.partition(".")[0] in roots and hasattr(module, "__dict__"):
            for name, value in list(vars(module).items()):
                found[path, name] = value
                if isinstance(value, type) and value.__module__ == path:
                    found |= {(path, name, x): y for x, y in vars(value).items()}
    return found


def same(before, after):
    """Whether two states are of the very same objects."""
    return before.keys() == after.keys() and all(after[k] is v for k, v in before.items())
