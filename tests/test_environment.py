"""Only `jaxfleet.env` reads the environment."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
READS = re.compile(r"\b(os\.environ|getenv|from os import environ)\b")


def test_nothing_else_reads_the_environment() -> None:
    files = [*ROOT.glob("jaxfleet/**/*.py"), *ROOT.glob("passes/**/*.py")]
    readers = {str(file.relative_to(ROOT)) for file in files if READS.search(file.read_text())}
    assert readers  # the search finds the known readers
    assert {Path(reader).parent for reader in readers} == {Path("jaxfleet/env")}
