"""The board in a browser, during a real job whose processes are killed and return."""

import math
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from jaxfleet.board import Watch, serve_board
from jaxfleet.launch.placement import Ports
from jaxfleet.observability import Board, Sample, scrape
from jaxfleet.observability.trainer_metrics import TrainerMetrics
from jaxfleet.ps.server.metrics import MetricsExporter, ServerMetrics
from jaxfleet.transport.messages import Plain
from tests.faults.cluster import PATIENT_S, Jobs

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
pytest.importorskip("uvicorn", reason="needs the extra `board`")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, such as Debian's"),
]

EVENT_S = 2.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Page:
    """The board in a browser; notes whatever goes wrong."""

    def __init__(
        self, browser: Any, address: str, scheme: str = "light", *, noting: str = ""
    ) -> None:
        size = {"width": 1240, "height": 1400}
        self.page = browser.new_page(viewport=size, color_scheme=scheme)
        self.faults: list[str] = []
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: self.faults.append(dialog.message))
        self.page.on("request", self._asked)
        self.page.add_init_script(noting)
        self.page.goto(address)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith("http://127.0.0.1:"):
            self.faults.append(f"asked for {request.url}")

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def shows(self, event: str) -> None:
        self.until(lambda: event in self.text("#events"))

    def until(self, has: Callable[[], bool], timeout_s: float = 60.0) -> float:
        """Waits for something on the page; returns the seconds."""
        began = time.monotonic()
        while not has():
            assert time.monotonic() - began < timeout_s, self.text("#events")
            time.sleep(0.05)
        return time.monotonic() - began


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Callable[[list[str]], str]]:
    """Starts boards of servers, and ends them."""
    started: list[subprocess.Popen[bytes]] = []

    def start(addresses: list[str]) -> str:
        log = tmp_path / f"board-{len(started)}.log"
        command = [sys.executable, "-m", "jaxfleet", "top", *addresses, "--wait=120", "--web", "0"]
        with log.open("wb") as out:
            started.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + 120
        while (found := re.search(r"http://\S+", log.read_text())) is None:
            assert started[-1].poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        return found.group()

    yield start
    for process in started:
        process.terminate()
        process.wait(30)


def check_accessible(page: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415  # as playwright

    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["impact"]) for one in found] == []


# Notes when each event is first shown, in seconds of Unix time.
NOTING = """
window.shown = {};
new MutationObserver(() => {
  for (const line of document.querySelectorAll("#events li"))
    window.shown[line.lastElementChild?.textContent] ??= Date.now() / 1000;
}).observe(document, { subtree: true, childList: true });
"""


class Load:
    """Measures for how long this machine keeps a thread waiting that has work to do."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            before = time.monotonic()
            if self._done.wait(0.02):
                return
            self.longest_s = max(self.longest_s, time.monotonic() - before - 0.02)


def test_the_events_of_a_job_are_shown_within_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Any, board: Callable[..., str]
) -> None:
    ports = Ports(2, first=0)
    first = min(int(at.rpartition(":")[2]) for at in ports.endpoints)
    ports.close()
    addresses = [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]
    monkeypatch.setenv("JAXFLEET_METRICS_PORT", str(first))
    options = ["--steps=1000", "--pause=0.1", "--step-timeout=60"]
    caused: dict[str, float] = {}  # by a part of the event's text
    with (
        Load() as load,
        Jobs(
            tmp_path, servers=2, returns_s=60.0, options=options, step_s=60.0, lost_s=PATIENT_S
        ) as jobs,
    ):
        servers = jobs.all_servers()
        seen = Page(browser, board(addresses), noting=NOTING)
        seen.until(lambda: "2 of 2 servers answer" in seen.text("#status"))
        trainers = jobs.all_trainers()
        trainers[0].reaches("step 2.")
        seen.until(lambda: seen.page.locator("#scalar-charts figure").count() == 1)
        check_figures(seen, addresses)
        caused["server 1 is not there"] = time.time()
        servers[1].kill()
        seen.shows("server 1 is not there")
        servers[1] = jobs.server(1)
        seen.shows("server 1 was started again")
        caused["server 1 was started again"] = scrape(addresses[1]).own("start_time_seconds") or 0.0
        trainers[0].reaches("step 40.")
        caused["trainer 1 is gone without a bye"] = time.time()
        trainers[1].kill()
        seen.shows("trainer 1 is gone without a bye")
        caused["no server is left"] = time.time()
        for one in (*servers, trainers[0]):
            one.kill()
        seen.shows("no server is left")
        shown = seen.page.evaluate("window.shown")
    for number in (0, 1):
        assert any(text == f"trainer {number} joined" for text in shown), shown
    late = {}  # of the first event of each cause: the last kill has the first's text, too
    for part, at_s in caused.items():
        late[part] = min(found for text, found in shown.items() if part in text) - at_s
    assert max(late.values()) < EVENT_S + load.longest_s, late
    assert seen.page.locator("canvas").count() >= 8
    assert seen.faults == []


SERVERS, TRAINERS, SCALARS = 4, 8, 3
MOST_MB = 50


def an_hour(watch: Watch, clock: list[float]) -> None:
    """Looks at a job for an hour, of which every look has other figures."""
    for _ in range(3600):
        clock[0] += 1.0
        watch.look()


def busy_server(at_s: float, server: int) -> Sample:
    """Returns the metrics of a server at a time of an hour's job."""
    names = ("server_step", "received_bytes_total", "sent_bytes_total", "block_seconds_total")
    values = {name: at_s * (place + 1.37) for place, name in enumerate(names)}
    values |= {"queued_bytes": 1e6 * math.sin(at_s) ** 2, "resident_bytes": 1e8 + 1e3 * at_s}
    values["server_start_time_seconds"] = at_s // 600 + server  # it returns every ten minutes
    found = Sample(at_s, values, tables={"users": {"table_rows": at_s, "table_bytes_held": at_s}})
    for trainer in range(TRAINERS):
        seconds = {"trainer_late_seconds_total": at_s * trainer / 10, "trainer_step": at_s}
        found.of_trainers[trainer] = {**seconds, "trainer_resident_bytes": 2e8 + at_s}
        found.scalars[trainer] = {f"m{n}": math.cos(at_s + n) for n in range(SCALARS)}
    return found


