"""The rules of what pages and other text say: see layout.py."""

import re
import subprocess
from pathlib import Path

import layout_files as files

PAGE_SECTIONS = ("What changes", "What does not", "Versions", "Limits", "Measured")


def commands(root: Path) -> list[str]:
    """``make`` targets, modules and scripts that a page tells the reader to run, and that do not exist."""
    targets = set(re.findall(r"^([a-z0-9-]+):", files.text_of(root / "Makefile"), re.M))
    problems = []
    for page in files.pages(root):
        # only code, in a line or in a block: prose may say "make sure"
        text = files.text_of(page)
        code = "\n".join(re.findall(r"`([^`\n]+)`", text) + re.findall(r"```.*?\n(.*?)```", text, re.S))
        where = page.relative_to(root)
        for line in re.findall(r"^\s*(?:\$ )?make((?: [a-z0-9-]+)+)", code, re.M):
            problems += [f"{where}: make has no target {t}" for t in line.split() if t not in targets]
        for module in re.findall(r"python -m (rlkernel[\w.]*)", code):
            path = root / module.replace(".", "/")
            if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
                problems.append(f"{where}: there is no module {module}")
        for script in re.findall(r"(?:python|bash) ([\w./]+/[\w.]+)", code):
            if not (root / script).is_file():
                problems.append(f"{where}: there is no {script}")
    return problems


def orphan_pages(root: Path) -> list[str]:
    """Pages of the documentation that no other page links to."""
    linked = {
        (page.parent / target).resolve()
        for page in files.pages(root)
        for target in re.findall(r"\]\(([^)#\s]+\.md)", files.text_of(page))
        if "://" not in target
    }
    pages = [p for p in (root / "docs").rglob("*.md") if p.name != "index.md"]
    return [f"no page links to {p.relative_to(root)}" for p in sorted(pages) if p.resolve() not in linked]


def integration_pages(root: Path) -> list[str]:
    """What a page about a framework must tell: code first, then these sections, and a table by the tool."""
    problems = []
    for page in sorted((root / "docs/integrations").glob("*.md")):
        text = files.text_of(page)
        missing = [f"no section {name!r}" for name in PAGE_SECTIONS if f"\n## {name}\n" not in text]
        measured = text.partition("\n## Measured\n")[2].partition("\n## ")[0]
        if not missing and "<!-- bench:begin " not in measured:
            missing.append("no table of the tool in 'Measured'")
        if "\n```python\nimport rlkernel\n" not in text.partition("\n## ")[0]:
            missing.append("no python in front of its first section")
        problems += [f"{page.relative_to(root)} has {what}" for what in missing]
    return problems


def environment(root: Path) -> list[str]:
    """Environment variables that the code reads and no page mentions, or the other way round."""
    pattern = re.compile(r"\bRLKERNEL_[A-Z][A-Z_]*[A-Z]\b")
    # what code reads is a string or a macro argument of getenv; a bare word is a C++ macro
    read = re.compile(r"""["'](RLKERNEL_[A-Z][A-Z_]*[A-Z])["']""")
    sources = [root / "setup.py", *(p for p in (root / "csrc").rglob("*") if p.is_file())]
    sources += [p for folder in ("rlkernel", *files.LINKS) for p in (root / folder).rglob("*.py")]
    used = {name for p in sources if p.is_file() for name in read.findall(files.text_of(p))}
    told = {name for p in files.pages(root) for name in pattern.findall(files.text_of(p))}
    problems = [f"{name} is not documented" for name in sorted(used - told)]
    return problems + [f"{name} is documented, but nothing reads it" for name in sorted(told - used)]


def tracked_files(root: Path) -> list[Path]:
    """The files of the checkout, as git sees them: committed or about to be."""
    # a container may run as another user than the one that cloned, which git refuses unless told
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files"]
    command += ["--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [root / n for n in names if (root / n).is_file()]


def forbidden_text(root: Path, paths: list[Path]) -> list[str]:
    """Paths of the machine that a file was written on, package indexes, and notes to oneself."""
    rules = {
        "a path of somebody's machine": r"(?<![\w.])/(?:root|work|home/\w+|Users/\w+|opt/pypi\w*|tmp/\w+)/",
        "a package index": r"--(?:extra-)?index-url|file:///\w",
        "a note to oneself": r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
    }
    problems = []
    for path in paths:
        text = files.text_of(path)
        if "\0" in text:  # a picture
            continue
        for number, line in enumerate(text.splitlines(), 1):
            where = f"{path.relative_to(root)}:{number}"
            problems += [f"{where} has {what}" for what, rule in rules.items() if re.search(rule, line)]
    return problems


def typed_figures(root: Path) -> list[str]:
    """Figures of speed in a page, which only a tool may write, between its markers."""
    number = r"(?:\b\d[\d.]*x?|\b(?:two|three|four|five|ten|several|many))"
    compared = r"(?:times )?(?:as )?(?:fast|slow|quick)(?:er)?\b"
    units = r"\b\d[\d.]* ?(?:ms|µs|GB/s|TB/s|[TG]FLOP/s|tokens/s)(?!\w)"
    rule = re.compile(rf"{number} {compared}|{number} times[.;:]|{units}")
    problems = []
    for page in files.pages(root):
        text = re.sub(
            r"<!-- bench:begin (\S+) -->.*?<!-- bench:end \1 -->",
            _blank,
            files.text_of(page),
            flags=re.DOTALL,
        )
        for line, words in enumerate(text.splitlines(), 1):
            if found := rule.search(words):
                problems.append(f"{page.relative_to(root)}:{line} has a figure typed by hand: {found[0]}")
    return problems


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")
