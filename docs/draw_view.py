"""Draws docs/view-passes.png and docs/view-operators.png, of a report of examples/digits.py.

jaxfleet view -o digits.html examples/digits.py
python docs/draw_view.py digits.html

It takes Debian's chromium, and the extra `browser`.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
SHOTS = {
    "view-passes": "#pass=grad_allreduce&op=params/Dense_0/kernel@GRAD",
    "view-operators": "#view=operators&op=params/Dense_0/bias@GRAD",
}


def main() -> None:
    report = Path(sys.argv[1]).resolve().as_uri()
    with sync_playwright() as started:
        flags = ["--no-sandbox"]  # root has none
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(viewport={"width": 1240, "height": 580})
        for name, address in SHOTS.items():
            page.goto("about:blank")
            page.goto(report + address)
            page.screenshot(path=HERE / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
