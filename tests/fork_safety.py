"""A fork of a test's process, whose other threads it has not."""

import os
import signal
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager


def ends_while_another_thread_holds(
    held: Callable[[], AbstractContextManager], run: Callable[[], object]
) -> bool:
    """Whether ``run()`` ends in a child that was forked while another thread was inside ``held()``."""
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with held():
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(60)
    with warnings.catch_warnings():  # Python 3.12 warns of threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(10)
        run()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    return os.waitstatus_to_exitcode(status) == 0
