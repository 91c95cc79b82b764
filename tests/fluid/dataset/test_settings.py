"""Further settings of datasets, and loaders that read them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import AssertedError, FeedError, ProgramError, UnsupportedError
from tests.fluid.nets import fresh


def in_memory(folder: Path, lines: list[str], *, dense: bool = False) -> Any:
    """Returns a dataset of two slots of ids and a dense number, of one file."""
    path = folder / "part-0"
    path.write_text("".join(f"{line}\n" for line in lines))
    with fresh():
        slots = [fluid.data(n, [None, 1], dtype="int64", lod_level=1) for n in ("a", "b")]
        slots += [fluid.data("d", [None, 1])] if dense else []
    made = fluid.DatasetFactory().create_dataset("InMemoryDataset")
    made.set_use_var(slots)
    made.set_filelist([str(path)])
    made.set_batch_size(8)
    return made


def held(dataset: Any) -> dict[str, list[list[float]]]:
    """Returns the values of each slot, sample by sample."""
    (feed,) = dataset.batches()
    found = {}
    for name, value in feed.items():
        rows = np.asarray(value)[:, 0].tolist()
        lod = value.recursive_sequence_lengths() if isinstance(value, fluid.LoDTensor) else []
        ends = np.cumsum(lod[0] if lod else [1] * len(rows)).tolist()
        found[name] = [rows[i:j] for i, j in zip([0, *ends[:-1]], ends, strict=True)]
    return found


def test_settings_are_kept_as_attributes() -> None:
    made: Any = fluid.DatasetFactory().create_dataset("InMemoryDataset")
    made.set_parse_ins_id(True)
    made.set_parse_content(True)
    made.set_queue_num(3)
    made.set_fleet_send_batch_size(800)
    made.set_fleet_send_sleep_seconds(2)
    made._set_trainer_num(4)
    assert (made.parse_ins_id, made.parse_content, made.queue_num) == (True, True, 3)
    assert (made.fleet_send_batch_size, made.fleet_send_sleep_seconds) == (800, 2)
    assert (made.trainer_num, made.merge_by_lineid) == (4, False)
    made.set_merge_by_lineid()
    assert made.merge_by_lineid


def test_ids_and_contents_stand_before_the_slots(tmp_path: Path) -> None:
    made = in_memory(tmp_path, ["1 id0 1 hi 1 7 2 8 9", "", "1 id1 1 ho 1 5 1 6"])
    made.set_parse_ins_id(True)
    made.set_parse_content(True)
    made.load_into_memory()
    assert held(made) == {"a": [[7], [5]], "b": [[8, 9], [6]]}


def test_a_line_without_the_id_that_it_shall_have_is_named(tmp_path: Path) -> None:
    made = in_memory(tmp_path, ["1 id0 1 7 1 8", "2 id1 x 1 7 1 8"])
    made.set_parse_ins_id(True)
    with pytest.raises(FeedError, match=r"part-0, line 2: does not begin with '1 <id>'"):
        made.load_into_memory()


def test_samples_of_one_id_become_one(tmp_path: Path) -> None:
    lines = ["1 x 1 7 1 0 1 0.0", "1 y 1 5 1 0 1 2.5", "1 x 1 0 2 8 9 1 1.5", "1 y 1 0 1 6 1 0.0"]
    made = in_memory(tmp_path, lines, dense=True)
    made.set_merge_by_lineid(2)
    made.load_into_memory()
    made.global_shuffle()
    assert made.get_memory_data_size() == 2
    assert held(made) == {"a": [[7], [5]], "b": [[8, 9], [6]], "d": [[1.5], [2.5]]}


def test_ids_of_too_few_samples_or_with_two_values_are_left_out(tmp_path: Path) -> None:
    lines = ["1 x 1 7 1 0", "1 y 1 5 1 1", "1 y 1 4 1 2", "1 z 1 5 1 0", "1 z 1 0 1 6"]
    made = in_memory(tmp_path, lines)
    made.set_merge_by_lineid()
    made.load_into_memory()
    with pytest.warns(UserWarning, match="3 samples are left out"):
        made.global_shuffle()
    assert held(made) == {"a": [[5]], "b": [[6]]}


def test_slots_are_mixed_where_features_are_evaluated(tmp_path: Path) -> None:
    made = in_memory(tmp_path, [f"1 {n} 2 {n} {n + 10}" for n in range(1, 7)])
    made.load_into_memory()
    made.set_shuffle_seed(3)
    made.slots_shuffle(["b"])
    before = held(made)
    assert before["b"] == [[n, n + 10] for n in range(1, 7)]
    made.set_fea_eval(100, True)
    made.slots_shuffle(["b"])
    after = held(made)
    assert after["a"] == before["a"]
    assert after["b"] != before["b"]
    assert sorted(after["b"]) == before["b"]


def test_a_queue_holds_no_slots_to_mix() -> None:
    made: Any = fluid.DatasetFactory().create_dataset("QueueDataset")
    made.set_fea_eval(1, True)
    with pytest.raises(UnsupportedError, match="QueueDataset holds no samples"):
        made.slots_shuffle(["a"])


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [2, 2]), (False, [2, 2, 1])])
def test_a_loader_reads_a_dataset_for_one_device(
    tmp_path: Path, drop_last: bool, sizes: list[int]
) -> None:
    made = in_memory(tmp_path, [f"1 {n} 2 {n} {n}" for n in range(5)])
    made.set_batch_size(2)
    made.load_into_memory()
    loader = fluid.io.DataLoader.from_dataset(made, fluid.CPUPlace(), drop_last=drop_last)
    feeds = [feed for (feed,) in loader()]
    assert [len(feed["a"].recursive_sequence_lengths()[0]) for feed in feeds] == sizes
    assert feeds[0]["b"].shape() == [4, 1]
    assert feeds[0]["b"]._place()._equals(fluid.CPUPlace())


def test_each_device_gets_a_batch_of_a_dataset(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_text("".join(f"2 {n} 1 1 {n}\n" for n in range(10)))
    with fresh() as (main, startup), fluid.scope_guard(fluid.Scope()):
        x, y = fluid.data("x", [None, 2]), fluid.data("y", [None, 1], dtype="int64")
        loss = fluid.layers.mean(
            fluid.layers.cross_entropy(fluid.layers.fc(x, 10, act="softmax"), y)
        )
        made: Any = fluid.DatasetFactory().create_dataset("QueueDataset")
        made.set_use_var([x, y])
        made.set_batch_size(2)
        made.set_filelist([str(path)])
        places = fluid.cpu_places(2)
        loader = fluid.io.DataLoader.from_dataset(dataset=made, places=places)
        compiled = fluid.CompiledProgram(main).with_data_parallel(places=places)
        exe = fluid.Executor(fluid.CPUPlace())
        exe.run(startup)
        for _ in range(2):  # passes
            feeds = list(loader)
            assert [len(feed) for feed in feeds] == [2, 2]  # the fifth batch has no partner
            for feed in feeds:
                (losses,) = exe.run(compiled, feed=feed, fetch_list=[loss])
                assert losses.shape == (2,)


def test_a_loader_needs_a_dataset() -> None:
    with pytest.raises(AssertedError, match="a loader reads a dataset, not a list"):
        fluid.io.DataLoader.from_dataset([], fluid.cpu_places(1))  # type: ignore[arg-type]


def test_a_dataset_has_the_methods_of_fluids_core(tmp_path: Path) -> None:
    made = in_memory(tmp_path, ["1 id0 1 7 1 0", "1 id0 1 0 1 8", "1 id1 1 5 1 6", "1 id1 1 0 1 0"])
    made.set_parse_ins_id(True)
    made.load_into_memory()
    made.set_merge_by_lineid(2)
    made.dataset.merge_by_lineid()
    assert held(made) == {"a": [[7], [5]], "b": [[8], [6]]}
    assert made.dataset.get_memory_data_size() == made.get_memory_data_size() == 2

    core = fluid.core.Dataset("MultiSlotDataset")
    core.set_thread_num(12)
    core.set_filelist(["a.txt", "b.txt"])
    core.set_trainer_num(4)
    core.set_download_cmd("./read_from fs")
    with pytest.warns(UserWarning, match="set_hdfs_config does nothing"):
        core.set_hdfs_config("fs", "ugi")
    assert (core.get_thread_num(), core.get_trainer_num()) == (12, 4)
    assert (core.get_filelist(), core.get_hdfs_config()) == (["a.txt", "b.txt"], ("fs", "ugi"))
    assert core.get_download_cmd() == "./read_from fs"
    with pytest.raises(ValueError, match="dataset class OtherDataset does not exist"):
        fluid.core.Dataset("OtherDataset")


def test_a_dataset_of_pipelines_reads_as_a_queue_does(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_text("1 7\n1 8\n")
    made: Any = fluid.DatasetFactory().create_dataset("FileInstantDataset")
    with fresh():
        made.set_use_var([fluid.data("a", [None, 1], dtype="int64")])
    made.set_filelist([str(path)])
    made.set_batch_size(2)
    (feed,) = made.batches()
    assert feed["a"].tolist() == [[7], [8]]
    with pytest.raises(UnsupportedError, match="FileInstantDataset does not support local_shuffle"):
        made.local_shuffle()


def test_a_worker_for_which_no_file_is_left_trains_for_no_step() -> None:
    with fresh() as (main, startup), fluid.scope_guard(fluid.Scope()):
        slot = fluid.data("a", [None, 1])
        layers = fluid.layers
        fluid.optimizer.SGD(0.1).minimize(layers.mean(layers.fc(slot, 1)))
        made = fluid.DatasetFactory().create_dataset("QueueDataset")
        made.set_use_var([slot])
        exe = fluid.Executor(fluid.CPUPlace())
        exe.run(startup)
        with pytest.raises(ProgramError, match="the dataset has no files"):
            exe.train_from_dataset(main, made)
        made.set_filelist([])
        with pytest.warns(UserWarning, match="list of files is empty: no step is run"):
            exe.train_from_dataset(main, made)
