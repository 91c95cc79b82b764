"""The page in a browser: what a person does with it, counted and timed.

It takes Debian's `chromium` and the extra `browser`; the tests are left out where one is missing.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

import jaxfleet as jf
from jaxfleet.report import Measured, Report, TimePart, build_report, of_program, render
from tests.report.drawn import (
    OPS_PER_LAYER,
    deep_history,
    deep_step,
    server_histories,
    with_calls,
    without_scopes,
)
from tests.report.test_render import HOSTILE, bare_programs, hostile_program
from tests.shared_zoo import built_zoo
from tests.zoo import ZOO

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, such as Debian's"),
]

LARGEST_OF_ZOO = "transformer"
LARGE_LAYERS = 5000 // OPS_PER_LAYER + 3
# The limits of the report's design, in ms. The least of some tries counts, for each frame and each
# search by itself, as a busy machine delays any of them.
OPENED_MS, FOUND_MS, FRAME_MS = 1000, 100, 100
TRIES = 5
MOST_HEAP_BYTES = MOST_BYTES = 300e6

DECISIONS = (
    "step 'deep': 42 operators",
    "  gradients: 6 all-reduces",
    "  gathers at app/model.py:3",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        flags = ["--no-sandbox", "--enable-precise-memory-info"]  # root has no sandbox
        browser = started.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Writes the reports that the tests open; `zoo` is of the zoo's largest step, as it runs."""
    small = replace(deep_history(3), decisions=DECISIONS)
    called = {**small.sources, "app/train.py": {4: "y = layer(x)", 5: "y = layer(y)"}}
    measured = Measured(1e9, 1e8, "4 x cpu", step_s=0.25, calls=7)
    hostile = replace(of_program(hostile_program()), decisions=HOSTILE, notes=HOSTILE)
    parts = (TimePart("a step of training", 0.5), TimePart("waiting for servers", 0.12))
    trained = replace(measured, of="its compiled blocks", parts=parts, steps=3)
    reports: dict[str, Report] = {
        "small": build_report([small]),
        "measured": build_report([replace(small, measured=measured)]),
        "trainer": build_report([replace(small, measured=trained)]),
        "servers": build_report([deep_history(3, servers=2), *server_histories(3, 2)]),
        "large": build_report([deep_history(LARGE_LAYERS)]),
        "hostile": build_report([hostile]),
        "functions": build_report(
            [replace(of_program(without_scopes(deep_step(2))), sources=small.sources)]
        ),
        "calls": build_report(
            [replace(of_program(with_calls(without_scopes(deep_step(2)))), sources=called)]
        ),
    }
    for bare in bare_programs():
        reports[bare.name] = build_report([of_program(bare)])
    folder = tmp_path_factory.mktemp("reports")
    for name, report in reports.items():
        (folder / f"{name}.html").write_text(render(report), encoding="utf-8")
    built, zoo = built_zoo(LARGEST_OF_ZOO), folder / "zoo.html"
    example = (built.state, built.batch(0, ZOO[LARGEST_OF_ZOO].rows))
    jf.distribute(built.train_step, example).view(zoo)
    train_step, example = digits_step()
    jf.distribute(train_step, example).view(folder / "digits.html")
    return {name: folder / f"{name}.html" for name in ("zoo", "digits", *reports)}


def digits_step() -> tuple[Any, tuple[Any, Any]]:
    """Returns the step of examples/digits.py, and an example of its state and batch."""
    from examples import digits  # noqa: PLC0415  # needs the extra `examples`

    x, _, y, _ = digits.load(0)
    model = digits.CNN()
    variables = model.init(jax.random.key(0), x[:1], train=True)
    tx = jf.distributed_optimizer(optax.adam(5e-3))
    state = digits.TrainState.create(apply_fn=model.apply, tx=tx, **variables)
    return digits.train_step, (state, next(digits.batches(x, y, seed=0)))


class Visitor:
    """Uses a page, counts clicks, and notes whatever goes wrong."""

    def __init__(self, browser: Any, scheme: str = "light") -> None:
        size = {"width": 1440, "height": 860}
        self.page = browser.new_page(viewport=size, color_scheme=scheme)
        self.clicks = 0
        self.faults: list[str] = []
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", self._asked)
        self.page.on("dialog", lambda dialog: self.faults.append(dialog.message))

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("file:", "about:")):
            self.faults.append(f"asked for {request.url}")

    def open(self, path: Path, at: str = "") -> "Visitor":
        self.page.goto(f"{path.as_uri()}{at}")
        return self

    def click(self, selector: str, text: str = "") -> None:
        self.clicks += 1
        self.page.locator(selector, has_text=text or None).first.click()

    @property
    def card(self) -> str:
        return str(self.page.locator("#card").inner_text())

    @property
    def panel(self) -> str:
        return str(self.page.locator("#panel").inner_text())


