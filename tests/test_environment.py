"""Only `jaxfleet.env` reads the environment."""

import re
from pathlib import Path

from jaxfleet.env.meanings import MEANINGS

ROOT = Path(__file__).parents[1]
READS = re.compile(r"\b(os\.environ|getenv|from os import environ)\b")


def test_nothing_else_reads_the_environment() -> None:
    files = [*ROOT.glob("jaxfleet/**/*.py"), *ROOT.glob("passes/**/*.py")]
    readers = {str(file.relative_to(ROOT)) for file in files if READS.search(file.read_text())}
    assert readers  # the search finds the known readers
    assert {Path(reader).parent for reader in readers} == {Path("jaxfleet/env")}


def test_every_variable_that_is_read_has_a_meaning_and_the_other_way_round() -> None:
    files = [file for file in ROOT.glob("jaxfleet/env/*.py") if file.name != "meanings.py"]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    read = set(re.findall(r'"([A-Z]+_[A-Z_]*[A-Z]|FLAGS_[a-z_]+|PYTHONPATH|no\w*_proxy)"', text))
    threads = {name for name in MEANINGS if re.fullmatch(r"FLAGS_rpc_\w+_thread_num", name)}
    assert read == MEANINGS.keys() - threads
