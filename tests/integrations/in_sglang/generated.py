"""What SGLang's engine generates in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import forked

SCRIPT = Path(__file__).with_name("run_engine.py")


def run(folder, request, **options):
    """Its outputs and text; ``options`` are ``patch`` and ``engine``, as the script takes them."""
    done = subprocess.run(command(folder, request, options), capture_output=True, text=True, timeout=600)
    return said(done.stdout), done.stdout + done.stderr


def run_forked(folder, request, **options):
    """The same in forks of this process, which spares the imports: what patches them is not the plugin."""
    done = forked.run([*command(folder, request, options), "fork"])
    return said(done.stdout), done.stdout


def command(folder, request, options):
    given = [json.dumps(x) for x in (request, options.get("patch", {}), options.get("engine", {}))]
    return [sys.executable, str(SCRIPT), str(folder), *given]


def said(text):
    found = [line for line in text.splitlines() if line.startswith("said:")]
    return json.loads(found[0].removeprefix("said:")) if found else None
