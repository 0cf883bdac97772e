"""A real Chromium that tests drive by its remote debugging pipe, without any further package.

Where there is none these tests are skipped, or cannot be collected if PACMR_REQUIRE_BROWSER is 1.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

assert BROWSER or os.environ.get("PACMR_REQUIRE_BROWSER") != "1", (
    "no Chromium or Chrome (PACMR_REQUIRE_BROWSER is 1)"
)


class Tab:
    """One tab; ``events`` are those since it was last opened."""

    def __init__(self, process: subprocess.Popen):
        self.process, self.buffer, self.number = process, b"", 0
        self.session, self.events = None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _next(self):
        while b"\0" not in self.buffer:
            part = self.process.stdout.read(65536)
            assert part, "Chromium has closed the pipe"
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        found = json.loads(message)
        if "method" in found:
            self.events.append(found)
        return found

    def open(self, url):
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()

    def value(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, *keys, modifiers=0):
        for key in keys:
            text = {"text": key} if len(key) == 1 and not modifiers else {}
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=modifiers, **text)
                text = {}

    def click(self, selector):
        self.value(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        x, y = self.value(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])"
            f"(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def give_file(self, selector, path):
        node = self.call("Runtime.evaluate", expression=f"document.querySelector({selector!r})")
        self.call("DOM.setFileInputFiles", files=[str(path)], objectId=node["result"]["objectId"])

    def wait(self, condition):
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.02)


@contextmanager
def chromium(folder) -> Iterator[Tab]:
    """A tab of a Chromium whose profile and downloads lie in a folder."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    options += [f"--user-data-dir={folder / 'profile'}"]
    pipes = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'  # it reads from 3, and writes to 4
    process = subprocess.Popen(
        ["sh", "-c", pipes, "sh", BROWSER, *options],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "HOME": str(folder)},
    )
    with process:
        try:
            tab = Tab(process)
            yield tab
            tab.session = None
            tab.call("Browser.close")
            process.wait(60)
        finally:
            process.kill()
