"""grain's sources are sources of a loader, and a loader is a source of grain."""

from typing import Any

import numpy as np
import pytest

import jaxfleet as jf

grain = pytest.importorskip("grain", reason="the extra [data] is not installed")


def test_a_dataset_of_grain_is_a_source() -> None:
    dataset = grain.MapDataset.range(20).map(lambda n: {"n": n, "squared": n * n})
    loader = jf.data.Loader(dataset, 4, seed=1)
    for step, batch in enumerate(loader):
        assert batch["n"].tolist() == loader.indices(step).tolist()
        assert np.array_equal(batch["squared"], batch["n"] ** 2)


def test_a_source_of_grain_gives_the_order_of_a_list() -> None:
    class Source(grain.sources.RandomAccessDataSource[int]):  # type: ignore[name-defined]
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            return index

    batches = [batch.tolist() for batch in jf.data.Loader(Source(), 5, seed=3)]
    assert batches == [batch.tolist() for batch in jf.data.Loader(list(range(20)), 5, seed=3)]


def test_a_sample_that_grain_filtered_out_is_named() -> None:
    dataset = grain.MapDataset.range(4).filter(lambda n: n != 1)
    loader = jf.data.Loader(dataset, 2, shuffle=False)
    with pytest.raises(jf.errors.FeedError, match="sample 1 of the source is"):
        loader[0]


def test_grain_reads_a_loader_and_restores_its_own_position() -> None:
    loader = jf.data.Loader({"n": np.arange(20)}, 4, seed=1)

    def read() -> Any:
        return iter(grain.MapDataset.source(loader).to_iter_dataset())

    iterator = read()
    first = [next(iterator)["n"].tolist() for _ in range(2)]
    assert first == [loader[0]["n"].tolist(), loader[1]["n"].tolist()]
    state, again = iterator.get_state(), read()
    again.set_state(state)
    assert [b["n"].tolist() for b in again] == [b["n"].tolist() for b in loader.from_step(2)]
