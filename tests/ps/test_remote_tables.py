"""Remote tables from the trainer's side: real clients and servers, a network in memory."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxfleet.errors import ProgramError
from jaxfleet.lower import ExecutableCache
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.remote_tables import RemoteTables
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.server import Server, ServerCore, ServerOptions
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.tables import ByScore, TableSpec, TableStore
from jaxfleet.tables.merge_pushes import merge
from jaxfleet.transport.memory_network import MemoryNetwork
from jaxfleet.transport.messages import Kind
from tests.ps.server.table_programs import ITEMS, USERS, drawn_rows, table_program

Script = Callable[[int, Client, RemoteTables], Any]
TABLES = (USERS, ITEMS)


def play(
    script: Script,
    *,
    servers: int = 1,
    trainers: int = 2,
    network: MemoryNetwork | None = None,
    tables: Sequence[TableSpec] = TABLES,
) -> list[Any]:
    """Runs a script on every trainer; returns the results."""
    net = network if network is not None else MemoryNetwork()
    programs = [
        table_program(tables, server=number, servers=servers, trainers=trainers)
        for number in range(servers)
    ]
    endpoints = tuple(str(program.attrs["endpoint"]) for program in programs)

    def serve(number: int) -> int:
        options = ServerOptions(server=number, lost_after_s=1e9, step_timeout_s=1e9)
        core = ServerCore(endpoints[number], ExecutableCache(), net.clock, options)
        listener, connect = net.listen(endpoints[number]), net.connect
        server = Server(core, listener, connect=connect, clock=net.clock, threaded=False)
        return server.serve()

    def train(number: int) -> Any:
        texts = [(str(program), dict[str, np.ndarray]()) for program in programs]
        me = TrainerIdentity("j", number, trainers, endpoints, "hash", texts)
        client = Client(net.connect(endpoints), me, timeouts=Timeouts(), clock=net.clock)
        try:
            client.open()
            if number == 0:
                body = {"replace": False}
                every = range(servers)
                client.wait([client.request(s, Kind.ASSIGN, body=body) for s in every])
            return script(number, client, RemoteTables(client, tables))
        finally:
            client.close()

    people: dict[str, Callable[[], Any]] = {}
    people |= {f"server {n}": partial(serve, n) for n in range(servers)}
    people |= {f"trainer {n}": partial(train, n) for n in range(trainers)}
    results = net.run(people, longest_s=60.0)
    return [results[f"trainer {n}"] for n in range(trainers)]


def batch(trainer: int, step: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys and the gradients of a trainer's rows."""
    draw = np.random.default_rng([trainer, step, dim])
    keys = np.unique(draw.integers(-40, 40, 50)) * (2**57 + 1)
    return draw.permutation(keys), drawn_rows((trainer, step), len(keys), dim)


def trained(number: int, client: Client, tables: RemoteTables) -> list[np.ndarray]:
    """Trains three steps; returns all rows that it saw."""
    seen = []
    for step in (1, 2, 3):
        client.next_step(8)
        keys = {spec.name: batch(number, step, spec.dim)[0] for spec in TABLES}
        seen += [rows.copy() for rows in tables.look_up_all(keys).values()]
        for spec in TABLES:
            tables.push(spec.name, keys[spec.name], batch(number, step, spec.dim)[1])
    return seen


def wanted(trainers: int) -> list[list[np.ndarray]]:
    """Returns the rows that trainers see with one store for all."""
    stores = [TableStore(spec) for spec in TABLES]
    seen: list[list[np.ndarray]] = [[] for _ in range(trainers)]
    for step in (1, 2, 3):
        for trainer in range(trainers):
            for spec, store in zip(TABLES, stores, strict=True):
                seen[trainer].append(store.look_up(batch(trainer, step, spec.dim)[0]))
        for spec, store in zip(TABLES, stores, strict=True):
            store.update(*merge([batch(t, step, spec.dim) for t in range(trainers)]))
    return seen


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_any_number_of_servers_gives_the_same_bits(servers: int) -> None:
    for seen, own in zip(play(trained, servers=servers), wanted(2), strict=True):
        for rows, ones in zip(seen, own, strict=True):
            np.testing.assert_array_equal(rows, ones)


def test_messages_that_come_twice_change_nothing() -> None:
    network = MemoryNetwork(faults=lambda _, __: 2)
    for seen, own in zip(play(trained, servers=2, network=network), wanted(2), strict=True):
        for rows, ones in zip(seen, own, strict=True):
            np.testing.assert_array_equal(rows, ones)


def test_it_all_goes_through_the_wire() -> None:
    network = MemoryNetwork(through_wire=True)
    (seen,) = play(trained, servers=2, trainers=1, network=network)
    for rows, ones in zip(seen, wanted(1)[0], strict=True):
        np.testing.assert_array_equal(rows, ones)


