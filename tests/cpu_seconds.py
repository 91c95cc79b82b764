"""pytest plugin that records the CPU seconds of each test, with a command that sums them up.

Wall time of a test doubles if another worker runs beside it; CPU time does not.

    python -m pytest -n 2 --dist loadfile -p tests.cpu_seconds --cpu-seconds=FILE
    python -m tests.cpu_seconds FILE
"""

import json
import resource
import sys
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

FILES, TESTS = 40, 60


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", type=Path, help="append a line a test to this file")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Records the CPU time of a test, its fixtures and its finished child processes."""
    before = _cpu_seconds()
    result = yield
    if (path := item.config.getoption("cpu_seconds")) is not None:
        line = json.dumps([item.nodeid, round(_cpu_seconds() - before, 3)])
        with path.open("a", encoding="utf-8") as file:  # workers append whole lines concurrently
            file.write(f"{line}\n")
    return result


def _cpu_seconds() -> float:
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def tables(path: Path) -> str:
    """Returns the sums by folder, by file and by test, as Markdown."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found: list[tuple[str, float]] = [tuple(json.loads(line)) for line in lines]
    total = sum(seconds for _, seconds in found)
    return "\n\n".join(
        (
            f"{total:,.0f} CPU seconds in {len(found):,} tests.",
            _table("folder", _sums(found, _folder)),
            _table("file", _sums(found, lambda test: test.partition("::")[0]), FILES),
            _table("test", _sums(found, lambda test: test), TESTS),
        )
    )


def _folder(test: str) -> str:
    file = Path(test.partition("::")[0])
    return "/".join(file.parts[:2]) if len(file.parts) > 2 else "tests/*.py"


def _sums(found: list[tuple[str, float]], key: Callable[[str], str]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for test, seconds in found:
        sums[key(test)] += seconds  # type: ignore[assignment]  # a Counter of seconds
    return sums


def _table(head: str, sums: Counter[str], most: int | None = None) -> str:
    rows = [f"| `{name}` | {seconds:.1f} |" for name, seconds in sums.most_common(most)]
    return "\n".join([f"| {head} | CPU s |", "| --- | --- |", *rows])


if __name__ == "__main__":
    sys.stdout.write(tables(Path(sys.argv[1])) + "\n")
