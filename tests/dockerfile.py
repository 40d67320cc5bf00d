"""What can be said of a Dockerfile without Docker: stages, what it copies, commands run with stand-ins."""

import fnmatch
import importlib.util
import os
import re
import subprocess
from pathlib import Path

# what a slim image of Debian has, and this file's commands call
STAND_INS = ("apt-get", "pip", "python", "rm", "useradd")


def instructions(text):
    """``(name, the rest)`` of each."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name, rest.strip()


def filled(text, values):
    return re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)


def ignored(path, patterns):
    parts = path.split("/")
    heads = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    return any(
        fnmatch.fnmatch(
            head.rpartition("/")[2] if pattern.startswith("**/") else head, pattern.removeprefix("**/")
        )
        for pattern in patterns
        for head in heads
    )


def faults(text, root, files, patterns, folder, **build_args):
    """``(what is wrong, the commands that ran)``; ``files`` are those of the context."""
    found, ran = [], []
    stages, defaults, values = {}, {}, None
    sent = {file for file in files if not ignored(file, patterns)}
    found += [f".dockerignore leaves out {file}" for file in sorted(set(files) - sent)]
    for name, rest in instructions(text):
        if name == "ARG":
            key, _, value = rest.partition("=")
            (defaults if values is None else values)[key] = build_args.get(key, value.strip('"'))
        elif name == "FROM":
            image, _, stage = filled(rest, defaults).partition(" AS ")
            stages[stage or "the last"] = image
            values = {}
        elif name == "ENV":
            for pair in rest.split():
                key, _, value = pair.partition("=")
                values[key] = filled(value, values)
        elif name == "COPY":
            options = re.findall(r"--(\w+)=(\S+)", rest)
            *sources, _ = re.sub(r"--\S+", "", rest).split()
            if stage_of := dict(options).get("from"):
                found += [] if stage_of in stages else [f"COPY from {stage_of}, which is no stage"]
                continue
            for source in sources:
                there = source == "." or any(f == source or f.startswith(f"{source}/") for f in sent)
                found += [] if there else [f"COPY {source}, which is not in the checkout"]
        elif name == "RUN":
            done = command(rest, values, folder)
            ran += (folder / "ran").read_text().splitlines()
            found += [] if done.returncode == 0 else [f"RUN {rest}: {done.stderr.strip()}"]
        elif name == "CMD":
            words = re.findall(r'"([^"]+)"', rest)
            if not (root / "examples" / words[1]).is_file():
                found.append(f"CMD {words[1]}, which is not in examples")
        elif name not in ("WORKDIR", "USER"):
            found.append(f"{name}, which this check does not know")
    for line in ran:
        for module in re.findall(r"python -m (\S+)", line):
            found += [] if importlib.util.find_spec(module) else [f"no module {module}"]
    for key in build_args:
        if not re.search(rf"^ARG {key}=", text, re.M):
            found.append(f"no ARG {key}")
    return found, ran


def command(line, values, folder):
    """Run with stand-ins that write down how they were called; anything else is not found."""
    bin = folder / "bin"
    bin.mkdir(exist_ok=True)
    for name in STAND_INS:
        (bin / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{folder}/ran"\n')
        (bin / name).chmod(0o755)
    (folder / "ran").write_text("")
    return subprocess.run(
        ["/bin/sh", "-euc", line], env=values | {"PATH": str(bin)}, cwd=folder, capture_output=True, text=True
    )


def tracked(root):
    """The files of a checkout, or None where it is none."""
    if not (root / ".git").exists():
        return None
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files"], env=environment, capture_output=True, text=True, check=True
    )
    return [file for file in listed.stdout.splitlines() if (Path(root) / file).exists()]
