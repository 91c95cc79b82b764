"""The board in a browser, during a real job whose server is killed and returns."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxfleet.launch.placement import Ports
from jaxfleet.observability import Sample, scrape
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
MARGIN_S = 3.0  # for a busy machine


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Page:
    """The board in a browser; notes whatever goes wrong."""

    def __init__(self, browser: Any, address: str, scheme: str = "light") -> None:
        size = {"width": 1240, "height": 1400}
        self.page = browser.new_page(viewport=size, color_scheme=scheme)
        self.faults: list[str] = []
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: self.faults.append(dialog.message))
        self.page.on("request", self._asked)
        self.page.goto(address)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith("http://127.0.0.1:"):
            self.faults.append(f"asked for {request.url}")

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def until(self, has: Callable[[], bool], timeout_s: float = 60.0) -> float:
        """Waits for something on the page; returns the seconds."""
        began = time.monotonic()
        while not has():
            assert time.monotonic() - began < timeout_s, self.text("main")
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


def test_a_job_whose_server_dies_and_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Any, board: Callable[..., str]
) -> None:
    ports = Ports(2, first=0)
    addresses = sorted(ports.endpoints, key=lambda at: int(at.rpartition(":")[2]))
    ports.close()
    first = int(addresses[0].rpartition(":")[2])
    addresses = [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]
    monkeypatch.setenv("JAXFLEET_METRICS_PORT", str(first))
    options = ["--steps=220", "--pause=0.1", "--step-timeout=60"]
    with Jobs(
        tmp_path, servers=2, returns_s=60.0, options=options, step_s=60.0, lost_s=PATIENT_S
    ) as jobs:
        servers, trainers = jobs.all_servers(), jobs.all_trainers()
        trainers[0].reaches("step 2.")
        seen = Page(browser, board(addresses))
        seen.until(lambda: "2 of 2 servers answer" in seen.text("#status"))
        seen.until(lambda: seen.page.locator("#scalar-charts figure").count() == 1)
        check_figures(seen, addresses)
        servers[1].kill()
        took_s = seen.until(lambda: "server 1 is not there" in seen.text("#events"))
        assert took_s < EVENT_S + MARGIN_S
        servers[1] = jobs.server(1)
        seen.until(lambda: isinstance(_scraped(addresses[1]), Sample))
        took_s = seen.until(lambda: "server 1 was started again" in seen.text("#events"))
        assert took_s < EVENT_S + MARGIN_S
        assert [one.ends() for one in (*trainers, *servers)] == [0, 0, 0, 0]
        seen.until(
            lambda: (
                "no server answers any more" in seen.text("#events")
                or "ended" in seen.text("#events")
            )
        )
        assert seen.page.locator("canvas").count() >= 8
        assert seen.faults == []


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


def _scraped(address: str) -> Sample | None:
    try:
        return scrape(address)
    except OSError:
        return None


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