@pytest.fixture
def visitor(browser: Any) -> Iterator[Visitor]:
    found = Visitor(browser)
    yield found
    assert found.faults == []
    found.page.close()


VIEWS = (
    "overview",
    "passes",
    "operators",
    "graph",
    "modules",
    "parameters",
    "memory",
    "traffic",
    "programs",
)


def test_every_view_draws_something(visitor: Visitor, files: dict[str, Path]) -> None:
    for name in ("small", "servers", "zoo"):
        visitor.open(files[name])
        for view in VIEWS:
            visitor.click(f"#tab-{view}")
            assert len(visitor.panel) > 40, (name, view)


def test_predicted_time_is_shown_beside_what_was_measured(
    visitor: Visitor, files: dict[str, Path]
) -> None:
    visitor.open(files["small"])
    assert "not measured" in visitor.panel
    assert "no rate measured" in visitor.panel
    visitor.page.goto("about:blank")
    visitor.open(files["measured"])
    work = visitor.page.evaluate("PROGRAMS[0].raw.work")
    predicted = work[0] / 1e9 + work[1] / 1e8
    assert f"{float(f'{predicted * 1000:.2g}'):g} ms predicted" in visitor.panel
    assert "median of 7 calls" in visitor.panel
    assert "250 ms" in visitor.panel
    assert "of training" not in visitor.panel
    visitor.page.goto("about:blank")
    visitor.open(files["trainer"])
    assert "measured: its compiled blocks" in visitor.panel
    assert "a step's compiled blocks, measured" in visitor.panel
    assert "median of 3 steps of training" in visitor.panel
    assert "waiting for servers" in visitor.panel
    assert "120 ms" in visitor.panel


def test_which_pass_put_this_all_reduce_here(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["small"])
    visitor.click("#tab-traffic")
    visitor.click("#panel tr.pickable", "c_allreduce_sum")
    assert "Put here by the pass grad_allreduce, number 2." in visitor.card
    assert visitor.clicks <= 4


def test_which_line_made_this_operator(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["small"])
    visitor.click("#tab-operators")
    visitor.click(".row", "Dense_1.product")
    assert "app/model.py:5" in visitor.card
    assert "x = layer_5(x)" in visitor.card
    assert visitor.clicks <= 4


def test_which_server_updates_this_parameter(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["servers"])
    visitor.click("#tab-parameters")
    visitor.click(".row", "params/Dense_1/kernel")
    card = visitor.card
    assert "params/Dense_1/kernel.block0: rows 0 to 127, held by 127.0.0.1:617" in card
    assert "writes params/Dense_1/kernel.block0 in block" in card
    assert visitor.clicks <= 4
    visitor.click("#card .update .link")  # and on to the operator there
    assert "jax.sub" in visitor.card


def test_what_takes_the_most_memory(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["small"])
    visitor.click("#tab-memory")
    assert "At the peak" in visitor.panel
    assert "alive then" in visitor.panel
    assert visitor.clicks <= 4


def test_what_would_travel_with_4_servers(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["small"])
    visitor.click("#tab-traffic")
    visitor.click("#panel .link", "4 servers")
    assert "server 3" in visitor.panel
    assert visitor.clicks <= 4


def test_what_travels_between_devices(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["small"])
    visitor.click("#tab-traffic")
    assert "Bytes on every link in a step, 4 devices" in visitor.panel
    assert "device 3\tdevice 0" in visitor.panel


def test_a_pass_shows_what_it_changed(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["small"])
    visitor.click(".stage", "grad_allreduce")
    page = visitor.page
    assert page.locator(".cell.added").count() > 2
    assert "unchanged lines" in visitor.panel
    before = page.locator(".row.fold").count()
    visitor.click(".row.fold")
    assert page.locator(".row.fold").count() < before
    visitor.click(".cell.added")
    assert "Its text" in visitor.card.replace("ITS TEXT", "Its text")


