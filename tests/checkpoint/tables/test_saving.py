"""Tables are restored from a chain of saves, bit for bit."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfleet.checkpoint import CheckpointSeries, commit, open_checkpoint, write_part
from jaxfleet.checkpoint.files import measure
from jaxfleet.checkpoint.manifest import Link
from jaxfleet.checkpoint.tables import (
    TableSeries,
    compact,
    load_tables,
    save_tables,
    saved_tables,
    table_pieces,
)
from jaxfleet.errors import CheckpointError
from tests.checkpoint.tables.kept import DIM, Kept, servers, some_keys

KEYS = some_keys(600)


def restored(series: CheckpointSeries, step: int) -> Kept:
    fresh = Kept()
    load_tables(series.chain(step), [fresh])
    return fresh


def test_what_changes_are_written_is_a_small_part_of_all(tmp_path: Path) -> None:
    """The bar of the issue: one row of a hundred touched, at most 3 % of the bytes."""
    store, series = Kept(), CheckpointSeries(tmp_path)
    keys = some_keys(20_000)
    store.touch(keys, 1)
    save_tables(series, [store], step=1)
    store.touch(keys[::100], 2)
    save_tables(series, [store], step=2, after=1)
    (_, whole), (_, changes) = (measure(series.path(step)) for step in (1, 2))
    assert changes <= 0.03 * whole, f"{changes} bytes of {whole}"
    assert restored(series, 2).content() == store.content()


def test_rows_candidates_and_keys_that_went_come_back_through_a_chain(tmp_path: Path) -> None:
    store, series = Kept(), CheckpointSeries(tmp_path)
    store.touch(KEYS[:400], 1)
    store.wait(KEYS[400:], 1)
    save_tables(series, [store], step=1)
    store.remove(KEYS[:50], 2)  # rows
    store.remove(KEYS[400:420], 2)  # candidates
    store.touch(KEYS[420:440], 2)  # are admitted
    save_tables(series, [store], step=2, after=1)
    store.wait(KEYS[:20], 3)  # begin again
    store.touch(KEYS[20:30], 3)
    store.remove(KEYS[420:430], 3)
    save_tables(series, [store], step=3, after=2)
    assert restored(series, 3).content() == store.content()
    assert len(store.rows) == 400 - 50 + 20 + 10 - 10


@pytest.mark.grid
@given(st.data())
@settings(max_examples=12)
def test_any_history_comes_back(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    series = CheckpointSeries(tmp_path_factory.mktemp("c"), keep=2)
    stores = [Kept("a"), Kept("b")]
    saves = TableSeries(series, stores, changes=data.draw(st.integers(0, 3)))
    some = st.lists(st.integers(0, 30), max_size=8)
    for step in range(1, data.draw(st.integers(2, 6))):
        for store in stores:
            for change in (store.touch, store.wait, store.remove):
                change(KEYS[:31][data.draw(some)], step)
        saves.save(step)
        if data.draw(st.booleans()):
            saves.compact()
    fresh = [Kept("a"), Kept("b")]
    assert TableSeries(series, fresh).restore() == step
    assert [f.content() for f in fresh] == [store.content() for store in stores]


@pytest.mark.few(2)
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1), (4, 4), (5, 7)])
def test_another_number_of_servers_has_the_same_rows(
    tmp_path: Path, before: int, after: int
) -> None:
    """Saved in full and in increments by `before` servers, read by `after`, each its own rows."""
    series, whole = CheckpointSeries(tmp_path), Kept()
    old = servers(before)
    for store in [whole, *old]:
        store.touch(KEYS[:400], 1)
        store.wait(KEYS[400:], 1)
    save_job(series, old, 1)
    for store in [whole, *old]:
        store.touch(KEYS[100:120], 2)
        store.remove(KEYS[:30], 2)
    save_job(series, old, 2, since=1)
    new = servers(after)
    for store in new:
        load_tables(series.chain(2), [store], buckets=store.buckets)
    together = Kept(
        rows={k: r for store in new for k, r in store.rows.items()},
        waiting={k: c for store in new for k, c in store.waiting.items()},
    )
    assert together.content() == whole.content()
    assert sum(len(store.rows) for store in new) == len(whole.rows)
    for store in new:  # and continues: the next increments are of the new servers
        store.touch(KEYS[200:205], 3)
    whole.touch(KEYS[200:205], 3)
    save_job(series, new, 3, since=2)
    assert restored(series, 3).content() == whole.content()


def save_job(
    series: CheckpointSeries, stores: list[Kept], step: int, since: int | None = None
) -> None:
    """Saves as a job does: one part per server, and one of them commits."""
    folder = series.path(step)
    changes = {} if since is None else {stores[0].name: since}
    receipts = [
        write_part(
            folder,
            f"server {number}",
            table_pieces([store], buckets=store.buckets, since=changes),
            step=step,
        )
        for number, store in enumerate(stores)
    ]
    older = None if since is None else open_checkpoint(series.path(since))
    after = None if older is None else Link(older.step, older.sha256)
    commit(folder, receipts, step=step, after=after)


def test_a_server_reads_only_the_spans_of_its_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series, (first, second) = CheckpointSeries(tmp_path), servers(2)
    for store in (first, second):
        store.touch(KEYS, 1)
    save_job(series, [first, second], 1)
    data = series.path(1) / open_checkpoint(series.path(1)).parts[1].folder.name / "data"
    damage(data)
    fresh = Kept(buckets=first.buckets)
    load_tables(series.chain(1), [fresh], buckets=first.buckets)
    assert fresh.content() == first.content()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tables(series.chain(1), [Kept()], buckets=second.buckets)


def damage(folder: Path) -> None:
    """Inverts every bit of every file."""
    for path in folder.rglob("*"):
        if path.is_file():
            whole = path.read_bytes()
            path.write_bytes(bytes(byte ^ 255 for byte in whole))


def test_a_large_table_is_cut_into_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxfleet.checkpoint.tables.row_pieces.SPAN_BYTES", 20_000)
    store, series = Kept(), CheckpointSeries(tmp_path)
    store.touch(KEYS, 1)
    save_tables(series, [store], step=1)
    store.touch(KEYS[::7], 2)
    store.remove(KEYS[1::7], 2)
    save_tables(series, [store], step=2, after=1)
    names = open_checkpoint(series.path(1)).names()
    assert sum(name.endswith("/keys") for name in names) > 3
    assert restored(series, 2).content() == store.content()
    one = saved_tables(series.chain(2))["users"]
    assert max(len(batch.keys) for batch in one.batches()) < len(KEYS) // 3


def test_a_table_without_rows_comes_back(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save_tables(series, [Kept()], step=1)
    save_tables(series, [Kept()], step=2, after=1)
    assert restored(series, 2).rows == {}
    assert saved_tables(series.chain(2))["users"].export()[1].shape == (0, DIM)


def test_a_new_table_is_whole_among_changes_of_others(tmp_path: Path) -> None:
    series, stores = CheckpointSeries(tmp_path), [Kept("a/b"), Kept("b")]
    for store in stores:
        store.touch(KEYS, 1)
    save_tables(series, stores[:1], step=1)
    stores[0].touch(KEYS[:3], 2)
    save_tables(series, stores, step=2, after=1)
    fresh = [Kept("a/b"), Kept("b")]
    load_tables(series.chain(2), fresh)
    assert [f.content() for f in fresh] == [store.content() for store in stores]


def test_what_a_kept_save_stands_on_is_kept(tmp_path: Path) -> None:
    series, store = CheckpointSeries(tmp_path, keep=1), Kept()
    saves = TableSeries(series, [store], changes=3)
    there = []
    for step in range(1, 8):
        store.touch(KEYS[step : step + 3], step)
        saves.save(step)
        there.append(series.steps())
    assert there == [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (5,), (5, 6), (5, 6, 7)]
    assert restored(series, 7).content() == store.content()


def test_keys_that_went_are_forgotten_once_that_is_saved(tmp_path: Path) -> None:
    store = Kept()
    saves = TableSeries(CheckpointSeries(tmp_path), [store])
    store.touch(KEYS, 1)
    saves.save(1)
    store.remove(KEYS[:9], 2)
    assert len(store.left) == 9
    saves.save(2)
    assert store.left == {}


def test_a_compacted_checkpoint_stands_alone_and_has_the_rest_as_it_was(tmp_path: Path) -> None:
    series, (first, second) = CheckpointSeries(tmp_path, keep=1), servers(2)
    for store in (first, second):
        store.touch(KEYS, 1)
    save_job(series, [first, second], 1)
    for store in (first, second):
        store.touch(KEYS[:40], 2)
        store.remove(KEYS[60:90], 2)
    save_job(series, [first, second], 2, since=1)
    compact(series, 2)
    found = open_checkpoint(series.path(2))
    assert found.after is None
    assert [part.record.part for part in found.parts] == ["server 0", "server 1"]
    series.prune()
    assert series.steps() == (2,)
    fresh = Kept(buckets=second.buckets)
    load_tables([found], [fresh], buckets=second.buckets)
    assert fresh.content() == second.content()


def test_only_the_last_of_a_chain_is_compacted(tmp_path: Path) -> None:
    series, store = CheckpointSeries(tmp_path), Kept()
    for step in (1, 2, 3):
        store.touch(KEYS[step:], step)
        save_tables(series, [store], step=step, after=step - 1 or None)
    with pytest.raises(CheckpointError, match=r"step 3 of .* may hold changes of step 2") as caught:
        compact(series, 2)
    assert "compact the last one, step 3" in caught.value.__notes__[0]


def test_changes_without_what_they_are_of_are_refused(tmp_path: Path) -> None:
    series, store = CheckpointSeries(tmp_path), Kept()
    store.touch(KEYS, 1)
    save_tables(series, [store], step=1)
    save_tables(series, [store], step=2, after=1)
    with pytest.raises(CheckpointError, match="changes of table `users` and not what they are of"):
        load_tables([open_checkpoint(series.path(2))], [Kept()])
    save_tables(series, [store], step=1)  # another save replaces their base
    with pytest.raises(CheckpointError, match="is not the checkpoint whose changes"):
        series.chain(2)
    with pytest.warns(UserWarning, match="step 2 is passed over"):
        assert series.latest() == 1


def test_changes_follow_an_older_save(tmp_path: Path) -> None:
    series, store = CheckpointSeries(tmp_path), Kept()
    save_tables(series, [store], step=2)
    with pytest.raises(CheckpointError, match="cannot be of the save of step 2"):
        save_tables(series, [store], step=2, after=2)
    with pytest.raises(CheckpointError, match="so the changes since step 1 say nothing"):
        save_tables(series, [store], step=3, after=1)
    assert series.steps() == (2,)


def test_a_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    class Wider(Kept):
        @property
        def spec(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
            return super().spec.__class__(name=self.name, dim=DIM + 1)

    series = CheckpointSeries(tmp_path)
    save_tables(series, [Kept()], step=1)
    with pytest.raises(CheckpointError, match="was saved with rows of 16, and has 17 now"):
        load_tables(series.chain(1), [Wider()])
    with pytest.raises(CheckpointError, match="has no table `items`") as caught:
        load_tables(series.chain(1), [Kept("items")])
    assert "it has users" in caught.value.__notes__[0]


def test_a_servers_own_checkpoint_has_not_the_buckets_of_others(tmp_path: Path) -> None:
    series, (first, second) = CheckpointSeries(tmp_path), servers(2)
    first.touch(KEYS, 1)
    save_tables(series, [first], step=1, buckets=first.buckets)
    with pytest.raises(CheckpointError, match="has no bucket 512 of table `users`"):
        load_tables(series.chain(1), [second], buckets=second.buckets)


def test_rows_out_of_order_are_not_saved(tmp_path: Path) -> None:
    class Shuffled(Kept):
        def batches(self, touched_since: int | None = None):  # type: ignore[no-untyped-def]  # noqa: ANN202
            return reversed(list(super().batches(touched_since)))

    store = Shuffled()
    store.touch(KEYS, 1)
    with pytest.raises(CheckpointError, match="gave buckets"):
        save_tables(CheckpointSeries(tmp_path), [store], step=1)
    assert list(tmp_path.iterdir()) == []
