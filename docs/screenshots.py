"""Screenshots of runs in TensorBoard, for docs/callbacks.md.

    pacmr quickstart && python -m pip install -e ".[docs]"
    python docs/screenshots.py --logdir runs/quickstart --output docs

It starts TensorBoard and a headless Chromium (``--browser``), and replaces its own earlier pictures.
"""

from __future__ import annotations

import argparse
import io
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

from PIL import Image
from playwright.sync_api import Page, sync_playwright

PAGES = {
    "layout": "#custom_scalars",
    "images": "#images",
    "hparams": "#hparams",
    "text": "#text",
}
"""Query and tab of each picture."""
FLAGS = ["--no-sandbox", "--disable-3d-apis"]
"""Of Chromium: without WebGL, TensorBoard draws its curves as SVG, which are in the picture."""
HEIGHTS = {1500: 950, 400: 900}
"""Height of a window for each width, in pixels."""


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logdir", default="runs/quickstart", help="folder of the runs")
    parser.add_argument("--output", type=Path, default=Path("docs"), help="folder of the pictures")
    parser.add_argument("--browser", default="/usr/bin/chromium", help="Chromium or Chrome")
    parser.add_argument("--only", nargs="*", choices=PAGES, default=list(PAGES), help="pictures to take")
    parser.add_argument("--widths", nargs="*", type=int, choices=HEIGHTS, default=list(HEIGHTS))
    parser.add_argument("--runs", default="", help="regular expression of the runs to show")
    parser.add_argument("--wait", type=float, default=5, help="seconds in which TensorBoard draws its charts")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", options.logdir, "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=options.browser, args=FLAGS)
            for width in options.widths:
                page = browser.new_page(viewport={"width": width, "height": HEIGHTS[width]})
                page.set_default_timeout(300_000)  # the machine may be busy
                for name in options.only:
                    url = f"{address}/?runFilter={options.runs}{PAGES[name]}"
                    picture = shown(page, url, options.wait)
                    save(picture, options.output / f"tensorboard-{name}-{width}.png")
    finally:
        server.terminate()


def wait_for(address: str) -> None:
    """Wait until TensorBoard has read the runs."""
    for _ in range(120):
        try:
            with urlopen(f"{address}/data/runs", timeout=5) as answer:
                if re.search(rb"\w", answer.read()):
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise SystemExit("TensorBoard has shown no run within a minute.")


def shown(page: Page, address: str, wait: float) -> bytes:
    """Return the page as PNG, ``wait`` seconds after its requests have ended."""
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(1000 * wait)  # charts are drawn after their data have come
    pane = page.get_by_label("Close side pane")
    if page.viewport_size["width"] < 700 and pane.count():
        pane.dispatch_event("click")  # the settings cover the cards
        page.wait_for_timeout(1000 * wait)
    return page.screenshot()


def save(picture: bytes, path: Path) -> None:
    """Write a picture with 128 colours, which suffice for TensorBoard."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
