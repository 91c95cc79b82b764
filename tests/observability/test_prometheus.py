"""Prometheus itself evaluates every expression of the Grafana dashboard over a server's metrics.

It takes Debian's `prometheus`; the test is left out where it is missing. `test_dashboard` checks
the same expressions by a parser, everywhere.
"""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxfleet.ps.server.metrics import MetricsExporter
from tests.observability.test_dashboard import (
    BOARD,
    FOLDER,
    all_metrics,
    expressions,
    with_values,
)

PROMETHEUS = shutil.which("prometheus")
WAIT_S = 60.0
pytestmark = [
    pytest.mark.grid,
    pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus, such as Debian's"),
]
Ask = Callable[..., Any]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Starts Prometheus with docs/watching's configuration; returns a function that asks it."""
    folder = tmp_path_factory.mktemp("prometheus")
    exporter, port = MetricsExporter(), free_port()
    exporter.publish(all_metrics())
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    (scraped,) = config["scrape_configs"]
    del scraped["authorization"]
    scraped["static_configs"] = [{"targets": [f"127.0.0.1:{exporter.start('127.0.0.1', 0)}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = (folder / "log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)

    def ask(path: str, **words: str) -> Any:
        address = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            found = json.loads(answer.read())
        assert found["status"] == "success"
        return found["data"]

    try:
        _wait_for_scrapes(ask, process, folder / "log")
        yield ask
    finally:
        process.terminate()
        process.wait(timeout=30)
        exporter.close()
        log.close()


def _wait_for_scrapes(ask: Ask, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until rates are known."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            result = ask("query", query="count_over_time(jaxfleet_server_step[1m])")["result"]
        except OSError:
            result = []
        if result and float(result[0]["value"][1]) >= 3:
            return
        time.sleep(0.2)
    raise AssertionError(log.read_text())


def test_every_expression_has_a_result(ask: Ask) -> None:
    empty = [text for text in expressions() if not _result(ask, text)]
    assert empty == []


def _result(ask: Ask, expression: str) -> Any:
    return ask("query", query=with_values(expression))["result"]


def test_every_variable_has_values(ask: Ask) -> None:
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            inside = variable["definition"].removeprefix("label_values(").removesuffix(")")
            metric, _, label = inside.rpartition(", ")
            assert ask(f"label/{label}/values", **{"match[]": with_values(metric)}), inside
