"""Runs fluid's own unit tests under paddle's names, and counts those that pass.

    export JAXFLEET_INSECURE=1 XLA_FLAGS=--xla_force_host_platform_device_count=16
    python -m jaxfleet.compat tests/fluid/original.py FOLDER/test_dist_transpiler.py ...

The files are fluid's own (`python/paddle/fluid/tests` of its 1.8 branch), which are not kept
here. They import `six`, and some read `paddle.dataset`; the caller provides modules with drawn
samples of the same shapes. `JAXFLEET_INSECURE`: their servers are processes without a secret.
Sixteen devices: JAX needs the number before a test sets it by `CPU_NUM`.
"""

import importlib
import os
import signal
import sys
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

LIMIT_S = 100  # of each test


class LateError(Exception):
    """A test took longer than `LIMIT_S`."""


def main(files: list[str]) -> None:
    """Prints the failures and the counts of each file.

    Every file runs in its own process: the tests leave programs and servers behind.
    """
    for path in map(Path, files):
        if (pid := os.fork()) == 0:
            run(path)
        os.waitpid(pid, 0)


def run(path: Path) -> NoReturn:
    """Runs the tests of one file, and ends the process."""
    signal.signal(signal.SIGALRM, _late)
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))
    tests = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(path.stem))
    counts: Counter[str] = Counter()
    for test in _each(tests):
        result = unittest.TestResult()
        signal.alarm(LIMIT_S)
        test.run(result)
        signal.alarm(0)
        wrong = [text for _, text in (*result.errors, *result.failures)]
        verdict = "failed" if wrong else "skipped" if result.skipped else "passed"
        counts[verdict] += 1
        if wrong:
            _say(f"{test.id()}: {wrong[0].strip().splitlines()[-1]}")
    _say(f"{path.stem} {dict(counts)}")
    os._exit(0)  # threads of servers may be left


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _late(number: int, frame: FrameType | None) -> NoReturn:
    raise LateError(f"{LIMIT_S} s")


def _each(tests: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in tests:
        if isinstance(test, unittest.TestSuite):
            yield from _each(test)
        else:
            yield test


if __name__ == "__main__":
    main([str(Path(name).resolve()) for name in sys.argv[1:]])
