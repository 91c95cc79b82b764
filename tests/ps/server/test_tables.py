"""A server's handling of table rows, message by message."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxfleet.ir import Program
from jaxfleet.tables import TableSpec
from jaxfleet.transport.messages import Kind, Message, Plain
from tests.ps.server.common import MOMENTUM, Bench, drawn, error_of, hello
from tests.ps.server.table_programs import (
    ITEMS,
    KEYS,
    USERS,
    drawn_rows,
    initial,
    own_keys,
    table_program,
)

RATE = np.float32(0.5)
NONE = np.empty(0, np.int64)


def bench(program: Program | None = None, trainers: int = 2) -> Bench:
    text = str(program if program is not None else table_program(trainers=trainers))
    return Bench().started(text, {}, trainers)


def push(to: Bench, trainer: int, step: int, keys: np.ndarray, **named: Any) -> Any:
    """Pushes drawn gradients, or the given ones."""
    table = named.pop("table", USERS)
    grads = named.pop("grads", drawn_rows((trainer, abs(step)), len(keys), table.dim))
    body = {"table": table.name, **named.pop("body", {})}
    return to.send(trainer, Kind.PUSH_ROWS, step, body, {"keys": keys, "grads": grads}, **named)


def look_up(to: Bench, trainer: int, step: int, keys: np.ndarray, **named: Any) -> Any:
    table = named.pop("table", USERS)
    return to.send(trainer, Kind.LOOK_UP, step, {"table": table.name}, {"keys": keys}, **named)


def rows(to: Bench, step: int, keys: np.ndarray = KEYS, table: TableSpec = USERS) -> np.ndarray:
    ((_, message),) = look_up(to, 0, step, keys, table=table)
    assert message.kind is Kind.ROWS, message
    return found(message)


def found(message: Message) -> np.ndarray:
    (tensor,) = message.tensors
    assert tensor.name == "rows"
    return tensor.array


def after(steps: int, keys: np.ndarray = KEYS) -> np.ndarray:
    """Returns the rows after pushes of two trainers, computed by numpy."""
    made = initial(USERS, keys)
    for step in range(1, steps + 1):
        first, second = (drawn_rows((t, step), len(keys), USERS.dim) for t in (0, 1))
        made = made - RATE * (first + second)
    return made


def test_rows_begin_as_the_initializer_makes_them() -> None:
    np.testing.assert_array_equal(rows(bench(), 1), initial(USERS, KEYS))


def test_steps_are_those_of_numpy() -> None:
    served = bench()
    for step in (1, 2, 3):
        for trainer in (1, 0):
            assert not push(served, trainer, step, KEYS)
    np.testing.assert_array_equal(rows(served, 4), after(3))


def test_a_peek_keeps_no_row_and_no_copy_for_its_trainer() -> None:
    to = bench(table_program(trainers=1), trainers=1)
    held = to.core._router.held  # noqa: SLF001
    assert held is not None
    kept: list[Any] = []
    held.scheduler.gave_rows = lambda *_: kept.append(_)  # type: ignore[method-assign]
    body: dict[str, Plain] = {"table": USERS.name, "peek": True}
    unseen = KEYS + 1000
    ((_, message),) = to.send(0, Kind.LOOK_UP, 1, body, {"keys": unseen})
    np.testing.assert_array_equal(found(message), initial(USERS, unseen))
    assert held.tables[USERS.name].stats()["rows"] == 0
    assert not kept


def test_a_look_up_waits_until_the_step_before_is_applied() -> None:
    served = bench()
    assert not push(served, 0, 1, KEYS)
    assert not look_up(served, 0, 2, KEYS, number=70)
    ((peer, message),) = push(served, 1, 1, KEYS)
    assert (peer, message.kind, message.number, message.step) == (b"0", Kind.ROWS, 70, 2)
    np.testing.assert_array_equal(found(message), after(1))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_no_order_of_arrival_changes_a_bit(order: tuple[int, ...]) -> None:
    served = bench()
    for place in order:
        push(served, place % 2, 1 + place // 2, KEYS)
    np.testing.assert_array_equal(rows(served, 3), after(2))


def test_summands_are_added_in_the_order_of_trainers() -> None:
    great = np.array([[1e8], [1.0], [-1e8]], np.float32)
    wanted = np.float32(0)
    for grad in great[:, 0]:
        wanted = np.float32(wanted + grad)
    spec = TableSpec(name="one", dim=1, optimizer=USERS.optimizer)
    served, key = bench(table_program([spec], trainers=3), trainers=3), np.array([3])
    for trainer in (2, 0, 1):
        push(served, trainer, 1, key, table=spec, grads=great[trainer : trainer + 1])
    made = rows(served, 2, key, spec)
    np.testing.assert_array_equal(made[0], initial(spec, key)[0] - RATE * wanted)


def test_a_push_that_comes_again_changes_nothing() -> None:
    served = bench()
    for step in (1, 2):
        push(served, 0, step, KEYS)
        push(served, 0, step, KEYS, grads=drawn_rows((9,), len(KEYS), 3))
        push(served, 1, step, KEYS)
        push(served, 1, step, KEYS)
        push(served, 0, 1, KEYS)
    np.testing.assert_array_equal(rows(served, 3), after(2))
    assert served.one(0, Kind.STATS).body["duplicates"] == 6
    assert served.one(0, Kind.STATS).body["queued_bytes"] == 0


def test_a_look_up_that_comes_again_while_it_waits_is_answered_once() -> None:
    served = bench()
    for _ in range(3):
        assert not look_up(served, 0, 2, KEYS, number=5)
    push(served, 0, 1, KEYS)
    assert len(push(served, 1, 1, KEYS)) == 1


def test_a_trainer_may_push_nothing() -> None:
    served = bench()
    push(served, 0, 1, NONE)
    push(served, 1, 1, KEYS)
    push(served, 0, 2, NONE)
    push(served, 1, 2, NONE)
    grads = drawn_rows((1, 1), len(KEYS), 3)
    np.testing.assert_array_equal(rows(served, 3), initial(USERS, KEYS) - RATE * grads)
    assert rows(served, 3, NONE).shape == (0, 3)
    assert served.core.step == 2


def test_trainers_push_different_keys() -> None:
    served = bench()
    push(served, 0, 1, KEYS[:4])
    push(served, 1, 1, KEYS[2:])
    wanted = initial(USERS, KEYS)
    total = np.zeros_like(wanted)
    total[:4] += drawn_rows((0, 1), 4, 3)
    total[2:] += drawn_rows((1, 1), 4, 3)
    np.testing.assert_array_equal(rows(served, 2), wanted - RATE * total)


def test_all_tables_are_of_one_step() -> None:
    served = bench(table_program([USERS, ITEMS]))
    for trainer in (0, 1):
        push(served, trainer, 1, KEYS)
    assert served.core.step == 0
    np.testing.assert_array_equal(rows(served, 2), after(1))
    assert not look_up(served, 1, 2, KEYS, table=ITEMS)
    push(served, 0, 1, KEYS, table=ITEMS)
    assert [m.kind for _, m in push(served, 1, 1, KEYS, table=ITEMS)] == [Kind.ROWS]
    assert served.core.step == 1


def test_tables_and_dense_parameters_are_of_one_step() -> None:
    tables = str(table_program([USERS])).partition("tables=")[2].partition(", trainers")[0]
    text = MOMENTUM.replace("trainers=2}", f"tables={tables}, trainers=2}}", 1)
    shapes = {"w.block0": (4, 2), "w.block1": (3, 2), "m/w.block0": (4, 2), "m/w.block1": (3, 2)}
    state = {name: drawn(name, 0, shape) for name, shape in shapes.items()}
    served = Bench().started(text, {**state, "count": np.asarray(0, np.int32)})
    for trainer in (0, 1):
        grads = {f"w@GRAD.block{n}": state[f"w.block{n}"] for n in (0, 1)}
        served.push(trainer, 1, grads)
    assert served.core.step == 0
    assert set(served.pull(0, 1, "w.block0", "w.block1")) == {"w.block0", "w.block1"}
    for trainer in (0, 1):
        push(served, trainer, 1, KEYS)
    assert served.core.step == 1


def test_a_server_takes_the_keys_of_its_own_buckets_alone() -> None:
    keys = np.arange(100)
    for server in (0, 1, 2):
        served = Bench(endpoint=f"127.0.0.1:{7001 + server}")
        program, trainers = table_program(server=server, servers=3, trainers=1), 1
        servers = [f"127.0.0.1:{7001 + number}" for number in range(3)]
        body = hello(0, trainers=trainers, servers=servers)
        assert served.one(0, Kind.HELLO, body=body).kind is Kind.WELCOME
        served.one(0, Kind.DEFINE, body={"program": str(program)})
        served.one(0, Kind.ASSIGN, 0, {"replace": False})
        own = own_keys(keys, server, 3)
        assert 0 < len(own) < 100
        np.testing.assert_array_equal(rows(served, 1, own), initial(USERS, own))
        code, what = error_of(look_up(served, 0, 1, keys))
        assert code == "bad_message"
        assert f"{100 - len(own)} of 100 keys are other servers'" in what
        assert error_of(push(served, 0, 1, keys))[0] == "bad_message"
        assert served.core.step == 0


@pytest.mark.parametrize(
    ("body", "arrays", "text"),
    [
        ({}, {}, "needs 'table'"),
        ({"table": "none"}, {}, "no table 'none' on server 0, which has users"),
        ({"table": "users"}, {}, "there are no keys"),
        ({"table": "users"}, {"keys": KEYS.astype(np.int32)}, "keys are int32"),
        ({"table": "users"}, {"keys": KEYS[None]}, r"keys are int64[1, 6], not int64[n]"),
        ({"table": "users"}, {"keys": KEYS}, "there are no grads"),
        (
            {"table": "users"},
            {"keys": KEYS, "grads": np.zeros((6, 4), np.float32)},
            "float32[6, 3]",
        ),
        (
            {"table": "users"},
            {"keys": KEYS, "grads": np.zeros((5, 3), np.float32)},
            "float32[6, 3]",
        ),
        ({"table": "users"}, {"keys": KEYS, "grads": np.zeros((6, 3))}, "are float64[6, 3]"),
        (
            {"table": "users", "learning_rate": "high"},
            {"keys": KEYS, "grads": np.zeros((6, 3), np.float32)},
            "the learning rate is 'high', and must be a finite float32",
        ),
        (
            {"table": "users", "learning_rate": float("nan")},
            {"keys": KEYS, "grads": np.zeros((6, 3), np.float32)},
            "the learning rate is nan",
        ),
    ],
)
def test_what_is_none_of_the_table_is_refused(
    body: dict[str, Any], arrays: dict[str, np.ndarray], text: str
) -> None:
    served = bench()
    code, what = error_of(served.send(0, Kind.PUSH_ROWS, 1, body, arrays))
    assert (code, text in what) == ("bad_message", True), what
    np.testing.assert_array_equal(rows(served, 1), initial(USERS, KEYS))


def test_gradients_that_are_not_finite_are_refused_and_nothing_is_applied() -> None:
    served = bench()
    for bad in (np.nan, np.inf):
        grads = drawn_rows((0, 1), len(KEYS), 3)
        grads[4, 2] = bad
        code, what = error_of(push(served, 0, 1, KEYS, grads=grads))
        assert code == "refused"
        assert "push rows of step 1, table 'users'" in what
        assert f"1 of 6 keys are not finite, the first is that of {KEYS[4]}" in what
    push(served, 1, 1, KEYS)
    assert served.core.step == 0
    push(served, 0, 1, KEYS)
    np.testing.assert_array_equal(rows(served, 2), after(1))


def test_a_sum_that_is_not_finite_is_told_to_all_who_pushed() -> None:
    served, great = bench(), np.full((len(KEYS), 3), 3e38, np.float32)
    push(served, 0, 1, KEYS, grads=great)
    replies = push(served, 1, 1, KEYS, grads=great)
    assert [(peer, error_of(m)[0]) for peer, m in replies] == [(b"0", "refused"), (b"1", "refused")]
    assert served.core.step == 0
    np.testing.assert_array_equal(rows(served, 1), initial(USERS, KEYS))


def test_rows_that_are_not_finite_are_skipped_where_the_table_says_so() -> None:
    spec = TableSpec(name="users", dim=3, optimizer=USERS.optimizer, on_nan="skip")
    served = bench(table_program([spec]))
    grads = drawn_rows((0, 1), len(KEYS), 3)
    grads[4, 2] = np.nan
    push(served, 0, 1, KEYS, grads=grads)
    push(served, 1, 1, KEYS)
    wanted = after(1)
    wanted[4] = initial(USERS, KEYS)[4]
    np.testing.assert_array_equal(rows(served, 2), wanted)
    stats: Any = served.one(0, Kind.STATS).body["tables"]
    assert stats["users"]["skipped"] == 1


def test_a_learning_rate_comes_with_a_push() -> None:
    served = bench(trainers=1)
    push(served, 0, 1, KEYS, body={"learning_rate": 0.25})
    wanted = initial(USERS, KEYS) - np.float32(0.25) * drawn_rows((0, 1), len(KEYS), 3)
    np.testing.assert_array_equal(rows(served, 2), wanted)


def test_there_is_no_step_before_the_first_and_none_far_ahead() -> None:
    served = bench()
    for step in (0, -1, 1 << 40):
        assert error_of(push(served, 0, step, KEYS))[0] == "bad_message"
    assert served.one(0, Kind.STATS).body["queued_bytes"] == 0


def test_a_look_up_before_there_is_a_program_waits_for_it() -> None:
    served = Bench()
    for trainer in (0, 1):
        served.one(trainer, Kind.HELLO, body=hello(trainer))
    assert not look_up(served, 1, 1, KEYS)
    assert not look_up(served, 1, 1, KEYS, table=ITEMS)
    served.one(0, Kind.DEFINE, body={"program": str(table_program())})
    replies = served.send(0, Kind.ASSIGN, 0, {"replace": False})
    kinds = [(peer, message.kind) for peer, message in replies]
    assert kinds == [(b"0", Kind.OK), (b"1", Kind.ERROR), (b"1", Kind.ROWS)]


def test_rows_before_a_state_are_refused() -> None:
    served = Bench()
    served.one(0, Kind.HELLO, body=hello(0))
    assert "no program" in error_of(push(served, 0, 1, KEYS))[1]
    served.one(0, Kind.DEFINE, body={"program": str(table_program())})
    assert "before any state" in error_of(push(served, 0, 1, KEYS))[1]


def test_who_waits_for_rows_is_told_of_a_trainer_that_is_lost() -> None:
    served = bench()
    look_up(served, 0, 2, KEYS)
    push(served, 0, 1, KEYS)
    served.now += 5
    served.send(0, Kind.STATS)
    (reply,) = served.wait(6)
    code, what = error_of([reply])
    assert code == "peer_lost"
    assert "trainer 1 is lost" in what
    assert "rows of 'users'" in what


def test_two_tables_of_one_name_are_refused() -> None:
    served = Bench()
    served.one(0, Kind.HELLO, body=hello(0))
    program = table_program([USERS, USERS])
    assert "one name" in error_of(served.one(0, Kind.DEFINE, body={"program": str(program)}))[1]


def test_changes_are_added_whatever_the_optimizer() -> None:
    served = bench()
    for trainer in (1, 0):
        push(served, trainer, 1, KEYS, body={"deltas": True})
    first, second = (drawn_rows((t, 1), len(KEYS), 3) for t in (0, 1))
    np.testing.assert_array_equal(rows(served, 2), initial(USERS, KEYS) + (first + second))


def test_changes_and_gradients_are_not_summed() -> None:
    served = bench()
    push(served, 0, 1, KEYS, body={"deltas": True})
    replies = push(served, 1, 1, KEYS)
    assert ["gradients and changes" in error_of(m)[1] for _, m in replies] == [True, True]
    np.testing.assert_array_equal(rows(served, 1), initial(USERS, KEYS))


def test_rows_that_do_not_fit_the_tables_memory_are_on_disk() -> None:
    table = replace(USERS, memory_rows=10)
    to = bench(table_program([table], trainers=1), 1)
    keys = np.arange(60)
    look_up(to, 0, 1, keys)
    (reply,) = to.send(0, Kind.STATS, 1)
    tables: Any = reply[1].body["tables"]
    assert tables["users"]["rows"] == 60
    assert tables["users"]["rows_on_disk"] >= 50
