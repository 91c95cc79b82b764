"""Rows in a server's own checkpoints and in its part of the job's."""

from pathlib import Path

import numpy as np
import pytest

from jaxfleet.checkpoint import PartReceipt, commit, open_checkpoint, save_arrays
from jaxfleet.checkpoint.tables import saved_tables
from jaxfleet.ps.server import ServerOptions
from jaxfleet.tables import TableSpec, TableStore
from jaxfleet.transport.messages import Kind
from tests.ps.server.common import Bench, error_of, hello
from tests.ps.server.table_programs import (
    ITEMS,
    USERS,
    Rows,
    drawn_rows,
    own_keys,
    table_program,
)

TABLES = (USERS, ITEMS)
KEYS = np.arange(-20, 20) * (2**55 + 3)


def started(folder: Path | None, server: int = 0, servers: int = 1) -> Rows:
    """Returns a server of one trainer, with the content of its folder."""
    place = f"127.0.0.1:{7001 + server}"
    bench = Bench(ServerOptions(server=server, checkpoint_dir=folder), place)
    every = [f"127.0.0.1:{7001 + number}" for number in range(servers)]
    body = hello(0, trainers=1, servers=every)
    if not bench.one(0, Kind.HELLO, body=body).body["defined"]:
        program = table_program(TABLES, server=server, servers=servers, trainers=1)
        bench.one(0, Kind.DEFINE, body={"program": str(program)})
        bench.one(0, Kind.ASSIGN, 0, {"replace": False})
    return Rows(bench, own_keys(KEYS, server, servers))


def test_a_server_that_starts_again_has_its_rows_and_takes_the_steps_after(tmp_path: Path) -> None:
    undisturbed, rows = started(None), started(tmp_path)
    for step in (1, 2, 3, 4):
        undisturbed.push(step, TABLES)
    rows.push(1, TABLES)
    assert rows.bench.one(0, Kind.SAVE, 1).kind is Kind.OK
    rows.push(2, TABLES)  # is lost
    again = started(tmp_path)
    assert again.bench.core.step == 1
    for step in (1, 2, 3, 4):
        again.push(step, TABLES)
    for table in TABLES:
        np.testing.assert_array_equal(again.seen(5, table), undisturbed.seen(5, table))


@pytest.mark.grid
def test_its_checkpoints_hold_what_changed_and_are_read_together(tmp_path: Path) -> None:
    undisturbed, rows = started(None), started(tmp_path)
    follow = []
    for step in range(1, 15):
        for one in (undisturbed, rows):
            one.push(step, TABLES, some=slice(step % 3, step % 3 + 2) if step > 1 else slice(None))
        reply = rows.bench.one(0, Kind.SAVE, step)
        assert reply.kind is Kind.OK, reply
        series = tmp_path / "server0"
        follow.append(open_checkpoint(series / f"step-{step:08d}").after is not None)
        again = started(tmp_path)
        for table in TABLES:
            np.testing.assert_array_equal(again.seen(step + 1, table), rows.seen(step + 1, table))
    assert follow.index(False) == 9  # step 0 has the initial state, step 10 all of it again
    for table in TABLES:
        np.testing.assert_array_equal(again.seen(15, table), undisturbed.seen(15, table))


def save_job(folder: Path, all_rows: list[Rows], step: int) -> None:
    receipts = []
    for rows in all_rows:
        reply = rows.bench.one(0, Kind.SAVE, step, {"path": str(folder)})
        receipts.append(PartReceipt.from_plain(reply.body["receipt"]))  # type: ignore[arg-type]
    commit(folder, receipts, step=step)


@pytest.mark.parametrize("servers", [1, 3])
def test_a_jobs_checkpoint_is_loaded_by_any_number_of_servers(servers: int, tmp_path: Path) -> None:
    saved = [started(None, number, 2) for number in range(2)]
    for step in (1, 2):
        for rows in saved:
            rows.push(step, TABLES)
    save_job(tmp_path / "job", saved, 2)
    whole = started(None)
    for step in (1, 2):
        whole.push(step, TABLES)
    for number in range(servers):
        loaded = started(None, number, servers)
        loaded.push(1, TABLES)  # is void
        reply = loaded.bench.one(0, Kind.LOAD, 0, {"path": str(tmp_path / "job")})
        assert reply.body["step"] == 2, reply
        for table in TABLES:
            np.testing.assert_array_equal(loaded.seen(3, table), whole.seen(3, table, loaded.keys))
        loaded.push(3, TABLES)
        assert loaded.bench.core.step == 3


def test_the_rows_of_a_jobs_checkpoint_are_all_there(tmp_path: Path) -> None:
    saved = [started(None, number, 3) for number in range(3)]
    for rows in saved:
        rows.push(1, TABLES)
    save_job(tmp_path / "job", saved, 1)
    keys, found = saved_tables([open_checkpoint(tmp_path / "job")])["users"].export()
    whole = started(None)
    whole.push(1, TABLES)
    np.testing.assert_array_equal(keys, np.sort(KEYS))
    np.testing.assert_array_equal(found, whole.seen(2, USERS, keys))


def test_a_checkpoint_without_a_table_changes_nothing(tmp_path: Path) -> None:
    save_arrays(tmp_path / "job", {"other": np.zeros(2)}, step=5)
    rows = started(None)
    rows.push(1, TABLES)
    before = rows.seen(2, USERS)
    code, what = error_of(rows.bench.send(0, Kind.LOAD, 0, {"path": str(tmp_path / "job")}))
    assert code == "checkpoint"
    assert "has no table `users`" in what
    np.testing.assert_array_equal(rows.seen(2, USERS), before)
    assert rows.bench.core.step == 1


def test_pushes_that_are_applied_at_once_are_applied_once_after_a_restart(tmp_path: Path) -> None:
    # Rows of a step are applied and saved before the gradients of the same step arrive.
    options = ServerOptions(server=0, checkpoint_dir=tmp_path)

    def start() -> Bench:
        bench = Bench(options)
        for trainer in (0, 1):
            bench.one(trainer, Kind.HELLO, body=hello(trainer))
        return bench

    def push(bench: Bench, trainer: int, step: int, *tables: TableSpec) -> None:
        for table in tables:
            grads = drawn_rows((trainer, step), len(KEYS), table.dim)
            arrays = {"keys": KEYS, "grads": grads}
            body = {"table": table.name}
            assert not bench.send(trainer, Kind.PUSH_ROWS, step, dict(body), arrays)

    bench = start()
    program = str(table_program(TABLES)).replace("_id=-1, lr", "_id=-1, distributed_mode=1, lr")
    bench.one(0, Kind.DEFINE, body={"program": program})
    bench.one(0, Kind.ASSIGN, 0, {"replace": False})
    push(bench, 0, 1, *TABLES)
    push(bench, 1, 1, *TABLES)
    push(bench, 1, 2, USERS)
    assert bench.one(0, Kind.SAVE, 1).kind is Kind.OK
    again = start()
    push(again, 1, 2, USERS, ITEMS)
    push(again, 1, 1, *TABLES)
    store = TableStore(USERS)
    for trainer, step in ((0, 1), (1, 1), (1, 2)):
        store.update(KEYS, drawn_rows((trainer, step), len(KEYS), USERS.dim))
    found = Rows(again, KEYS).seen(2, USERS)
    np.testing.assert_array_equal(found, store.look_up(KEYS))
    assert again.one(0, Kind.STATS).body["duplicates"] == 3