def test_source_operator_and_text_follow_each_other(
    visitor: Visitor, files: dict[str, Path]
) -> None:
    visitor.open(files["small"], "#view=operators")
    visitor.click(".pane:first-child .row", "layer_5(x)")
    assert "app/model.py:5" in visitor.card
    assert visitor.page.locator(".row.near").count() > 1
    visitor.click(".row.near")
    assert visitor.page.locator(".pane:first-child .row.on").inner_text().strip().startswith("5")


def test_functions_fold_by_their_calls(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["calls"], "#view=graph&fold=functions")
    keys = visitor.page.evaluate("[...lastGraph.boxes.byKey.keys()]")
    inside = "forward/step()/loss()"
    assert {f"{inside}/layer()", f"{inside}/layer()~2"} <= set(keys)
    visitor.page.goto("about:blank")
    visitor.open(files["calls"], "#view=modules&fold=functions")
    visitor.click(".row", "loss()")
    assert visitor.page.locator(".row", has_text="layer()").count() >= 2
    assert "y = layer(y)" in visitor.panel


def test_a_call_shows_the_operators_that_come_from_it(
    visitor: Visitor, files: dict[str, Path]
) -> None:
    visitor.open(files["calls"], "#view=operators&op=Dense_0.out")
    assert "step()" in visitor.card
    visitor.click("#card .way .link", "app/train.py:4")
    assert "4 operators" in visitor.card.lower()
    assert visitor.page.locator(".row.near").count() == 4


def test_an_address_leads_back_to_what_was_shown(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["small"])
    visitor.click(".stage", "grad_allreduce")
    visitor.click(".cell.added")
    address, card = visitor.page.evaluate("location.hash"), visitor.card
    assert "pass=grad_allreduce" in address
    assert "op=metrics/loss:c_allreduce_sum" in address
    visitor.open(files["small"])
    visitor.page.goto("about:blank")
    visitor.open(files["small"], address)
    assert visitor.card == card
    visitor.page.goto("about:blank")
    visitor.open(files["small"], "#pass=grad_allreduce&op=Dense_1.product")
    assert visitor.page.locator(".row.on").count() == 1
    visitor.page.goto("about:blank")
    visitor.open(files["small"], "#pass=grad_allreduce")
    assert visitor.page.locator(".cell.added").count() > 0


def test_every_line_has_an_address_of_its_own(visitor: Visitor, files: dict[str, Path]) -> None:
    for name in ("servers", "zoo", "hostile"):
        visitor.open(files[name])
        for names in visitor.page.evaluate("PROGRAMS.map((each) => namesOf(each).op)"):
            assert len(set(names)) == len(names), name
    visitor.page.goto("about:blank")
    visitor.open(files["small"], "#op=params/Dense_1/kernel@GRAD")
    assert visitor.card.startswith("jax.dot_general")
    visitor.page.goto("about:blank")
    visitor.open(files["small"], "#op=params/Dense_1/kernel@GRAD:c_allreduce_sum")
    assert visitor.card.startswith("c_allreduce_sum")


def test_boxes_open_close_and_are_linked(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["large"], "#view=graph")
    page = visitor.page
    assert page.locator(".box.closed").count() > 3
    assert page.locator(".link .label").count() > 3
    run = ".box.closed >> nth=0"
    name = page.locator(run).get_attribute("aria-label")
    page.locator(f"{run} >> .toggle").click()
    assert page.locator(f'.box[aria-label="{name}"]').get_attribute("aria-expanded") == "true"
    page.locator(f'.box[aria-label="{name}"] .toggle').click()
    assert page.locator(f'.box[aria-label="{name}"]').get_attribute("aria-expanded") == "false"
    page.goto("about:blank")
    visitor.open(files["large"], "#view=graph&op=params/Dense_77/kernel@GRAD")
    assert page.locator(".box.on").count() == 1
    label = str(page.locator(".box.on").get_attribute("aria-label"))
    assert label.startswith("dot_general, f32[256,256] Dense_77/kernel@GRAD, partial")
    assert page.locator(".box.on .mark").inner_html() == "P+"
    assert page.locator(".curve.ins").count() == 2
    visitor.click("#tab-operators")  # the same operator is selected there
    assert "Dense_77/kernel@GRAD" in page.locator(".row.on").last.inner_text()


