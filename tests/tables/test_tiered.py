"""A store with rows on disk answers, bit for bit, as one in memory."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxfleet.checkpoint import CheckpointSeries
from jaxfleet.checkpoint.tables import TableSeries
from jaxfleet.errors import JaxfleetError, ProgramError
from jaxfleet.tables import (
    Adagrad,
    Adam,
    AfterCount,
    ByScore,
    Capacity,
    RowBatch,
    Sgd,
    TableSpec,
    TableStore,
    TieredStore,
    Unseen,
    make_store,
)
from jaxfleet.tables.access import LocalTables
from jaxfleet.tables.buckets import BUCKETS
from jaxfleet.tables.disk import SpilledKeys
from tests.tables.crowded import crowd

DIM = 3
KEYS = np.concatenate(
    [np.arange(-20, 0), crowd(20), [np.iinfo(np.int64).min, np.iinfo(np.int64).max]]
)


def both(**options: object) -> tuple[TableStore, TieredStore]:
    """Returns a store in memory, and one of the same spec with only five rows in memory."""
    spec = TableSpec(name="t", dim=DIM, **options)  # type: ignore[arg-type]
    tiered = TableSpec(name="t", dim=DIM, memory_rows=5, **options)  # type: ignore[arg-type]
    return TableStore(spec), TieredStore(tiered)


def arrays_of(batches: Iterator[RowBatch]) -> list[bytes]:
    """Returns all content of batches, independent of the division into batches."""
    columns: dict[str, list[bytes]] = {}
    for batch in batches:
        for name, value in vars(batch).items():
            for inner, array in value.items() if isinstance(value, dict) else [("", value)]:
                kind = f"{name} {inner} {array.dtype}" if len(array) else "nothing"
                columns.setdefault(kind, []).append(array.tobytes())
    return [kind.encode() + b"".join(parts) for kind, parts in sorted(columns.items()) if kind]


def agree(one: TableStore, other: TableStore, since: int | None = None) -> None:
    assert len(one) == len(other)
    assert one.stats()["evicted"] == other.stats()["evicted"]
    assert arrays_of(one.batches()) == arrays_of(other.batches())
    if since is not None:
        assert arrays_of(one.batches(since)) == arrays_of(other.batches(since))


SPECS: list[dict[str, object]] = [
    {"optimizer": Sgd(0.1)},
    {"optimizer": Adam(), "admission": AfterCount(2)},
    {"optimizer": Adagrad(), "evictions": (Capacity(5 * BUCKETS, "lfu"), Unseen(3))},
    {"optimizer": Sgd(), "evictions": (Capacity(9 * BUCKETS, "lru"), ByScore(threshold=0.2))},
]


def done(store: TableStore, what: str, step: int, *, scores: bool) -> object:
    """Runs an operation of a store on keys that depend on the step; returns its answer."""
    random = np.random.default_rng(step)
    keys = random.choice(KEYS, int(random.integers(0, 20)), replace=False)
    values = random.normal(size=(len(keys), DIM)).astype(np.float32)
    counts = np.abs(values[:, 0]) if scores else None
    match what:
        case "look_up":
            return store.look_up(np.concatenate([keys, keys]), step=step).tobytes()
        case "peek":
            before = arrays_of(store.batches()), store.stats()["rows"]
            rows = store.peek(np.concatenate([keys, keys])).tobytes()
            assert before == (arrays_of(store.batches()), store.stats()["rows"])
            return rows
        case "update":
            store.update(keys, values, step=step, shows=counts, clicks=counts)
        case "add":
            store.add(keys, values, step=step)
        case "shrink":
            return store.shrink(step)
        case "drop":
            return store.drop(range(10 * step, 10 * step + 100))
        case "clear":
            store.clear(step=step)
    return None


CALLS = ["look_up", "peek", "update", "update", "add", "shrink", "drop", "save", "clear"]


@given(st.lists(st.sampled_from(CALLS), min_size=6, max_size=12), st.integers(0, 3))
@example(["update", "save", "update", "update", "shrink", "update", "add"], 3)
@settings(max_examples=30)
def test_no_answer_depends_on_where_a_row_is(calls: list[str], which: int) -> None:
    """Two stores get the same calls, in any order, and always give the same answers."""
    options, saved = SPECS[which], None
    memory, tiered = both(**options)
    for step, what in enumerate(calls, 1):
        answers = [done(store, what, step, scores=which == 3) for store in (memory, tiered)]
        assert answers[0] == answers[1]
        assert tiered.stats()["rows"] - tiered.stats()["rows_on_disk"] <= 5
        agree(memory, tiered, saved)
        np.testing.assert_array_equal(tiered.export()[1], memory.export()[1])
        if what == "save":
            saved = step
            for store in (memory, tiered):
                store.forget_gone(step)


def test_rows_on_disk_are_saved_and_restored(tmp_path: Path) -> None:
    memory, tiered = both(optimizer=Adam())
    saves = TableSeries(CheckpointSeries(tmp_path), [tiered])
    for step in range(1, 4):
        keys = KEYS[step * 3 : step * 3 + 20]
        for store in (memory, tiered):
            store.update(keys, np.full((20, DIM), step, np.float32), step=step)
        saves.save(step)
    assert tiered.stats()["rows_on_disk"] > 15
    fresh = both(optimizer=Adam())
    for store in fresh:
        assert TableSeries(saves.series, [store]).restore() == 3
        agree(memory, store)
    for store in (*fresh, memory):
        store.update(KEYS[:9], np.ones((9, DIM), np.float32), step=4)
    agree(memory, fresh[1], since=3)


def test_changes_are_found_without_reading_the_whole_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tiered = both()
    tiered.look_up(KEYS, step=1)
    list(tiered.batches())  # a save of step 1
    tiered.forget_gone(1)
    tiered.add(KEYS[:8], np.ones((8, DIM), np.float32), step=2)
    monkeypatch.setattr("jaxfleet.tables.disk.Disk.read", None)
    changed = np.concatenate([batch.keys for batch in tiered.batches(1)])
    assert sorted(changed.tolist()) == sorted(KEYS[:8].tolist())
    tiered.forget_gone(2)
    assert not list(tiered.batches(2))


def test_the_rows_used_last_are_in_memory() -> None:
    _, tiered = both()
    tiered.look_up(KEYS[:30])
    tiered.look_up(KEYS[3:5])
    tiered.look_up(KEYS[28:30])
    tiered.look_up(KEYS[30:31])
    here, _ = tiered._index.items()  # noqa: SLF001
    assert set(here.tolist()) == {*KEYS[3:5], *KEYS[28:31]}


def test_a_peek_moves_no_row_between_memory_and_disk() -> None:
    _, tiered = both()
    tiered.look_up(KEYS[:30])
    here, _ = tiered._index.items()  # noqa: SLF001
    rows = tiered.peek(KEYS)
    assert len(tiered) == 30
    np.testing.assert_array_equal(tiered._index.items()[0], here)  # noqa: SLF001
    np.testing.assert_array_equal(rows, tiered.look_up(KEYS))


def test_many_rows_are_kept_in_a_map_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxfleet.tables.disk._FIRST_BYTES", 1 << 16)
    monkeypatch.setattr("jaxfleet.tables.disk._WINDOW_ROWS", 700)
    spec = TableSpec(name="t", dim=16, memory_rows=1000)
    tiered, memory = make_store(spec), make_store(TableSpec(name="t", dim=16))
    assert isinstance(tiered, TieredStore)
    keys = np.arange(6000) * 10**12
    for step in range(3):
        some = keys[step * 1500 : step * 1500 + 3000]
        for store in (tiered, memory):
            store.add(some, np.full((3000, 16), step, np.float32), step=step)
    assert tiered.stats()["rows_on_disk"] >= 5000
    assert tiered.stats()["bytes_on_disk"] > 5000 * 64
    agree(memory, tiered, since=1)


def test_a_push_that_is_refused_changes_nothing() -> None:
    memory, tiered = both()
    grads = np.zeros((len(KEYS), DIM), np.float32)
    for store in (memory, tiered):
        store.look_up(KEYS)
        grads[7, 1] = np.nan
        with pytest.raises(ProgramError, match="not finite"):
            store.update(KEYS, grads)
    agree(memory, tiered)


@pytest.mark.parametrize("rows", [0, -3])
def test_no_rows_in_memory_are_refused(rows: int) -> None:
    with pytest.raises(ProgramError, match=f"'t': {rows} rows in memory"):
        make_store(TableSpec(name="t", dim=1, memory_rows=rows))


def test_a_server_has_its_share_of_the_rows_in_memory() -> None:
    tiered = make_store(TableSpec(name="t", dim=1, memory_rows=20), share=0.25)
    tiered.look_up(KEYS)
    assert tiered.stats()["rows"] - tiered.stats()["rows_on_disk"] <= 5


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    tiered = TieredStore(TableSpec(name="t", dim=2, memory_rows=1), folder=tmp_path)
    tiered.look_up(KEYS)
    assert list(tmp_path.iterdir()) == []
    assert len(tiered.export()[0]) == len(KEYS)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    spec = TableSpec(name="t", dim=2, memory_rows=1)
    with pytest.raises(
        JaxfleetError, match=r"table 't' cannot be kept on disk in .*/none"
    ) as caught:
        TieredStore(spec, folder=tmp_path / "none")
    assert "TMPDIR" in caught.value.__notes__[0]


FULL = """
import resource, sys, numpy as np
from pathlib import Path
from jaxfleet.errors import JaxfleetError
from jaxfleet.tables import TableSpec, make_store
store = make_store(TableSpec(name="t", dim=256, memory_rows=100))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    for first in range(0, 10000, 500):
        store.look_up(np.arange(first, first + 500))
