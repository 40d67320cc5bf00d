"""Which frameworks are here, and whether rlkernel goes under them: ``python -m rlkernel.doctor [NAME ...]``.

The status is 0 where all of them apply and no environment variable is one that rlkernel refuses; of those
that are not named, the ones that are not installed do not count.

Each adapter's patch is put on and taken off again, which checks all that it stands on: the version, and every
function that it replaces.  A patch that is on already stays on, and its counts are shown: which calls ran on
rlkernel, and which were left to the framework and why.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pkgutil
import sys
import warnings
from typing import Any, NamedTuple

from rlkernel import info
from rlkernel.integrations import _contract, _patch

# where an adapter is not named like its framework
FRAMEWORKS = {"hf": "transformers", "megatron": "megatron-core", "swift": "ms-swift"}


class Finding(NamedTuple):
    """Of one adapter.  ``reason`` is None where it applies; ``why_not`` tells which parts do not, ``warned``
    what the patch itself warns of, and ``notes`` what else it does."""

    adapter: str
    framework: str
    installed: str | None
    supported: str
    reason: str | None
    replaced: dict[str, str]
    why_not: dict[str, str]
    calls: dict[str, int]
    fallbacks: dict[str, int]
    warned: list[str]
    notes: dict[str, str]


def adapters() -> list[str]:
    """The names of the adapters: the packages of ``rlkernel.integrations``."""
    from rlkernel import integrations

    return sorted(m.name for m in pkgutil.iter_modules(integrations.__path__) if m.ispkg)


def examine(name: str) -> Finding:
    """Try one adapter.  Imports its framework where that is installed, and prints nothing."""
    module = importlib.import_module(f"rlkernel.integrations.{name}")
    framework = FRAMEWORKS.get(name, name)
    supported = getattr(module, "SUPPORTED", None)
    if supported is None:
        supported = importlib.import_module(f"{module.__name__}.contract").SUPPORTED
    found = Finding(name, framework, _contract.version(framework), supported, None, {}, {}, {}, {}, [], {})
    if found.installed is None:
        return found._replace(reason=f"{framework} is not installed: pip install '{framework}{supported}'")
    try:
        # frameworks print as they are imported, and what is said here may be JSON
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            return _tried(found, module, warned)
    except Exception as error:  # a broken installation raises anything, and the others are still of interest
        return found._replace(reason=_told(error))


def _tried(found: Finding, module: Any, warned: list[warnings.WarningMessage]) -> Finding:
    if found.adapter == "hf":  # what it registers replaces nothing
        return found._replace(replaced={"transformers' table of attentions": module.register_hf()})
    if not hasattr(module, "patch"):  # its users name what it has
        replaced = module.stands_for()
        said = [str(x.message) for x in warned]
        return found._replace(replaced=replaced, warned=[x for x in said if x.startswith(module.__name__)])
    name = f"rlkernel.patch_{found.adapter}"
    # a second call would have to agree with the options of one that is on
    if (active := _patch.in_place(name)) is not None:
        return _seen(found, active)
    contract = sys.modules.get(f"{module.__name__}.contract")
    for home in getattr(contract, "HOMES", {}).values():  # for whose import a part may wait
        with contextlib.suppress(ImportError):
            importlib.import_module(home)
    with module.patch() as patch:
        said = [str(x.message) for x in warned]
        return _seen(found, patch)._replace(warned=[x for x in said if x.startswith(name)])


def _seen(found: Finding, patch: Any) -> Finding:
    return found._replace(
        replaced=patch.replaced,
        why_not=dict(getattr(patch, "refused", {})),
        calls=dict(patch.calls),
        fallbacks=dict(patch.fallbacks),
        notes=dict(getattr(patch, "notes", {}))
        | {part: f"waits for {home}" for part, home in getattr(patch, "waiting", {}).items()},
    )


def _told(error: BaseException | None) -> str:
    """An error and what it was raised from."""
    said = []
    while error is not None:
        said.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return ", from ".join(said)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m rlkernel.doctor", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(adapters())}; all of them")
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.names if name not in adapters()]:
        parser.error(f"NAME must be among {', '.join(adapters())}, got {', '.join(unknown)}")
    wrong = info.wrong()  # other processes, such as workers of verl, would end because of them
    for why in wrong.values():
        print(f"wrong: {why}", file=sys.stderr, flush=True)
    findings = [examine(name) for name in asked.names or adapters()]
    try:
        if asked.json:
            print(json.dumps([finding._asdict() for finding in findings], indent=2))
        else:
            print("\n".join(line for finding in findings for line in _lines(finding)))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, and Python would write once more as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    looked_at = [x for x in findings if asked.names or x.installed is not None]
    return int(bool(wrong) or any(x.reason or x.why_not or x.warned for x in looked_at))


def _lines(found: Finding) -> list[str]:
    version = found.installed or "not installed"
    verdict = "applies" if found.reason is None else "does not apply"
    lines = [f"{found.adapter}: {verdict}; {found.framework} {version}, supported {found.supported}"]
    if found.reason is not None:
        lines.append(f"  why: {found.reason}")
    lines += [f"  but: {message}" for message in found.warned]
    sections: list[tuple[str, dict[str, Any], str]] = [
        ("", found.replaced, "->"),
        ("left out: ", found.why_not, "because"),
        ("ran: ", found.calls, "times"),
        ("left to the framework: ", found.fallbacks, "times"),
        ("", found.notes, "-"),
    ]
    return lines + [
        f"  {title}{key} {word} {value}" for title, rows, word in sections for key, value in rows.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
