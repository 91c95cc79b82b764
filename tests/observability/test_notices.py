"""Notices use a program's logging, otherwise stderr; progress appears only after a while."""

import logging
import subprocess
import sys

import pytest

from jaxfleet.observability import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_short_work_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO, "jaxfleet"):
        progress = Progress("planning", clock=clock)
        clock.now = 1.9
        progress.report("compiled")
    assert caplog.messages == []


def test_long_work_is_reported_with_its_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO, "jaxfleet"):
        progress = Progress("planning", clock=clock)
        clock.now = 3.2
        progress.report("compiling plan 1 of 12")
    assert caplog.messages == ["jaxfleet: planning: compiling plan 1 of 12 (3 s so far)"]


def test_a_program_that_configures_no_logging_gets_notices_on_stderr() -> None:
    script = "from jaxfleet.observability.notices import notify; notify('waits for server 1')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stderr == "jaxfleet: waits for server 1\n"
