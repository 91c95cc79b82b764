"""A server goes on with its tables for other trainers, in the middle of a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxfleet.ps.server import ServerOptions
from jaxfleet.tables import Sgd, TableSpec
from jaxfleet.transport.messages import Kind, Plain
from tests.ps.server.common import Bench, error_of, hello
from tests.ps.server.table_programs import ITEMS, KEYS, USERS, initial, table_program

OPTIONS = ServerOptions(server=0, lost_after_s=1e6, step_timeout_s=1e6)
TABLES = (USERS, ITEMS)
ALONE: dict[str, Plain] = {"epoch": 1, "members": ["s0"], "dismissed": []}


def started() -> Bench:
    """Returns a server with two tables, whose two trainers may change."""
    bench = Bench(OPTIONS)
    for trainer in range(2):
        body = hello(trainer, session=f"s{trainer}", fixed="")
        assert bench.one(trainer, Kind.HELLO, body=body).kind is Kind.WELCOME
    define(bench, trainers=2)
    assert bench.one(0, Kind.ASSIGN, 0, {"replace": False}).kind is Kind.OK
    return bench


def define(bench: Bench, *, trainers: int, tables: Sequence[TableSpec] = TABLES) -> Any:
    text = str(table_program(tables, trainers=trainers))
    return bench.one(0, Kind.DEFINE, body={"program": text})


def go_on_alone(bench: Bench) -> None:
    """Lets trainer 1 leave the job."""
    bench.one(0, Kind.MEMBERS, body=dict(ALONE))
    body = hello(0, session="s0", fixed="", trainers=1, program="of one", **ALONE)
    assert bench.one(0, Kind.HELLO, body=body).kind is Kind.WELCOME


def push(bench: Bench, trainer: int, step: int, spec: TableSpec, value: float) -> None:
    grads = np.full((len(KEYS), spec.dim), value, np.float32)
    arrays: dict[str, np.ndarray] = {"keys": KEYS, "grads": grads}
    bench.send(trainer, Kind.PUSH_ROWS, step, {"table": spec.name}, arrays)


def look_up(bench: Bench, step: int, spec: TableSpec, *, again: bool = False) -> np.ndarray:
    body: dict[str, Plain] = {"table": spec.name, "again": again}
    answer = bench.one(0, Kind.LOOK_UP, step, body, {"keys": KEYS})
    assert answer.kind is Kind.ROWS, answer
    return answer.tensors[0].array.copy()


def after(spec: TableSpec, *sums: float) -> np.ndarray:
    """Returns rows after updates by SGD."""
    rows = initial(spec, KEYS)
    assert isinstance(spec.optimizer, Sgd)
    rate = np.float32(spec.optimizer.learning_rate)
    for each in sums:
        rows = rows - rate * np.float32(each)
    return rows


def test_a_table_that_has_the_step_keeps_it_and_the_others_take_it_from_the_new_trainers() -> None:
    bench = started()
    for trainer in range(2):
        push(bench, trainer, 1, USERS, 1.0)
    push(bench, 0, 1, ITEMS, 1.0)
    go_on_alone(bench)
    assert define(bench, trainers=1).kind is Kind.OK
    for spec in TABLES:  # as they were when the step began
        np.testing.assert_array_equal(look_up(bench, 1, spec, again=True), after(spec))
        push(bench, 0, 1, spec, 4.0)
    assert bench.one(0, Kind.PULL, 1, {"names": []}).body["applied"] == 1
    np.testing.assert_array_equal(look_up(bench, 2, USERS), after(USERS, 2.0))
    np.testing.assert_array_equal(look_up(bench, 2, ITEMS), after(ITEMS, 4.0))


def test_rows_before_the_step_outlive_a_second_change() -> None:
    bench = started()
    for trainer in range(2):
        push(bench, trainer, 1, USERS, 1.0)
    go_on_alone(bench)
    define(bench, trainers=1)
    again: dict[str, Plain] = {**ALONE, "epoch": 2}
    bench.one(0, Kind.MEMBERS, body=dict(again))
    bench.one(0, Kind.HELLO, body=hello(0, session="s0", fixed="", trainers=1, **again))
    define(bench, trainers=1)
    np.testing.assert_array_equal(look_up(bench, 1, USERS, again=True), after(USERS))


def test_a_step_that_a_change_interrupts_has_no_part_in_the_next() -> None:
    bench = started()
    push(bench, 0, 1, USERS, 1.0)
    bench.one(0, Kind.MEMBERS, body=dict(ALONE))
    push(bench, 1, 1, USERS, 1.0)  # too late: the server is closing
    go_on_alone(bench)
    define(bench, trainers=1)
    for spec in TABLES:
        push(bench, 0, 1, spec, 4.0)
    np.testing.assert_array_equal(look_up(bench, 2, USERS), after(USERS, 4.0))


def test_a_program_with_other_tables_is_refused_and_the_former_stays() -> None:
    bench = started()
    go_on_alone(bench)
    code, text = error_of(define(bench, trainers=1, tables=(USERS,)))
    assert code == "refused"
    assert text == "'p.pserver0' for 1 trainers has other tables"
    assert define(bench, trainers=1).kind is Kind.OK


def test_rows_are_kept_only_where_trainers_change_or_return() -> None:
    bench = Bench(OPTIONS).started(str(table_program(TABLES)), {})
    for trainer in range(2):
        push(bench, trainer, 1, USERS, 1.0)
    body: dict[str, Plain] = {"table": "users", "again": True}
    answer = bench.one(0, Kind.LOOK_UP, 1, body, {"keys": KEYS})
    assert "the rows of table 'users' before step 1 are no longer kept" in error_of(answer)[1]
