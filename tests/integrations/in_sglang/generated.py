"""What SGLang's engine generates in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("run_engine.py")


def run(folder, request, **options):
    """Its status, outputs and text; ``options`` are ``patch`` and ``engine``, as the script takes them."""
    given = [json.dumps(x) for x in (request, options.get("patch", {}), options.get("engine", {}))]
    command = [sys.executable, str(SCRIPT), str(folder), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    said = [line for line in done.stdout.splitlines() if line.startswith("said:")]
    outputs = json.loads(said[0].removeprefix("said:")) if said else None
    return outputs, done.stdout + done.stderr
