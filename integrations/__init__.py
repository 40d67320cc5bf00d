"""Adapters that put rlkernel under other frameworks, one package per framework."""

if __name__ != "rlkernel.integrations":  # a second copy would not see what the first has patched
    raise ImportError("import rlkernel.integrations, not integrations")
