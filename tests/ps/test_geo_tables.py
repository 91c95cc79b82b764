"""Tables that trainers update locally, and whose deltas they exchange."""

import numpy as np

from jaxfleet.ps.client.async_tables import GeoTables
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.remote_tables import RemoteTables
from jaxfleet.tables import Adagrad, ByScore, TableSpec, TableStore
from tests.ps.server.table_programs import drawn_rows
from tests.ps.test_remote_tables import play

SPEC = TableSpec(name="users", dim=3, optimizer=Adagrad(0.1, initial=0.1, epsilon=1e-7))
KEYS = np.arange(8) * (2**50 + 1)
STEPS, ROUNDS = 3, 4


def of_trainer(trainer: int, trainers: int) -> np.ndarray:
    """Returns the keys of a trainer: all if it is alone, else all but one of the others'."""
    return KEYS if trainers == 1 else np.delete(KEYS, trainer)


def trained(number: int, client: Client, remote: RemoteTables) -> np.ndarray:
    """Trains some rounds; returns the servers' rows."""
    trainers = client.me.trainers
    tables = GeoTables(remote, [SPEC], k_steps=STEPS, trainers=trainers)
    keys = of_trainer(number, trainers)
    for at in range(ROUNDS * STEPS):
        if at % STEPS == 0:
            client.next_step(8)
        rows = tables.look_up("users", keys)
        tables.push("users", keys, rows + drawn_rows((number, at), len(keys), 3))
    return remote.look_up("users", KEYS).copy()


def expected(trainers: int) -> np.ndarray:
    """Returns the rows by the formula, row by row of each trainer."""
    served = TableStore(SPEC).look_up(KEYS)
    own, old = (np.repeat(served[None], trainers, axis=0) for _ in range(2))
    sums = np.full((trainers, *served.shape), 0.1, np.float32)
    for at in range(ROUNDS):
        sent = np.zeros_like(served)
        for trainer in range(trainers):
            places = np.isin(KEYS, of_trainer(trainer, trainers))
            own[trainer][places] += (served - old[trainer])[places]
            old[trainer][places] = served[places]
            for step in range(at * STEPS, (at + 1) * STEPS):
                grads = own[trainer][places] + drawn_rows((trainer, step), int(places.sum()), 3)
                sums[trainer][places] += grads * grads
                change = 0.1 * grads / np.sqrt(sums[trainer][places] + 1e-7)
                own[trainer][places] -= change.astype(np.float32)
            delta = (own[trainer] - old[trainer])[places] / np.float32(trainers)
            old[trainer][places] += delta
            sent[places] += delta
        served = served + sent
    return served


def test_one_trainer_comes_to_the_rows_that_it_made() -> None:
    (found,) = play(trained, servers=2, trainers=1, tables=[SPEC])
    np.testing.assert_allclose(found, expected(1), rtol=1e-5)  # sums of deltas round differently


def test_rows_of_several_trainers_follow_the_formula() -> None:
    for found in play(trained, servers=3, trainers=2, tables=[SPEC]):
        np.testing.assert_allclose(found, expected(2), rtol=1e-5)


def test_rows_are_fetched_once_a_round_and_sent_where_they_changed() -> None:
    def script(_: int, client: Client, remote: RemoteTables) -> None:
        tables = GeoTables(remote, [SPEC], k_steps=2, trainers=1)
        grads = np.ones((2, 3), np.float32)
        client.next_step(8)
        tables.look_up("users", KEYS)
        before = client.received_bytes
        tables.push("users", KEYS[:2], grads)
        assert client.sent_bytes == KEYS.nbytes
        tables.look_up("users", KEYS[3:])
        assert client.received_bytes == before
        tables.push("users", KEYS[:2], grads)
        assert client.sent_bytes == KEYS.nbytes + KEYS[:2].nbytes + grads.nbytes
        tables.look_up("users", KEYS[3:])
        assert client.received_bytes > before

    play(script, trainers=1, tables=[SPEC])


def test_a_flush_sends_what_changed_so_far() -> None:
    def script(_: int, client: Client, remote: RemoteTables) -> None:
        tables = GeoTables(remote, [SPEC], k_steps=100, trainers=1)
        client.next_step(8)
        tables.look_up("users", KEYS)
        tables.push("users", KEYS, np.ones((8, 3), np.float32))
        mine = tables.look_up("users", KEYS)
        tables.flush()
        tables.flush()
        np.testing.assert_allclose(remote.look_up("users", KEYS), mine, rtol=1e-6)

    play(script, trainers=1, tables=[SPEC])


def test_shows_and_clicks_go_with_the_next_exchange() -> None:
    spec = TableSpec(name="users", dim=3, evictions=(ByScore(decay=0.5, threshold=1.0),))

    def script(_: int, client: Client, remote: RemoteTables) -> int:
        tables = GeoTables(remote, [spec], k_steps=2, trainers=1)
        client.next_step(8)
        for keys in (KEYS, KEYS[:3]):
            tables.look_up("users", keys)
            clicks = np.ones(len(keys), np.float32)
            grads = np.zeros((len(keys), 3), np.float32)
            tables.push("users", keys, grads, shows=clicks, clicks=clicks)
        return remote.shrink("users")  # of those that were clicked once

    assert play(script, servers=2, trainers=1, tables=[spec]) == [5]


def test_a_trainer_that_begins_anew_goes_on_from_the_rows_that_servers_have() -> None:
    def script(number: int, client: Client, remote: RemoteTables) -> None:
        tables = GeoTables(remote, [SPEC], k_steps=1, trainers=2)
        client.next_step(8)
        tables.look_up("users", KEYS)
        tables.push("users", KEYS, np.full((8, 3), 1.0 + number, np.float32))
        served = remote.look_up("users", KEYS).copy()
        assert (tables.look_up("users", KEYS) != served).all()  # half of its change is still local
        tables.restart()
        np.testing.assert_array_equal(tables.look_up("users", KEYS), served)

    play(script, servers=2, trainers=2, tables=[SPEC])
