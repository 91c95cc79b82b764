"""Datasets: files read ahead in their order, through commands, mixed in memory."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ClosedError, FeedError, ProgramError
from jaxfleet.fluid.dataset import DatasetBase
from tests.fluid.dataset.files import written
from tests.fluid.nets import fresh


def dataset(kind: str, files: list[str], batch: int = 3, threads: int = 2) -> Any:
    with fresh():
        ids = fluid.data("ids", [None, 1], dtype="int64", lod_level=1)
        label = fluid.data("label", [None, 1], dtype="float32")
    made = fluid.DatasetFactory().create_dataset(kind)
    made.set_batch_size(batch)
    made.set_thread(threads)
    made.set_filelist(files)
    made.set_use_var([ids, label])
    return made


def numbered(folder: Path, *counts: int) -> list[str]:
    """Writes files whose samples are numbered consecutively."""
    paths, at = [], 0
    for file, count in enumerate(counts):
        samples = [([i] * (1 + i % 3), [i / 2]) for i in range(at, at + count)]
        paths.append(written(folder / f"part-{file}", samples))
        at += count
    return paths


def labels(batches: Any) -> list[list[float]]:
    return [(2 * feed["label"][:, 0]).tolist() for feed in batches]


def in_one(made: DatasetBase) -> list[float]:
    return [label for batch in labels(made.batches()) for label in batch]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_batches_go_over_files_in_their_order_whatever_the_threads(
    tmp_path: Path, threads: int
) -> None:
    files = numbered(tmp_path, 4, 0, 1, 5)
    found = labels(dataset("QueueDataset", files, threads=threads).batches())
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_a_long_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxfleet.fluid.dataset.reading.BLOCK", 7)
    files = numbered(tmp_path, 40, 3)
    found = labels(dataset("QueueDataset", files, batch=50).batches())
    assert found == [list(range(43))]


def test_a_mistake_far_down_is_named_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxfleet.fluid.dataset.reading.BLOCK", 16)
    (path,) = numbered(tmp_path, 30)
    with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123  # it is a str
        file.write("1 5 1 x\n")
    with pytest.raises(FeedError, match="part-0, line 31: slot 'label' has a value that is no"):
        list(dataset("QueueDataset", [path]).batches())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    with pytest.raises(FeedError, match="nowhere' cannot be read"):
        list(dataset("QueueDataset", [*numbered(tmp_path, 2), missing]).batches())


def test_files_go_through_a_command_by_its_words(tmp_path: Path) -> None:
    script = tmp_path / "double it.py"
    script.write_text(
        "import sys\nfor line in sys.stdin: print(line.strip()); print(line.strip())\n"
    )
    made = dataset("QueueDataset", numbered(tmp_path, 2), batch=9)
    made.set_pipe_command(f"{sys.executable} '{script}'")
    assert labels(made.batches()) == [[0, 0, 1, 1]]


def test_a_command_that_fails_is_shown_with_what_it_said(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys\nsys.exit('no such feature: 17')\n")
    made = dataset("QueueDataset", numbered(tmp_path, 2))
    made.set_pipe_command(f"{sys.executable} {script}")
    with pytest.raises(FeedError, match=r"(?s)ended with 1 on .*part-0.*no such feature: 17"):
        list(made.batches())


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    made = dataset("QueueDataset", numbered(tmp_path, 2))
    made.set_pipe_command("no_such_command --fast")
    with pytest.raises(ProgramError, match="'no_such_command --fast' cannot be run"):
        list(made.batches())


@pytest.mark.parametrize("command", ["cat | sort", "cat > x", "a && b", "", "a 'b"])
def test_what_only_a_shell_understands_is_refused(command: str) -> None:
    with pytest.raises(ProgramError, match="command"):
        DatasetBase().set_pipe_command(command)


def test_threads_end_when_nobody_wants_more(tmp_path: Path) -> None:
    before = threading.active_count()
    batches = dataset("QueueDataset", numbered(tmp_path, *[200] * 8), batch=1).batches()
    next(batches)
    batches.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_memory_is_mixed_and_the_same_samples(tmp_path: Path) -> None:
    made = dataset("InMemoryDataset", numbered(tmp_path, 30, 30), batch=7)
    made.load_into_memory()
    assert made.get_memory_data_size() == made.get_shuffle_data_size() == 60
    plain = in_one(made)
    made.set_shuffle_seed(1)
    made.local_shuffle()
    mixed = in_one(made)
    assert plain == list(range(60))
    assert mixed != plain
    assert sorted(mixed) == plain
    assert mixed == in_one(made)  # another pass is the same
    made.release_memory()
    with pytest.raises(ProgramError, match="holds no samples"):
        made.local_shuffle()


def test_a_slot_stays_with_its_sample_when_mixed(tmp_path: Path) -> None:
    made = dataset("InMemoryDataset", numbered(tmp_path, 20), batch=20)
    made.load_into_memory()
    made.global_shuffle()
    (feed,) = made.batches()
    lengths = feed["ids"].recursive_sequence_lengths()[0]
    number = (2 * feed["label"][:, 0]).astype(int)
    np.testing.assert_array_equal(lengths, 1 + number % 3)
    np.testing.assert_array_equal(np.asarray(feed["ids"])[:, 0], np.repeat(number, lengths))


def test_a_shuffle_of_several_trainers_says_that_it_is_local(tmp_path: Path) -> None:
    class Fleet:
        def worker_num(self) -> int:
            return 2

    made = dataset("InMemoryDataset", numbered(tmp_path, 5))
    made.load_into_memory()
    with pytest.warns(UserWarning, match="none goes to another trainer"):
        made.global_shuffle(Fleet())


def test_files_are_loaded_while_the_caller_does_something_else(tmp_path: Path) -> None:
    made = dataset("InMemoryDataset", numbered(tmp_path, 5, 6))
    with pytest.raises(ClosedError, match="nothing is being read"):
        made.wait_preload_done()
    made.preload_into_memory(thread_num=2)
    made.wait_preload_done()
    assert made.get_memory_data_size() == 11
    made.set_filelist([str(tmp_path / "nowhere")])
    made.preload_into_memory()
    with pytest.raises(FeedError, match="nowhere"):
        made.wait_preload_done()


def test_what_a_dataset_cannot_do_is_said() -> None:
    with pytest.raises(ValueError, match="datafeed class NoDataset does not exist"):
        fluid.DatasetFactory().create_dataset("NoDataset")
    queue: Any = fluid.DatasetFactory().create_dataset()
    for shuffle in (queue.local_shuffle, queue.global_shuffle):
        with pytest.raises(NotImplementedError, match="it holds no samples"):
            shuffle()
    with pytest.raises(ValueError, match="batch_size is 0"):
        queue.set_batch_size(0)
    with pytest.raises(ValueError, match="has no variables for the values"):
        list(queue.batches())
    with pytest.warns(UserWarning, match="files are read where this process sees them"):
        queue.set_hdfs_config("a", "b")
    with fresh(), pytest.raises(ValueError, match="'x' is float64"):
        queue.set_use_var([fluid.data("x", [None, 1], dtype="float64")])


def test_a_description_says_what_was_set(tmp_path: Path) -> None:
    text = dataset("QueueDataset", numbered(tmp_path, 1)).desc()
    assert "batch_size: 3" in text
    assert "slots { name: 'ids' type: 'uint64' is_dense: false }" in text
    assert "slots { name: 'label' type: 'float' is_dense: true }" in text
