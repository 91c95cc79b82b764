"""Batches of a loader: their order, their parts, their sources and their position."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.data import Loader
from jaxfleet.errors import FeedError, StrategyError


def numbers(length: int) -> np.ndarray:
    return np.arange(length)


@given(st.integers(1, 200), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 99))
def test_an_epoch_has_every_sample_once_but_for_a_dropped_rest(
    length: int, batch_size: int, drop_last: bool, shuffle: bool, seed: int
) -> None:
    batch_size = min(batch_size, length)
    loader = Loader(
        numbers(length), batch_size, epochs=2, drop_last=drop_last, shuffle=shuffle, seed=seed,
        prefetch=0,
    )  # fmt: skip
    full, rest = divmod(length, batch_size)
    sizes = [batch_size] * full + ([rest] if rest and not drop_last else [])
    batches = list(loader)
    assert [len(batch) for batch in batches] == sizes * 2
    for epoch in (batches[: len(sizes)], batches[len(sizes) :]):
        seen = np.concatenate(epoch)
        assert len(set(seen.tolist())) == sum(sizes)
        assert shuffle or seen.tolist() == list(range(sum(sizes)))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 6))
def test_another_number_of_processes_goes_on_with_the_same_samples(
    before: int, after: int, done: int
) -> None:
    def read(parts: int, step: int) -> np.ndarray:
        loaders = [
            Loader(numbers(100), 12, batch="local", part=(part, parts)) for part in range(parts)
        ]
        return np.concatenate([loader[step] for loader in loaders])

    whole = Loader(numbers(100), 12)
    state = Loader(numbers(100), 12, batch="local", part=(0, before)).state(done)
    first = next(Loader(numbers(100), 12, batch="local", part=(0, after)).restore(state))
    assert first.tolist() == whole[done][: 12 // after].tolist()
    for step in range(done, 8):
        assert read(after, step).tolist() == whole[step].tolist()


def test_batches_from_a_step_on_are_those_that_were_left() -> None:
    loader = Loader(numbers(40), 4, epochs=None, seed=3)
    batches = loader.from_step(0)
    taken = [next(batches).tolist() for _ in range(25)]
    assert [next(b).tolist() for b in [loader.from_step(13)] for _ in range(12)] == taken[13:]
    assert [loader[step].tolist() for step in range(25)] == taken
    assert batches.state() == loader.state(25)


def test_a_state_is_the_step_taken_not_the_step_read_ahead() -> None:
    loader = Loader(numbers(40), 4, prefetch=5)
    with iter(loader) as batches:
        next(batches)
        assert batches.state()["step"] == 1
        assert next(loader.restore(batches.state())).tolist() == next(batches).tolist()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Loader(numbers(41), 4), "saved with samples=40, and this loader has samples=41"),
        (Loader(numbers(40), 5), "saved with batch_size=4, and this loader has batch_size=5"),
        (Loader(numbers(40), 4, seed=1), "saved with seed=0, and this loader has seed=1"),
        (Loader(numbers(40), 4, shuffle=False), "saved with shuffle=1"),
        (Loader(numbers(40), 4, drop_last=False), "saved with drop_last=1"),
    ],
)
def test_a_position_of_another_order_is_refused(other: Loader, message: str) -> None:
    state = Loader(numbers(40), 4).state(3)
    with pytest.raises(FeedError, match=message) as caught:
        other.restore(state)
    assert "from_step(0)" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 11}, "step is 11|is step 11, and the loader has 10 steps"),
        ({"step": -1}, "is step -1"),
        ({"step": "2"}, "'step' of the position is '2', which is not an integer"),
        ({"step": True}, "'step' of the position is True"),
        ({"rows": 3}, "a position has version, step"),
        ({"version": 2}, "saved with version=2"),
    ],
)
def test_what_is_not_a_position_is_refused(change: dict[str, Any], message: str) -> None:
    loader = Loader(numbers(40), 4)
    with pytest.raises(FeedError, match=message):
        loader.restore(loader.state(2) | change)


def test_a_finished_job_goes_on_with_more_epochs() -> None:
    state = Loader(numbers(8), 4, epochs=1).state(2)
    assert list(Loader(numbers(8), 4, epochs=1).restore(state)) == []
    more = Loader(numbers(8), 4, epochs=2)
    assert [b.tolist() for b in more.restore(state)] == [more[2].tolist(), more[3].tolist()]


@pytest.mark.parametrize(
    ("source", "batch"),
    [
        (numbers(3), numbers(2)),
        (jax.numpy.arange(3), numbers(2)),
        ({"x": numbers(3), "y": 2 * numbers(3)}, {"x": numbers(2), "y": 2 * numbers(2)}),
        ((numbers(3), [2 * numbers(3)]), (numbers(2), [2 * numbers(2)])),
        ([0, 1, 2], numbers(2)),
        ([{"x": np.full(2, n), "y": n} for n in range(3)], {"x": [[0, 0], [1, 1]], "y": [0, 1]}),
        (range(3), numbers(2)),
    ],
)
def test_a_source_is_arrays_or_a_sequence(source: Any, batch: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, Loader(source, 2, shuffle=False)[0], batch)


def test_a_memory_map_is_read_row_by_row(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", numbers(12).reshape(6, 2))
    loader = Loader(np.load(tmp_path / "x.npy", mmap_mode="r"), 3)
    assert loader[1].tolist() == [[2 * n, 2 * n + 1] for n in loader.indices(1)]


def test_a_source_that_gives_several_at_once_is_asked_once() -> None:
    asked: list[Sequence[int]] = []

    class Source:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            raise AssertionError

        def __getitems__(self, indices: list[int]) -> list[int]:
            asked.append(indices)
            return [10 * index for index in indices]

    assert Loader(Source(), 3, shuffle=False)[1].tolist() == [30, 40, 50]
    assert asked == [[3, 4, 5]]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"x": numbers(3), "y": numbers(4)}, r"3 rows at \['x'\] and 4 at \['y'\]"),
        ([], "has no samples"),
        ({"x": [1, 2]}, "a dict is neither arrays nor a sequence"),
        (iter([1]), "is a list_iterator, which can be read only once"),
        (object(), "object is neither"),
        ([None, None], "sample 0 of the source is None, which has no arrays"),
        ([np.zeros(2), np.zeros(3)], r"sample 1 of the source has shape \(3,\), and sample 0 has"),
        ([{"x": 1}, {"y": 1}], "sample 1 of the source is .*'y'"),
        ([1], "has 1 samples, fewer than a batch of 2"),
    ],
)
def test_what_is_wrong_with_a_source_is_named(source: Any, message: str) -> None:
    with pytest.raises(FeedError, match=message):
        Loader(source, 2, shuffle=False)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch": "own"}, "batch is 'own'"),
        ({"part": (0, 2)}, r"part is \(0, 2\), and batch='global'"),
        ({"batch": "local", "part": (2, 2)}, r"part is \(2, 2\)"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"workers": 0}, "workers 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Loader(numbers(8), **{"batch_size": 4, **options})


def test_a_batch_that_processes_cannot_share_is_refused_at_once() -> None:
    with pytest.raises(FeedError, match="a batch of 4 samples cannot be shared by 3 processes"):
        Loader(numbers(8), 4, batch="local", part=(0, 3))
    with pytest.raises(FeedError, match="a batch of 1 samples cannot be shared by 2 processes"):
        Loader(numbers(9), 4, batch="local", part=(0, 2), drop_last=False)


def test_a_process_reads_its_part_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "127.0.0.1:1,127.0.0.1:2")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    whole, own = Loader(numbers(8), 4)[0], Loader(numbers(8), 4, batch="local")[0]
    assert own.tolist() == whole[2:].tolist()


def test_a_step_that_there_is_not_is_an_index_error() -> None:
    loader = Loader(numbers(8), 4)
    for step in (2, -1):
        with pytest.raises(IndexError, match=f"a loader of 2 steps has no step {step}"):
            loader[step]
    with pytest.raises(IndexError, match="a loader of 2 steps cannot begin at step 3"):
        loader.from_step(3)
    with pytest.raises(TypeError, match="epochs=None has no length"):
        len(Loader(numbers(8), 4, epochs=None))


def test_transforms_come_in_their_order_then_augment_then_those_of_a_batch() -> None:
    loader = Loader(
        {"x": numbers(4)}, 2, shuffle=False,
        transforms=[lambda s: {"x": s["x"] + 1}, lambda s: {"x": s["x"] * 10}],
        augment=lambda s, _: {"x": s["x"] + 3},
        batch_transforms=[lambda b: b["x"].sum()],
    )  # fmt: skip
    assert loader[0] == 13 + 23


def test_an_augmentation_depends_on_seed_epoch_and_sample_not_on_the_process() -> None:
    def noisy(sample: Any, random: np.random.Generator) -> Any:
        return sample + random.normal()

    def loader(**options: Any) -> Loader:
        return Loader(np.zeros(8), 4, epochs=2, augment=noisy, shuffle=False, **options)

    halves = [loader(batch="local", part=(part, 2))[1] for part in range(2)]
    assert np.concatenate(halves).tolist() == loader()[1].tolist()
    drawn = np.concatenate([*loader(), *loader(seed=1)])
    assert len(set(drawn.tolist())) == 32
    assert math.isclose(loader()[3][0], loader()[3][0])


def test_an_error_of_a_source_names_the_sample_and_the_step() -> None:
    class Source:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            if index == 4:
                raise KeyError("gone")
            return index

    for prefetch in (0, 2):
        loader = Loader(Source(), 3, shuffle=False, prefetch=prefetch)
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2]
        with pytest.raises(KeyError, match="gone") as caught:
            next(batches)
        assert caught.value.__notes__ == [
            "sample 4 of the source", "in the batch of step 1, epoch 0"
        ]  # fmt: skip
        assert batches.state()["step"] == 1
        assert list(batches) == []


def test_a_source_cannot_end_a_loop_early() -> None:
    class Source:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise StopIteration

    with pytest.raises(FeedError, match=r"raised StopIteration\(\) at step 0"):
        list(Loader(Source(), 2))