def test_the_graph_is_used_by_keys_alone(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["small"], "#view=graph")
    keys, page = visitor.page.keyboard, visitor.page
    keys.press("j")
    assert visitor.card.startswith("forward")
    keys.press("Enter")
    assert page.locator(".box.on").get_attribute("aria-expanded") == "false"
    keys.press("ArrowDown")
    assert visitor.card.startswith("backward")
    assert page.locator(".box.on").get_attribute("aria-expanded") == "true"
    keys.press("ArrowDown")
    assert "box=backward/Deep" in page.evaluate("location.hash")
    keys.press("p")
    assert visitor.card.startswith("backward")
    before = page.evaluate("lastGraph.drawing.scale")
    keys.press("+")
    assert page.evaluate("lastGraph.drawing.scale") > before
    keys.press("0")
    seen = page.evaluate("[lastGraph.drawing.boxes.root.height, lastGraph.drawing.region(0)[3]]")
    assert seen[0] <= seen[1]


def test_opening_a_level_leaves_something_in_sight(
    visitor: Visitor, files: dict[str, Path]
) -> None:
    visitor.page.set_viewport_size({"width": 700, "height": 600})
    visitor.open(files["zoo"], "#view=graph&fold=functions")
    for _ in range(3):
        visitor.click("#panel .tool button", "Open a level")
        sight = visitor.page.evaluate(IN_SIGHT)
        assert sight > 0


IN_SIGHT = """() => {
  const edge = document.querySelector(".canvas").getBoundingClientRect();
  return [...document.querySelectorAll(".box.op, .box.closed")].filter((box) => {
    const at = box.getBoundingClientRect();
    return at.bottom > edge.top && at.top < edge.bottom && at.right > 0 && at.left < edge.right;
  }).length;
}"""


def test_a_graph_is_drawn_the_same_each_time(visitor: Visitor, files: dict[str, Path]) -> None:
    drawn = []
    for _ in range(2):
        visitor.page.goto("about:blank")
        visitor.open(files["servers"], "#view=graph")
        drawn.append(visitor.page.locator(".canvas").inner_html())
    assert drawn[0] == drawn[1]


def test_boxes_do_not_overlap(visitor: Visitor, files: dict[str, Path]) -> None:
    for name in ("servers", "zoo"):
        visitor.open(files[name], "#view=graph")
        visitor.page.reload()
        visitor.page.evaluate("for (let n = 0; n < 6; n++) lastGraph.drawing.openLevel()")
        assert visitor.page.evaluate(OVERLAPS) == [], name
    visitor.page.goto("about:blank")


OVERLAPS = """() => lastGraph.boxes.all.filter((box) => {
  const drawing = lastGraph.drawing, around = box.parent;
  if (!drawing.open.has(around) || !around.parent) return false;
  const beside = around.items.filter((each) => each !== box);
  const above = (a, b) => a.y + a.height <= b.y, left = (a, b) => a.x + a.width <= b.x;
  const apart = (a, b) => above(a, b) || above(b, a) || left(a, b) || left(b, a);
  const ends = box.x + box.width <= around.width && box.y + box.height <= around.height;
  const inside = box.x >= 0 && box.y >= 0 && ends;
  return !inside || !beside.every((each) => apart(box, each));
}).map((box) => box.key)"""


def test_functions_fold_where_there_are_no_modules(
    visitor: Visitor, files: dict[str, Path]
) -> None:
    visitor.open(files["functions"], "#view=modules")
    assert "train_step()" in visitor.panel
    assert "app/model.py:5" in visitor.panel
    assert "x = layer_5(x)" in visitor.panel
    visitor.click("#tab-graph")
    assert visitor.page.locator(".box.open", has_text="train_step()").count() > 0
    visitor.page.select_option("#panel select", "modules")
    assert "fold=modules" in visitor.page.evaluate("location.hash")


def test_a_large_graph_moves_and_opens_smoothly(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["large"], "#view=graph")
    page, tries = visitor.page, []
    for _ in range(TRIES):
        page.reload()
        opening = page.evaluate(OPENING)
        tries.append([*opening, *page.evaluate(MOVING, 40)])
    assert max(map(min, zip(*tries, strict=True))) <= FRAME_MS, tries
    assert page.evaluate("performance.memory.usedJSHeapSize") < MOST_HEAP_BYTES


