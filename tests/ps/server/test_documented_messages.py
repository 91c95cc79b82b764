"""The table of messages in docs/parameter-servers.md lists their actual fields."""

import re
from pathlib import Path

from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.messages import Kind
from tests.ps.server.common import ENDPOINT, SGD, Bench, hello, sgd_state

DOCS = Path(__file__).parents[3] / "docs" / "parameter-servers.md"
ANSWERS = {Kind.WELCOME, Kind.VALUES, Kind.REDUCED, Kind.ROWS, Kind.OK}


def rows() -> dict[str, list[str]]:
    """Returns the row of each kind: its fields, and its answer."""
    table = DOCS.read_text().partition("## Messages")[2]
    found = re.findall(r"^\| `(\w+)`[^|]*\|([^|]*)\|([^|]*)\|$", table, re.MULTILINE)
    return {kind: [body, answer] for kind, body, answer in found}


def test_every_kind_is_there() -> None:
    kinds = {kind.value for kind in Kind}
    answers = {kind.value for kind in ANSWERS}
    assert rows().keys() == kinds - answers
    told = "".join(answer for _, answer in rows().values())
    assert all(f"`{answer}`" in told for answer in answers)


def test_hellos_and_heartbeats_hold_what_is_written() -> None:
    table, bench = rows(), Bench().started(SGD, sgd_state())
    said = TrainerIdentity("j", 0, 2, (ENDPOINT,), "abc", []).hello(Timeouts())
    welcome = bench.one(0, Kind.HELLO, body=hello(0)).body
    pulse = bench.one(0, Kind.HEARTBEAT, body={"doing": "testing"}).body
    for fields, cell in (
        (said, table["hello"][0]),
        (welcome, table["hello"][1]),
        (pulse, table["heartbeat"][1]),
    ):
        assert [name for name in fields if f"`{name}`" not in cell] == []
