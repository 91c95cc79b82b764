"""Whole tables over servers, as with one store: deleted rows, statistics, and all rows."""

from typing import Any

import numpy as np
import pytest

from jaxfleet.errors import ProgramError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.remote_tables import RemoteTables
from jaxfleet.tables import ByScore, TableSpec, TableStore, Unseen
from jaxfleet.tables.access import LiveTable
from jaxfleet.tables.merge_pushes import merge
from jaxfleet.transport.memory_network import MemoryNetwork
from jaxfleet.transport.messages import Kind, Message
from tests.ps.test_remote_tables import play

SPEC = TableSpec(name="users", dim=3, evictions=(Unseen(1),))
STEPS = (1, 2, 3, 4)


def keys_of(step: int) -> np.ndarray:
    return np.arange(20 * step, 20 * step + 60) * (2**53 + 5)


def trained(number: int, client: Client, tables: RemoteTables) -> Any:
    """Trains, with a shrink on the way; returns every observed part of the table."""
    gone = []
    for step in STEPS:
        client.next_step(8)
        keys = keys_of(step)
        tables.look_up("users", keys)
        tables.push("users", keys, np.full((60, 3), step + number, np.float32))
        if step in {2, 4} and number == 0:  # no trainer can be past this push
            gone += [tables.shrink("users"), tables.shrink("users")]
            if step == 4:
                return gone, tables.live("users").export(), tables.stats()["users"]
    return None


def wanted() -> Any:
    store, gone = TableStore(SPEC), []
    for step in STEPS:
        pushes = [
            (keys_of(step), np.full((60, 3), step + trainer, np.float32)) for trainer in (0, 1)
        ]
        store.update(*merge(pushes), step=step)
        if step in {2, 4}:
            gone += [store.shrink(step + 1), 0]
    return gone, LiveTable(SPEC, store.live).export(), store.stats()


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_what_goes_and_what_stays_is_as_in_one_store(servers: int) -> None:
    gone, (keys, rows), figures = play(trained, servers=servers, tables=[SPEC])[0]
    own_gone, (own_keys, own_rows), own_figures = wanted()
    assert gone == own_gone
    assert sum(gone) > 40
    np.testing.assert_array_equal(keys, own_keys)
    np.testing.assert_array_equal(rows, own_rows)
    for name in ("rows", "evicted", "bytes_live"):
        assert figures[name] == own_figures[name]


def test_requests_that_come_twice_take_rows_out_once() -> None:
    score = ByScore(nonclk_coeff=1.0, click_coeff=1.0, decay=0.5, threshold=0.3)
    table = TableSpec(name="users", dim=3, evictions=(score,))

    def script(_: int, client: Client, tables: RemoteTables) -> list[int]:
        client.next_step(8)
        keys = np.arange(10)
        shows = np.array([1.0] * 5 + [2.0] * 5, np.float32)
        tables.push("users", keys, np.ones((10, 3), np.float32), shows=shows, clicks=shows)
        return [tables.shrink("users") for _ in range(3)]

    network = MemoryNetwork(faults=lambda _, __: 2)
    assert play(script, servers=2, trainers=1, tables=[table], network=network) == [[0, 5, 5]]


def test_rows_are_given_out_a_batch_at_a_time_and_look_ups_between_do_no_harm() -> None:
    batches = 0

    def heard(kind: Any, message: Message) -> int:
        nonlocal batches
        del kind
        batches += message.kind is Kind.ROWS and "next" in message.body
        return 1

    def script(_: int, client: Client, tables: RemoteTables) -> None:
        client.next_step(8)
        keys = np.arange(150_000)
        first = tables.look_up("users", keys).copy()
        tables.push("users", keys[:0], first[:0])
        found = []
        for batch in tables.live("users").batches():
            assert len(batch.keys) < 70_000
            found.append(batch)
            tables.look_up("users", np.arange(-len(found), 0))
        given = np.concatenate([batch.keys for batch in found])
        rows = np.concatenate([batch.rows for batch in found])
        mine = np.flatnonzero(given >= 0)
        assert len(given) == len(np.unique(given))
        np.testing.assert_array_equal(np.sort(given[mine]), keys)
        np.testing.assert_array_equal(rows[mine], first[given[mine]])
        assert len(found) == 4  # two of each server

    network = MemoryNetwork(faults=heard)
    play(script, servers=2, trainers=1, tables=[SPEC], network=network)
    assert batches == 4 + 2


def test_a_table_that_is_not_there_is_none_of_the_jobs() -> None:
    def script(_: int, __: Client, tables: RemoteTables) -> None:
        for ask in (tables.shrink, tables.live):
            with pytest.raises(ProgramError, match="no table 'cars' in this step, which has users"):
                ask("cars")

    play(script, trainers=1, tables=[SPEC])
