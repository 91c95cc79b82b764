"""Runs the blocks of pages as a reader who pastes them: in order, in one fresh process a page.

    python -m tests.docs.run_pages docs/steps.md docs/tables.md

Each page gets a temporary folder with a link to examples/, and a process forked from one that has
imported JAX and not started it, so that a page may choose its devices. `--grid` also runs the
commands that take long. The exit status is 1 if a page fails; `--json` prints the results for a
test.
"""

import argparse
import doctest
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.docs.blocks import ROOT, Block, blocks_of, is_run
from tests.docs.printed_lines import missing_lines

TIMEOUT_S = 240  # of a page
GRID_TIMEOUT_S = 900  # the same with the commands that take long
_PRELOADED = ("jax.numpy", "optax", "numpy", "jaxfleet.runtime", "jaxfleet.capture")
_SECONDS = re.compile(r"\b\d+(\.\d+)? (m|u|n)?s\b")
_OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Result:
    """What running a page came to: nothing in `failure` if all went well."""

    page: str
    failure: str
    seconds: float


class PageError(Exception):
    """A block did something else than its page says."""


def run_page(page: str, *, in_grid: bool = False) -> Result:
    """Runs a page in a process of its own, in the grid with the commands that take long."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        work = Path(folder) / "work"
        work.mkdir()
        (work / "examples").symlink_to(ROOT / "examples")
        child = os.fork()
        if not child:
            _run_and_exit(page, work, log, in_grid=in_grid)
        status = _wait(child, GRID_TIMEOUT_S if in_grid else TIMEOUT_S)
        failure = "" if status == 0 else log.read_text(encoding="utf-8", errors="replace")
        if status and not failure.strip():
            failure = f"{page}: it ended with status {status}"
    return Result(page, failure, round(time.monotonic() - started, 1))


def _wait(child: int, timeout_s: float) -> int:
    """Returns the exit status of a child, which ends with its group after the time limit."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run_and_exit(page: str, work: Path, log: Path, *, in_grid: bool) -> None:
    """Runs a page in this process, whose output and errors go to a file."""
    status = 1
    try:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            os.chdir(work)
            sys.path[0] = ""  # as `python` has it without a script
            _run_blocks(blocks_of(page), in_grid=in_grid)
            status = 0
    except BaseException:  # noqa: BLE001  # the log has it; pytest's own handlers must not run here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_blocks(blocks: Sequence[Block], *, in_grid: bool) -> None:
    module = types.ModuleType("__main__")  # so that what a block defines has a module, as pasted
    sys.modules["__main__"] = module
    sys.stdout = printed = io.StringIO()
    last: str | None = None  # output of the last commands; None if they were left out
    for block in blocks:
        name = block.marked("file")
        if name:
            Path(name).write_text(block.text, encoding="utf-8")
            importlib.invalidate_caches()
        elif block.marked("output") is not None:
            _compare(block, printed.getvalue())
            printed.seek(0)
            printed.truncate()
        elif block.marker.startswith("prints"):
            _find_lines(block, last)
        elif block.language == "python":
            _run_python(block, module)
        elif is_run(block, in_grid=in_grid):
            last = _run_bash(block)
            printed.write(last)
        elif block.marked("run"):
            last = None


def _run_python(block: Block, module: types.ModuleType) -> None:
    # Line numbers and lines are those of the page, in tracebacks and in what jaxfleet prints.
    text = "\n" * (block.line - 1) + block.text
    code = compile(text, str(ROOT / block.page), "exec")
    expected = block.marked("raises")
    try:
        exec(code, vars(module))  # noqa: S102  # our own page
    except Exception as error:
        if expected != type(error).__name__:
            raise
    else:
        if expected is not None:
            raise PageError(f"{block.place}: the block did not raise {expected}")


def _run_bash(block: Block) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", block.text],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise PageError(f"{block.place}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def _compare(block: Block, printed: str) -> None:
    """Compares as doctest does, with `...` for any text; durations may differ."""
    want, got = (_SECONDS.sub("0 s", text).strip() + "\n" for text in (block.text, printed))
    checker = doctest.OutputChecker()
    if not checker.check_output(want, got, _OUTPUT):
        example = doctest.Example("", want)
        difference = checker.output_difference(example, got, _OUTPUT | doctest.REPORT_NDIFF)
        raise PageError(f"{block.place}: the blocks above print something else\n{difference}")


def _find_lines(block: Block, printed: str | None) -> None:
    if printed is None:
        return
    in_order = block.marked("prints unordered") is None
    if missing := missing_lines(printed, block.text, in_order=in_order):
        lines = "\n".join(missing)
        raise PageError(f"{block.place}: not printed:\n{lines}\nbut:\n{printed}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the pages that the arguments name."""
    parser = argparse.ArgumentParser(description="Runs the blocks of pages in fresh processes.")
    parser.add_argument("pages", nargs="+", metavar="PAGE")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--grid", action="store_true", help="also run commands that take long")
    args = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in _PRELOADED:
        importlib.import_module(name)
    results = [run_page(page, in_grid=args.grid) for page in args.pages]
    if args.json:
        sys.stdout.write(json.dumps([asdict(result) for result in results]) + "\n")
        return 0
    for result in results:
        what = "failed" if result.failure else "ran"
        sys.stdout.write(f"{result.page}: {what}, {result.seconds} s\n{result.failure}")
    return int(any(result.failure for result in results))


if __name__ == "__main__":
    sys.exit(main())
