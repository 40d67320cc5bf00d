"""``python -m`` in a fork of this process, which has imported torch and what else a framework needs.

A fresh Python takes seconds for that alone; what is asserted of imports that were never made needs one.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile


def run_module(arguments, environment, forgotten):
    """The status and the output of a module with its arguments, to which nothing of the package ``forgotten``
    has been imported."""
    with tempfile.TemporaryFile("w+") as output:
        process = multiprocessing.get_context("fork").Process(
            target=_main, args=(list(arguments), dict(environment), forgotten, output)
        )
        process.start()
        process.join(600)
        process.kill()
        process.join()
        output.seek(0)
        return process.exitcode, output.read()


def _main(arguments, environment, forgotten, output):
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")
    ]
    sys.path[:0] = filter(None, environment["PYTHONPATH"].split(os.pathsep))
    for name in [name for name in sys.modules if name.partition(".")[0] == forgotten]:
        del sys.modules[name]
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
