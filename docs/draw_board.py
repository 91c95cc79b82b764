"""Draws docs/board.png and docs/board-dark.png, of the board of a job that it starts.

python docs/draw_board.py

It takes Debian's chromium, and the extras `board`, `browser` and `examples`. Ports 9464, 9465 and
9480 must be free.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
CTR = HERE.parent / "examples" / "ctr.py"
JAXFLEET = [sys.executable, "-m", "jaxfleet"]
JOB = ["launch", "--servers", "2", "--trainers", "2", str(CTR), "--mode", "pserver"]
BOARD = ["top", "9464", "9465", "--web"]
SCHEMES = {"light": "board.png", "dark": "board-dark.png"}
BEGINS_S = 300.0  # the longest until a trainer reports its loss
WATCHED_S = 12.0  # from then on, for charts to have something to show


def main() -> None:
    environment = {**os.environ, "JAXFLEET_METRICS_PORT": "9464"}
    with tempfile.TemporaryDirectory() as folder:
        job = subprocess.Popen(
            [*JAXFLEET, *JOB], cwd=folder, env=environment, stdout=subprocess.DEVNULL
        )
        board = subprocess.Popen([*JAXFLEET, *BOARD], stdout=subprocess.PIPE, text=True)
        try:
            assert board.stdout is not None
            line = board.stdout.readline()  # the board is at URL (Ctrl-C ends it)
            draw(next(word for word in line.split() if word.startswith("http")))
        finally:
            for process in (board, job):
                process.terminate()
                process.wait(timeout=30)


def draw(address: str) -> None:
    with sync_playwright() as started:
        flags = ["--no-sandbox"]  # root has none
        browser: Any = started.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        pages = {
            name: browser.new_page(viewport={"width": 1240, "height": 900}, color_scheme=scheme)
            for scheme, name in SCHEMES.items()
        }
        for page in pages.values():
            page.goto(address)
            page.locator("#scalar-charts figure").first.wait_for(timeout=BEGINS_S * 1000)
        time.sleep(WATCHED_S)
        for name, page in pages.items():
            page.screenshot(path=HERE / name)
        browser.close()


if __name__ == "__main__":
    main()
