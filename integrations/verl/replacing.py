"""What verl's registries hold must be verl's."""

from __future__ import annotations

from typing import Any

from rlkernel.integrations._patch import PatchError


def require_same(table: dict[str, Any], key: str, function: Any) -> None:
    """A registry's entry must be the function that verl registered."""
    if table.get(key) is not function:
        raise PatchError(f"the registry's {key!r} must be verl's own {function.__name__}")
