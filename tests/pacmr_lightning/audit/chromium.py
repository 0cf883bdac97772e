"""A real Chromium that tests drive by its remote debugging pipe, without any further package.

Where there is none these tests are skipped, or cannot be collected if PACMR_REQUIRE_BROWSER is 1.
"""

import base64
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
    """One tab; ``requests`` are the addresses that it has asked for."""

    def __init__(self, read: int, write: int):
        self.read, self.write, self.buffer, self.number = read, write, b"", 0
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
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _next(self):
        while b"\0" not in self.buffer:
            part = os.read(self.read, 65536)
            assert part, "Chromium has closed the pipe"
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        found = json.loads(message)
        if "method" in found:
            self.events.append(found)
        return found

    @property
    def requests(self):
        return [
            e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"
        ]

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

    def picture(self, path, width, height):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def chromium(folder) -> Iterator[Tab]:
    """A tab of a Chromium whose profile and downloads lie in a folder."""
    ours, theirs = os.pipe(), os.pipe()

    def pipes():
        read, write = os.dup(theirs[0]), os.dup(ours[1])  # which may be 3 and 4 themselves
        os.dup2(read, 3)
        os.dup2(write, 4)

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        [BROWSER, *options, f"--user-data-dir={folder / 'profile'}"],
        preexec_fn=pipes,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(theirs[0])
    os.close(ours[1])
    try:
        tab = Tab(ours[0], theirs[1])
        tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        yield tab
        tab.session = None
        tab.call("Browser.close")
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        os.close(ours[0])
        os.close(theirs[1])