except JaxfleetError as error:
    print(error, *error.__notes__, len(store))
"""


@pytest.mark.grid
@pytest.mark.processes
def test_a_full_disk_is_named_and_loses_no_row() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL], capture_output=True, text=True, timeout=60, check=True
    )
    assert "rows of table 't' cannot be kept on disk in" in done.stdout, done.stderr
    assert "raise `memory_rows`" in done.stdout
    assert int(done.stdout.split()[-1]) % 500 == 0


def test_what_is_not_known_is_read() -> None:
    late = SpilledKeys()
    late.saw(5)
    assert late.since(9) is None  # not requested yet
    late.begin()
    late.add(np.array([1, 2]), np.array([5, 6]))
    assert late.since(4) is None
    found = late.since(5)
    assert found is not None
    assert found.tolist() == [2]
    late.forget(6)
    assert late.nbytes == 0
    assert late.since(5) is None


def test_a_step_of_one_process_has_rows_on_disk_too() -> None:
    specs = [
        TableSpec(name=name, dim=2, memory_rows=rows) for name, rows in (("a", 3), ("b", None))
    ]
    tables = LocalTables(specs)
    tables.push("a", KEYS, np.ones((len(KEYS), 2), np.float32))
    tables.push("b", KEYS, np.ones((len(KEYS), 2), np.float32))
    np.testing.assert_array_equal(tables.look_up("a", KEYS), tables.look_up("b", KEYS))
    assert tables.stats()["a"]["rows_on_disk"] >= len(KEYS) - 3


@pytest.mark.parametrize(
    "fails", ["jaxfleet.tables.store.Columns.reserve", "jaxfleet.tables.disk.Disk.remove"]
)
def test_rows_that_cannot_come_into_memory_stay_on_disk(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, tiered = both(optimizer=Adagrad(0.1))
    for store in (plain, tiered):
        store.update(KEYS, np.ones((len(KEYS), DIM), np.float32), step=1)
    before = tiered.stats()

    def refuse(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr(fails, refuse)
        with pytest.raises(MemoryError):
            tiered.look_up(KEYS, step=2)
    after = tiered.stats()
    assert (after["rows"], after["rows_on_disk"]) == (before["rows"], before["rows_on_disk"])
    agree(plain, tiered)
    np.testing.assert_array_equal(plain.look_up(KEYS, step=2), tiered.look_up(KEYS, step=2))


def test_a_shrink_that_the_disk_refuses_takes_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, tiered = both(evictions=(Unseen(3),))
    for store in (plain, tiered):
        for step, some in ((1, KEYS[:20]), (9, KEYS[20:])):
            store.update(some, np.ones((len(some), DIM), np.float32), step=step)
    with monkeypatch.context() as failing:
        failing.setattr("jaxfleet.tables.disk.Layout.pack", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tiered.shrink(10)
    agree(plain, tiered)
    assert tiered.shrink(10) == plain.shrink(10) == 20
    agree(plain, tiered)
