"""Programs in forks of this process, which has imported vLLM: a fresh Python takes 15 s for that alone."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

FORK = multiprocessing.get_context("fork")
RUN = subprocess.run


def start(command, output, environment):
    """A process that runs a script of Python as `command` says, with its arguments, and writes to a file."""
    process = FORK.Process(target=_main, args=(list(map(str, command)), output, dict(environment)))
    process.start()
    return process


def run(command, env=None, check=False, **options):
    """`subprocess.run`, whose output of a script of Python is text, with what goes to stderr in it."""
    if command[0] != sys.executable or not str(command[1]).endswith(".py"):
        return RUN(command, env=env, check=check, **options)
    with tempfile.TemporaryFile("w+") as output:
        process = start(command[1:], output, os.environ if env is None else env)
        process.join(300)
        process.kill()
        process.join()
        output.seek(0)
        done = subprocess.CompletedProcess(command, process.exitcode, output.read())
    if check and done.returncode:
        print(done.stdout)
        done.check_returncode()
    return done


def _main(command, output, environment):
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = map(_text, (1, 2))  # no longer pytest's
    os.environ.clear()
    os.environ.update(environment)
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(command[0]).parent), *filter(None, folders)]
    sys.argv = command
    subprocess.run = run  # an example's workers are forks too
    plugins = sys.modules.get("vllm.plugins")
    if plugins:
        plugins.plugins_loaded = False  # what an engine of this process has loaded is not the program's
    runpy.run_path(command[0], run_name="__main__")


def _text(number):
    return os.fdopen(number, "w", buffering=1, closefd=False)