def test_an_hour_of_eight_trainers_and_four_servers_fits_fifty_megabytes(browser: Any) -> None:
    clock = [1.8e9]
    addresses = [f"server:{number}" for number in range(SERVERS)]
    job = Board(addresses, lambda at: busy_server(clock[0] - 1.8e9, int(at.partition(":")[2])))
    watch = Watch(job, now=lambda: clock[0])
    an_hour(watch, clock)
    assert watch.history.nbytes < MOST_MB * 1e6
    address: queue.Queue[str] = queue.Queue()
    options = {"host": "127.0.0.1", "port": 0, "on_listening": address.put}
    threading.Thread(target=serve_board, args=(watch,), kwargs=options, daemon=True).start()
    seen = Page(browser, address.get(timeout=30))
    seen.until(lambda: seen.page.evaluate("model.times.length") >= 3600)
    seen.page.keyboard.press("3")  # all charts draw the hour
    seen.until(lambda: seen.page.locator("canvas").count() >= 10)
    assert seen.page.evaluate("model.series.length") == watch_series()
    session = seen.page.context.new_cdp_session(seen.page)
    session.send("HeapProfiler.collectGarbage")
    used = session.send("Runtime.getHeapUsage")
    assert used["usedSize"] / 1e6 < MOST_MB, used
    assert used["usedSize"] > 3600 * watch_series()  # it is the page's heap
    assert seen.faults == []


def watch_series() -> int:
    """Returns the number of lines: of each server's figures, and of each trainer's."""
    return SERVERS * 8 + TRAINERS * (3 + SCALARS)


def check_figures(seen: Page, addresses: list[str]) -> None:
    """Compares the page's steps and memory with the servers' own, which go on meanwhile."""
    before = [scrape(address).values for address in addresses]
    time.sleep(2.5)
    rows = [
        row.locator("td").all_inner_texts() for row in seen.page.locator("#servers tbody tr").all()
    ]
    after = [scrape(address).values for address in addresses]
    for row, old, new in zip(rows, before, after, strict=True):
        assert old["server_step"] <= int(row[2].replace(",", "")) <= new["server_step"]
        assert float(row[9].removesuffix(" MB")) == pytest.approx(
            new["resident_bytes"] / 1e6, rel=0.2
        )


HOSTILE = "<script>alert(1)</script>"
NAMES = [HOSTILE, '"><img src=x onerror=alert(1)>', "naïve/损失 \u202e", "x" * 500]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hostile_names_are_text_and_the_page_is_accessible(
    browser: Any, board: Callable[..., str], scheme: str
) -> None:
    scalars = {name: float(n) for n, name in enumerate(NAMES)} | {"loss": float("nan")}
    tables: dict[str, Plain] = {f"{n}": {"rows": n} for n in range(10_000)}
    tables[HOSTILE] = {"rows": 10**9, "bytes_held": 10**9}
    trainer = TrainerMetrics(0, 7, 0.1, 0.2, HOSTILE, has_left=False, scalars=scalars)
    metrics = MetricsExporter()
    counted: dict[str, Plain] = {"step": 6, "tables": tables}
    metrics.publish(ServerMetrics(HOSTILE, counted, trainers=(trainer,), resident_bytes=10**8))
    try:
        seen = Page(browser, board([f"127.0.0.1:{metrics.start('127.0.0.1', 0)}"]), scheme)
        seen.until(lambda: HOSTILE in seen.text("#tables"))
        assert HOSTILE in seen.text("#trainers")
        assert "10,001 tables" in seen.text("#table-count")
        assert seen.page.locator("#tables tbody tr").count() == 200
        titles = seen.page.locator("#scalar-charts h3").all_inner_texts()
        assert HOSTILE in titles
        assert all(len(title) <= 200 for title in titles)
        seen.page.locator("#scalar-filter").fill("script")
        assert seen.text("#scalar-count").startswith("1 of 5")
        seen.page.keyboard.press("Tab")
        seen.page.locator("figure:visible").first.focus()
        seen.page.keyboard.press("p")
        assert "paused" in seen.text("#status")
        check_accessible(seen.page)
        assert seen.faults == []
    finally:
        metrics.close()
