"""Draws docs/board.png, of the board of a running job.

JAXFLEET_METRICS_PORT=9464 jaxfleet launch --servers 2 --trainers 2 examples/ctr.py --mode pserver
jaxfleet top 9464 9465 --web
python docs/draw_board.py 'http://127.0.0.1:9480/?token=...'

It takes Debian's chromium, and the extra `browser`.
"""

import shutil
import sys
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

WATCHED_S = 5.0  # for charts to have something to show


def main() -> None:
    with sync_playwright() as started:
        flags = ["--no-sandbox"]  # root has none
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(viewport={"width": 1240, "height": 900})
        page.goto(sys.argv[1])
        time.sleep(WATCHED_S)
        page.screenshot(path=Path(__file__).parent / "board.png")
        browser.close()


if __name__ == "__main__":
    main()