OPENING = """() => [1, 2, 3].map(() => {
  const start = performance.now();
  document.querySelectorAll(".tool button")[0].click();
  document.body.offsetHeight;
  return performance.now() - start;
})"""
MOVING = """(steps) => new Promise((done) => {
  const { drawing } = lastGraph, gaps = [];
  let last = 0, step = 0;
  const frame = (now) => {
    if (last) gaps.push(now - last);
    last = now;
    if (step++ === steps) return done(gaps);
    if (step % 4 === 0) drawing.zoom(step < steps / 2 ? 0.8 : 1.25);
    else drawing.move(0, -200);
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""


def test_a_narrow_page_does_not_scroll_sideways(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.page.set_viewport_size({"width": 700, "height": 600})
    visitor.open(files["large"], "#view=passes")
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert visitor.page.evaluate(wide) == 0


def test_a_wrong_address_shows_the_report(visitor: Visitor, files: dict[str, Path]) -> None:
    wrong = "#prog=99&view=<b>&pass=77&op=999999&param=-1&line=x&file=9"
    visitor.open(files["small"], wrong)
    assert "Decisions" in visitor.panel


def test_it_is_used_by_keys_alone(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["small"])
    keys = visitor.page.keyboard
    keys.press("/")
    keys.type("tanh dense_2")
    keys.press("Enter")
    assert "jax.tanh" in visitor.card
    here = visitor.card
    keys.press("j")
    assert visitor.card != here
    keys.press("k")
    assert visitor.card == here
    keys.press("1")
    assert "Decisions" in visitor.panel
    keys.press("[")
    assert visitor.page.locator("#tab-passes").get_attribute("aria-selected") == "true"
    keys.press("?")
    assert visitor.page.locator("#help").is_visible()


def test_programs_with_hardly_anything_in_them_are_shown(
    visitor: Visitor, files: dict[str, Path]
) -> None:
    for name in ("nothing", "empty block", "deep"):
        visitor.page.goto("about:blank")
        visitor.open(files[name])
        for view in VIEWS:
            visitor.click(f"#tab-{view}")
            for key in ("j", "]", "Escape"):
                visitor.page.keyboard.press(key)
            visitor.page.evaluate("preparePrint()")


def test_hostile_names_are_shown_as_text(visitor: Visitor, files: dict[str, Path]) -> None:
    for view in VIEWS:
        visitor.open(files["hostile"], f"#view={view}&op=1&param=1")
        visitor.page.reload()
        assert (
            visitor.page.locator("#panel script, #panel img, #card script, #card img").count() == 0
        )
    visitor.open(files["hostile"], "#view=overview")
    visitor.page.reload()
    for text in HOSTILE[:6]:
        assert text in visitor.panel
    visitor.page.fill("#search", "<img")
    assert "<img src=x onerror=alert(1)>" in visitor.page.locator("#found").inner_text()
    assert visitor.page.title().startswith(HOSTILE[0])


@pytest.mark.parametrize("name", ["large", "zoo", "digits"])
def test_a_report_opens_at_once(name: str, visitor: Visitor, files: dict[str, Path]) -> None:
    times = []
    for _ in range(TRIES):
        visitor.page.goto("about:blank")
        visitor.open(files[name])
        times.append(visitor.page.evaluate("performance.getEntriesByName('drawn')[0].startTime"))
    assert min(times) <= OPENED_MS, times
    assert "grad_allreduce" in visitor.page.locator("#strip").inner_text()


def test_a_large_report_is_searched_at_once(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["large"])
    words = ["dense_77/kernel", "tanh", "app/model.py:99", "allreduce dense_3", "e", "nothing?"]
    visitor.page.fill("#search", "warm")
    tries = [visitor.page.evaluate(SEARCHES, words) for _ in range(TRIES)]
    assert max(map(min, zip(*tries, strict=True))) <= FOUND_MS, tries
    visitor.page.fill("#search", "Dense_77.product")
    assert "Dense_77.product" in visitor.page.locator("#found .hit").first.inner_text()


SEARCHES = """(words) => words.map((word) => {
  const input = document.getElementById("search"), start = performance.now();
  input.value = word;
  input.dispatchEvent(new Event("input"));
  document.body.offsetHeight;
  return performance.now() - start;
})"""
FRAMES = """(steps) => new Promise((done) => {
  const list = document.querySelector("#panel .pane:last-child .list, #panel > .list");
  let last = performance.now(), step = 0;
  const gaps = [];
  const frame = (now) => {
    gaps.push(now - last);
    last = now;
    if (step++ === steps) return done(gaps);
    list.scrollTop = (list.scrollHeight * step) / steps;
    requestAnimationFrame(frame);
  };
  requestAnimationFrame((now) => { last = now; frame(now); });
})"""


def test_a_large_report_scrolls_and_folds_smoothly(
    visitor: Visitor, files: dict[str, Path]
) -> None:
    for view in ("#view=operators", "#view=passes&pass=2"):
        visitor.page.goto("about:blank")
        visitor.open(files["large"], view)
        if view == "#view=operators":
            visitor.page.click("text=Unfold all")
        tries = [visitor.page.evaluate(FRAMES, 60) for _ in range(TRIES)]
        assert max(map(min, zip(*tries, strict=True))) <= FRAME_MS, (view, tries)
    visitor.open(files["large"], "#view=operators")
    visitor.page.reload()
    folding = visitor.page.evaluate(
        """() => [0, 1, 0, 1].map((which) => {
          const start = performance.now();
          document.querySelectorAll(".tool button")[which].click();
          document.body.offsetHeight;
          return performance.now() - start;
        })"""
    )
    assert sorted(folding)[1] <= FRAME_MS, folding


def test_a_large_report_takes_little_memory(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["large"], "#view=operators")
    visitor.page.fill("#search", "dense")
    assert visitor.page.evaluate("performance.memory.usedJSHeapSize") < MOST_HEAP_BYTES
    sizes = [size for process in renderers(os.getpid()) if (size := private_bytes(process))]
    assert sizes
    assert max(sizes) < MOST_BYTES, sizes  # of a whole process that draws a page


def renderers(parent: int) -> Iterator[int]:
    """Yields the processes below a process that draw pages."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                number = int(status.parent.name)
                yield from renderers(number)
                if b"--type=renderer" in (status.parent / "cmdline").read_bytes():
                    yield number


