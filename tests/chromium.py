"""Chromium without a screen, driven over the DevTools protocol through pipes: no port, no package."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # of a container, whose root may not make one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)
ABSENT = "this machine has no Chromium"


def find():
    """Its path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab; with Browser() as browser: browser.open(url)."""

    def __init__(self, patience=120):
        self.patience, self.number, self.events, self.rest = patience, 0, [], b""
        self.folder = tempfile.mkdtemp(prefix="chromium-")
        # Chromium reads its file 3 and writes its file 4; ours are above these, so that none is overwritten
        theirs, self.out = map(_above, os.pipe())
        self.inp, theirs_too = map(_above, os.pipe())
        command = [find(), *OPTIONS, f"--user-data-dir={self.folder}", "about:blank"]
        null = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, theirs, 3), (os.POSIX_SPAWN_DUP2, theirs_too, 4)]
        self.process = os.posix_spawn(command[0], command, os.environ, file_actions=actions, setpgroup=0)
        for file in (null, theirs, theirs_too):
            os.close(file)
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.inp)
        os.close(self.out)
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self.number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, url, width, height=900):
        """Load a page, wait until it stands; returns the addresses that it asked for."""
        self.resize(width, height)
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())
        asked = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked]

    def resize(self, width, height=900):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def run(self, script):
        """The value of an expression of JavaScript, awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def picture(self, path):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _read(self):
        end = time.monotonic() + self.patience
        while b"\0" not in self.rest:
            if not select.select([self.inp], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium has said nothing for {self.patience} s")
            data = os.read(self.inp, 1 << 16)
            if not data:
                raise RuntimeError("Chromium has ended")
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)


def _above(file):
    copy = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 16)
    os.close(file)
    return copy
