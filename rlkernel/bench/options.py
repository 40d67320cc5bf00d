"""The commands of ``python -m rlkernel.bench``, and the options of each, which its ``--help`` shows."""

import argparse
from collections.abc import Callable, Sequence
from functools import cache

from rlkernel import dispatch
from rlkernel.bench import cases
from rlkernel.bench.cases import UsageError
from rlkernel.bench.consistency import command as consistency
from rlkernel.bench.devices import DEVICES

PROGRAM = "python -m rlkernel.bench"
MEASURED = ("parity", "memory", "speed")


class Parser(argparse.ArgumentParser):
    """One that raises what is wrong, and takes no abbreviated options."""

    def __init__(self, command: str | None, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=f"{PROGRAM} {command}" if command else PROGRAM,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str):  # type: ignore[no-untyped-def]
        # of a type that is below: "argument --device: must be of cpu, cuda, got x"
        raise UsageError(message.removeprefix("argument ").replace(": must be ", " must be ", 1))


def names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _seconds(text: str) -> float:
    return _positive(text, "seconds above 0")


def _ratio(text: str) -> float:
    return _positive(text, "a ratio above 0")


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be {what}, got {text}")
    return value


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {text}")
    return value


def _one_of(*known: str) -> Callable[[str], str]:
    def chosen(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {text}")
        return text

    return chosen


def _device(parser: Parser, text: str = "default: cuda where there is one") -> None:
    parser.add_argument("--device", type=_one_of("cpu", "cuda"), metavar="{cpu,cuda}", help=text)


def _threads(parser: Parser, usual: str) -> None:
    parser.add_argument("--threads", type=_count, metavar="N", help=f"CPU threads; default: {usual}")


def _measuring(parser: Parser, plot: str | None) -> None:
    add = parser.add_argument
    add("--op", type=names, default=(), help="ops, separated by commas; default: all")
    backends = f"of {', '.join(dispatch.BACKENDS)}; default: all that can run"
    add("--backend", type=names, default=(), help=backends)
    add("--dtype", type=names, default=(), help=f"of {', '.join(cases.DTYPES)}")
    presets = "models (llama-3-8b, qwen3-8b, ...) or cases by name; a wrong one lists all"
    add("--preset", type=names, default=(), help=presets)
    add("--shape", help="sizes as N=512,V=32000 or 512x32000; with --preset, those that differ from it")
    add("--peers", type=names, help="names, `all` (also those slow to start) or `none`")
    _device(parser)
    _threads(parser, "all cores that torch uses")
    add("--seconds", type=_seconds, help="time spent on the rounds of one pass")
    kept = "write the report, after every case; - is standard output at the end, without tables"
    add("--json", metavar="FILE", help=f"{kept}; default: build/bench.json or the user's cache")
    add("--markdown", metavar="FILE", help="write the tables; - is standard output")
    add("--all", action="store_true", help="also the rows of the reference where another backend ran")
    resumed = "go on with the report of a run that was interrupted: what it has is not measured again"
    add("--resume", action="store_true", help=resumed)
    if plot:
        add("--plot", metavar="FILE.png", help=f"draw {plot}")
    else:
        parser.set_defaults(plot=None)


def _gate(parser: Parser) -> None:
    gate = "exit with 1 unless every peer takes RATIO times as long as we do"
    parser.add_argument("--gate", type=_ratio, metavar="RATIO", help=gate)


def _all_suites(parser: Parser) -> None:
    _measuring(parser, "time and memory beside the best peer's, a pair of bars for every op")
    _gate(parser)


def _parity(parser: Parser) -> None:
    _measuring(parser, None)
    parser.set_defaults(gate=None)


def _memory(parser: Parser) -> None:
    _measuring(parser, "peak extra memory: over a series of sizes where there is one, else by op")
    parser.set_defaults(gate=None)


def _speed(parser: Parser) -> None:
    _measuring(parser, "time beside the best peer's, with its spread")
    _gate(parser)


def _consistency(parser: Parser) -> None:
    add = parser.add_argument
    add("--short", action="store_true", help="tiny models and few pairs, as in CI")
    parts = f"of {', '.join(consistency.PARTS)}; default: all that can run"
    add("--part", type=names, default=(), help=parts)
    add("--dtype", type=names, default=(), help=f"of {', '.join(consistency.DTYPES)}")
    _device(parser, "cpu, the default; cuda has the part models")
    _threads(parser, "1")
    add("--seconds", type=_seconds, help="time spent on the pairs of one measurement")
    add("--json", metavar="FILE", help="write the report; - is standard output, without tables")
    add("--markdown", metavar="FILE", help="write the tables; - is standard output")


def _compare(parser: Parser) -> None:
    parser.add_argument("files", nargs="*", metavar="REPORT.json", help="two reports: before, after")
    gate = "exit with 1 unless every row of the second is RATIO times as fast as in the first"
    parser.add_argument("--gate", type=_ratio, metavar="RATIO", help=gate)


def _show(parser: Parser) -> None:
    add = parser.add_argument
    add("files", nargs="*", metavar="REPORT.json", help="a report; default: that of the last run")
    add("--markdown", metavar="FILE", help="write the tables; - is standard output")
    add("--plot", metavar="FILE.png", help="draw time and memory beside the best peer's")
    add("--all", action="store_true", help="also the rows of the reference where another backend ran")


def _predict(parser: Parser) -> None:
    add = parser.add_argument
    reports = "reports of a GPU to compare with; default: those of benchmarks/results"
    add("files", nargs="*", metavar="REPORT.json", help=reports)
    add("--device", type=_one_of(*DEVICES), metavar="GPU", help=f"of {', '.join(DEVICES)}")
    add("--markdown", metavar="FILE", help="write the tables; - is standard output, the default")


def _doctor(parser: Parser) -> None:
    add = parser.add_argument
    _device(parser)
    _threads(parser, "all cores that torch uses")
    add("--seconds", type=_seconds, default=3.0, help="how long to look; default: 3")


def _readme(parser: Parser) -> None:
    add = parser.add_argument
    add("files", nargs="*", metavar="PAGE.md", help="default: README.md and docs")
    add("--check", action="store_true", help="exit with 1 instead of writing when a table is not up to date")


COMMANDS: dict[str | None, tuple[str, Callable[[Parser], None]]] = {
    None: ("Parity, memory and speed of every op on every backend here, beside its peers.", _all_suites),
    "parity": ("Errors against fp64, beside PyTorch's own and those of peers.", _parity),
    "memory": ("Peak extra memory of every op, beside its peers.", _memory),
    "speed": ("Time of every op beside its peers, after its parity.", _speed),
    "show": ("Tables and summary of a report, or a picture of it.", _show),
    "compare": ("Times of two reports, row by row.", _compare),
    "doctor": ("Whether this machine is quiet enough to trust times; exits with 1 where it is not.", _doctor),
    "consistency": ("What batch-invariant bits cost, and what they give.", _consistency),
    "predict": ("How long the headline shapes should take on a GPU, from the compiled code.", _predict),
    "readme": ("Rewrite the tables of README.md and docs from benchmarks/results.", _readme),
}


def parser(command: str | None) -> Parser:
    description, fill = COMMANDS[command]
    if command is None:
        lines = (f"  {name:<12} {text}" for name, (text, _) in COMMANDS.items() if name)
        epilog = "\n".join(
            ["commands, each with a --help of its own; without one, all suites run:", *lines]
            + ["", "exit status: 0; 1 when parity or a gate fails; 2 on wrong usage; 130 when interrupted"]
        )
        made = Parser(None, description, epilog)
        made.usage = f"{PROGRAM} [command] [options]"
    else:
        made = Parser(command, description)
    fill(made)
    made.set_defaults(command=command)
    return made


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command, wherever it stands among the options, and its options.

    Raises:
        UsageError: there is no such command, or it has no such option.
    """
    command, rest = split(arguments)
    found = parser(command)
    options, extra = found.parse_known_args(rest)
    if extra:
        name = command or "rlkernel.bench"
        if not extra[0].startswith("-"):
            raise UsageError(f"{name} must be given no files, got {' '.join(extra)}")
        own = ", ".join(x for action in found._actions for x in action.option_strings if x.startswith("--"))
        raise UsageError(f"{name} must be given {own} alone, got {' '.join(extra)}")
    return options


def split(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The command, which is the first word that is no option nor its value, and the other arguments."""
    valued = _valued()
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if not word.startswith("-"):
            if word not in COMMANDS:
                known = ", ".join(name for name in COMMANDS if name)
                raise UsageError(f"the command must be of {known}, got {word}")
            return word, [*arguments[:at], *arguments[at + 1 :]]
        at += 2 if valued.get(word, False) else 1  # --option=value is one word
    return None, list(arguments)


@cache
def _valued() -> dict[str, bool]:
    """Whether the next word is the value of an option; of two commands one name means one thing."""
    return {
        option: action.nargs != 0
        for command in COMMANDS
        for action in parser(command)._actions
        for option in action.option_strings
    }


def command_of(arguments: Sequence[str]) -> str | None:
    """The command that the help to show belongs to, also where the rest is wrong."""
    try:
        return split(arguments)[0]
    except UsageError:
        return None