def private_bytes(process: int) -> int:
    """Returns the memory that a process shares with no other; 0 if it has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
    return 0


def test_only_what_is_visible_is_drawn(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["large"], "#view=operators")
    visitor.page.click("text=Unfold all")
    assert visitor.page.locator(".row").count() < 200


def test_it_can_be_printed(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["small"], "#view=passes&pass=2")
    visitor.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    visitor.page.emulate_media(media="print")
    printed = visitor.page.locator("#print").inner_text()
    assert "gradients: 6 all-reduces" in printed
    assert "c_allreduce_sum" in printed
    assert visitor.page.locator("#panel").is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_graph_is_printed_as_it_is_open(
    browser: Any, files: dict[str, Path], scheme: str
) -> None:
    visitor = Visitor(browser, scheme)
    visitor.open(files["small"], "#view=graph")
    visitor.click(".tool button", "Open a level")
    shown = visitor.page.evaluate("lastGraph.drawing.shown().length")
    visitor.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    visitor.page.emulate_media(media="print")
    printed = visitor.page.locator("#print .piece .box")
    names = set(printed.evaluate_all("(boxes) => boxes.map((box) => box.dataset.box)"))
    assert len(names) == shown  # a box at an edge is on both pages
    assert visitor.page.locator("#print .piece").first.bounding_box()["width"] > 300
    light = visitor.page.evaluate("getComputedStyle(document.body).getPropertyValue('--paper')")
    assert light == "#ffffff"
    visitor.page.emulate_media(media="screen")
    assert visitor.page.evaluate("lastGraph.drawing.shown().length") == shown
    assert visitor.faults == []
    visitor.page.close()


def test_the_graph_is_printed_from_any_view(visitor: Visitor, files: dict[str, Path]) -> None:
    visitor.open(files["small"], "#view=overview")
    visitor.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert visitor.page.locator("#print .piece .box").count() > 5
    assert len(visitor.page.pdf()) > 20_000
    assert visitor.page.locator("#print *").count() == 0  # no second copy stays in memory


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(browser: Any, files: dict[str, Path], scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    visitor = Visitor(browser, scheme)
    for view in VIEWS:
        visitor.page.goto("about:blank")
        visitor.open(files["servers"], f"#view={view}&pass=2&op=40")
        found = axe.run(visitor.page).response["violations"]
        serious = [
            (view, fault["id"], [node["html"][:200] for node in fault["nodes"][:3]])
            for fault in found
            if fault["impact"] in {"serious", "critical"}
        ]
        assert serious == []
    visitor.page.close()