def test_a_look_up_after_its_push_sees_what_all_pushed() -> None:
    keys = np.arange(6)

    def script(number: int, client: Client, tables: RemoteTables) -> np.ndarray:
        client.next_step(8)
        first = tables.look_up("users", keys).copy()
        tables.push("users", keys, np.full((6, 3), number + 1, np.float32))
        tables.push("items", np.empty(0, np.int64), np.empty((0, 2), np.float32))
        return tables.look_up("users", keys) - first

    for change in play(script, servers=2):
        np.testing.assert_allclose(change, np.full((6, 3), -1.5), rtol=1e-6)


def test_no_keys_and_a_million_keys() -> None:
    def script(_: int, client: Client, tables: RemoteTables) -> None:
        client.next_step(8)
        none = np.empty(0, np.int64)
        assert tables.look_up("users", none).shape == (0, 3)
        tables.push("users", none, np.empty((0, 3), np.float32))
        many = np.arange(1 << 20) * 12345677
        assert tables.look_up("items", many).shape == (1 << 20, 2)
        tables.push("items", many, np.ones((1 << 20, 2), np.float32))

    play(script, servers=2, trainers=1)


def test_a_gradient_that_is_not_finite_ends_the_trainer_that_pushed_it() -> None:
    def script(number: int, client: Client, tables: RemoteTables) -> str:
        client.next_step(8)
        keys = np.arange(6)
        grads = np.full((6, 3), np.nan if number else 1.0, np.float32)
        tables.push("users", keys, grads)
        if number:
            with pytest.raises(ProgramError, match=r"push rows of step 1, table 'users'.*finite"):
                tables.look_up("users", keys)
            return "refused"
        return "pushed"

    assert play(script) == ["pushed", "refused"]


@pytest.mark.parametrize(
    ("table", "keys", "grads", "text"),
    [
        ("cars", np.arange(2), np.zeros((2, 3), np.float32), "no table 'cars' in this step"),
        ("users", np.arange(2.0), np.zeros((2, 3), np.float32), "keys are float64"),
        ("users", np.arange(2), np.zeros((2, 3)), "gradients are float64"),
        ("users", np.arange(2), np.zeros((3, 3), np.float32), "float32.3, 3., not float32.2, 3."),
    ],
)
def test_what_is_none_of_a_table_is_refused(
    table: str, keys: np.ndarray, grads: np.ndarray, text: str
) -> None:
    def script(_: int, client: Client, tables: RemoteTables) -> None:
        client.next_step(8)
        with pytest.raises(ProgramError, match=text):
            tables.push(table, keys, grads)

    play(script, trainers=1)


def test_a_table_is_pushed_to_once_a_step() -> None:
    def script(_: int, client: Client, tables: RemoteTables) -> None:
        keys, grads = np.arange(2), np.zeros((2, 3), np.float32)
        for _ in range(2):
            client.next_step(8)
            tables.push("users", keys, grads)
            with pytest.raises(ProgramError, match=r"'users' was pushed to at step \d already"):
                tables.push("users", keys, grads)

    play(script, trainers=1)


@pytest.mark.parametrize("servers", [1, 3])
def test_shows_and_clicks_are_summed_as_gradients_are(servers: int) -> None:
    spec = TableSpec(name="users", dim=3, evictions=(ByScore(decay=0.9, threshold=2.0),))

    def scores_of(number: int, step: int, count: int) -> np.ndarray:
        drawn = np.random.default_rng([number, step]).integers(0, 5, (2, count))
        return np.sort(drawn, axis=0)[::-1].astype(np.float32)

    def script(number: int, client: Client, tables: RemoteTables) -> Any:
        for step in (1, 2, 3):
            client.next_step(8)
            keys, grads = batch(number, step, 3)
            tables.look_up("users", keys)
            shows, clicks = scores_of(number, step, len(keys))
            given = {} if (number, step) == (1, 2) else {"shows": shows, "clicks": clicks}
            tables.push("users", keys, grads, **given)
        return None if number else (tables.shrink("users"), tables.live("users").export())

    store = TableStore(spec)
    for step in (1, 2, 3):
        pushes = [batch(number, step, 3) for number in (0, 1)]
        scores = [scores_of(n, step, len(keys)).T for n, (keys, _) in enumerate(pushes)]
        if step == 2:
            scores[1] = np.zeros_like(scores[1])
        keys, grads = merge(pushes)
        sums = merge([(keys, each) for (keys, _), each in zip(pushes, scores, strict=True)])[1]
        store.update(keys, grads, step=step, shows=sums[:, 0], clicks=sums[:, 1])
    gone, (keys, rows) = play(script, servers=servers, tables=[spec])[0]
    assert gone == store.shrink(4)
    assert 5 < gone < 60
    order = np.argsort(store.export()[0])
    np.testing.assert_array_equal(keys, store.export()[0][order])
    np.testing.assert_array_equal(rows, store.export()[1][order])


def test_scores_that_no_table_keeps_are_refused() -> None:
    def script(_: int, client: Client, tables: RemoteTables) -> None:
        client.next_step(8)
        keys, grads, ones = np.arange(2), np.zeros((2, 3), np.float32), np.ones(2, np.float32)
        with pytest.raises(ProgramError, match="'users' is given shows or clicks, and keeps none"):
            tables.push("users", keys, grads, shows=ones)

    play(script, trainers=1)
