"""Draws docs/view-*.png, a picture of each view, of a report of the step of examples/digits.py.

One view is drawn in the dark scheme too.

python docs/draw_view.py

It takes Debian's chromium, and the extra `browser`. `--report FILE` keeps the report too.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import optax
from playwright.sync_api import sync_playwright

import jaxfleet as jf

HERE = Path(__file__).parent
SHOTS = {
    "overview": "#view=overview",
    "passes": "#pass=grad_allreduce&op=params/Dense_0/kernel@GRAD",
    "operators": "#view=operators&op=params/Dense_0/bias@GRAD",
    "graph": "#view=graph&op=params/Dense_0/kernel@GRAD",
    "modules": "#view=modules&fold=functions",
    "parameters": "#param=params/Dense_0/kernel",
    "memory": "#view=memory",
    "traffic": "#view=traffic",
    "programs": "#view=programs",
}
DARK = "graph"  # drawn as view-dark.png
WIDTH, HEIGHT = 1180, 520
HEIGHTS = {"operators": 400}  # its text takes the most bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path)
    kept = parser.parse_args().report
    with tempfile.TemporaryDirectory() as folder:
        report = write_report(kept or Path(folder) / "digits.html")
        draw(report.resolve().as_uri())


def write_report(path: Path) -> Path:
    """Writes the report of a step over four devices, after a call of it and with its time."""
    sys.path.insert(0, str(HERE.parent))
    from examples import digits  # noqa: PLC0415  # a script, found by the line above

    jf.emulate_devices(4)
    x, _, y, _ = digits.load(0)
    model = digits.CNN()
    variables = model.init(jax.random.key(0), x[:1], train=True)
    tx = jf.distributed_optimizer(optax.adam(5e-3))
    state = digits.TrainState.create(apply_fn=model.apply, tx=tx, **variables)
    batch = next(digits.batches(x, y, seed=0))
    step = jf.distribute(digits.train_step, example=(state, batch))
    assert isinstance(step, jf.Step)
    step(state, batch)
    return step.view(path, measure=20)


def draw(report: str) -> None:
    with sync_playwright() as started:
        flags = ["--no-sandbox", "--disable-lcd-text"]  # root has none; grey text is smaller
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for name, address in SHOTS.items():
            size = {"width": WIDTH, "height": HEIGHTS.get(name, HEIGHT)}
            draw_one(browser, size, report + address, "light", HERE / f"view-{name}.png")
        size = {"width": WIDTH, "height": HEIGHT}
        draw_one(browser, size, report + SHOTS[DARK], "dark", HERE / "view-dark.png")
        browser.close()


def draw_one(browser: Any, size: dict[str, int], address: str, scheme: str, path: Path) -> None:
    page = browser.new_page(viewport=size, color_scheme=scheme)
    page.goto(address)
    page.wait_for_timeout(200)  # the graph is placed in the next frame
    page.screenshot(path=path)
    page.close()


if __name__ == "__main__":
    main()
