"""Rendezvous in a folder; threads simulate processes."""

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.cluster.rendezvous import FileRendezvous, Roster, reduce_into
from jaxfleet.cluster.rendezvous.exchanged_values import pack, unpack
from jaxfleet.cluster.rendezvous.file_rendezvous import FileDiscovery, write_file
from jaxfleet.cluster.rendezvous.protocol import Poll
from jaxfleet.errors import (
    ClosedError,
    ConnectError,
    PeerLostError,
    ProgramError,
    StrategyError,
    WrongTypeError,
)

WORKERS, SERVERS = ("w0:1", "w1:1"), ("s0:1", "s1:1")
LONG_S = 60.0


def roster(role: str, index: int, workers: Sequence[str] = WORKERS) -> Roster:
    return Roster(workers, SERVERS, is_worker=role == "trainer", index=index)


def meeting(folder: Path, role: str, index: int, **options: Any) -> FileRendezvous:
    times: dict[str, Any] = {"connect_s": LONG_S, "timeout_s": LONG_S} | options
    return FileRendezvous(folder, roster(role, index), **times)


def everybody(folder: Path) -> list[FileRendezvous]:
    return [meeting(folder, role, at) for role in ("trainer", "pserver") for at in (0, 1)]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Returns the results of concurrent calls; errors are returned as well."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def test_all_gather_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for name in ("hello.0", "hello.1"):  # left by an earlier job
        (tmp_path / "all" / name).write_text('{"run": "old", "members": ["x"], "seen": {"1": "y"}}')
    for name, text in {"hello.2": "{cut off", "hello.3": '["of something else"]'}.items():
        (tmp_path / "all" / name).write_text(text)
    (tmp_path / "all" / "0123.7.0").write_bytes(b"old")
    members = everybody(tmp_path)
    assert at_once(*(each.join for each in members)) == [None] * 4
    for number in range(3):
        gathered = at_once(
            *(partial(m.gather, "all", (n, number), "all_gather") for n, m in enumerate(members))
        )
        assert gathered == [[(0, number), (1, number), (2, number), (3, number)]] * 4
    first, second = members[:2]
    ours = at_once(
        lambda: first.gather("trainer", "a", "x"), lambda: second.gather("trainer", "b", "x")
    )
    assert ours == [["a", "b"]] * 2
    files = {path.name.partition(".")[2] for path in (tmp_path / "all").iterdir()}
    assert files <= {f"{at}" for at in range(4)} | {f"{n}.{at}" for n in (2, 3) for at in range(4)}


def test_a_file_that_is_being_written_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in a container
    monkeypatch.setattr(Path, "replace", lambda *_: None)
    write_file(tmp_path / "hello.0", b"being written")
    assert len([*tmp_path.iterdir()]) == 1
    assert not [*tmp_path.glob("*.*.1")]  # files that process 1 takes for its own of an earlier job


def test_workers_reduce_in_their_order(tmp_path: Path) -> None:
    first, second = everybody(tmp_path)[:2]

    def reduced(member: FileRendezvous, given: Any, output: Any, mode: str) -> Any:
        reduce_into(output, lambda part: member.gather("trainer", part, mode), given, mode)
        return output

    for mode, expected in [("sum", [0.1 + 0.7, 6.0]), ("min", [0.1, 2.0]), ("max", [0.7, 4.0])]:
        results = at_once(
            partial(reduced, first, np.array([0.1, 4.0]), np.zeros(2), mode),
            partial(reduced, second, [0.7, 2.0], [0, 0], mode),
        )
        assert [list(each) for each in results] == [expected, expected]
    shapes = at_once(
        lambda: reduced(first, [1], [0], "sum"), lambda: reduced(second, [1, 2], [0, 0], "sum")
    )
    assert [type(each) for each in shapes] == [ProgramError] * 2
    assert str(shapes[0]) == "worker 1 reduces a shape of (2,), and this one (1,)"


def test_who_never_came_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match=r"waited 0.1 s in .*trainer for trainer 1 \(w1:1\)"):
        meeting(tmp_path, "trainer", 0, connect_s=0.1).gather("trainer", 1, "barrier")


def test_who_was_there_and_does_not_come_is_named(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    second = FileDiscovery(tmp_path / "trainer", roster("trainer", 1).members("trainer"), 1)
    first = meeting(tmp_path, "trainer", 0, timeout_s=0.2)
    found, _ = at_once(
        lambda: first.gather("trainer", None, "barrier"), lambda: second.find_all(LONG_S)
    )
    assert isinstance(found, PeerLostError)
    assert str(found).startswith("barrier, gathering 1 in ")
    assert str(found).endswith("trainer: waited 0.2 s for trainer 1 (w1:1)")


def test_who_began_anew_is_named(tmp_path: Path) -> None:
    first, second = meeting(tmp_path, "trainer", 0), meeting(tmp_path, "trainer", 1)
    at_once(lambda: first.gather("trainer", 1, "go"), lambda: second.gather("trainer", 2, "go"))
    anew = meeting(tmp_path, "trainer", 1, connect_s=0.1)
    with pytest.raises(ConnectError):
        anew.gather("trainer", 2, "go")
    with pytest.raises(PeerLostError, match=r"trainer 1 \(w1:1\) was started again"):
        first.gather("trainer", 1, "go")


def test_who_has_left_or_lost_the_folder_is_told(tmp_path: Path) -> None:
    first, second = meeting(tmp_path, "trainer", 0), meeting(tmp_path, "trainer", 1)
    at_once(lambda: first.gather("trainer", 1, "go"), lambda: second.gather("trainer", 2, "go"))
    shutil.rmtree(tmp_path / "trainer")
    with pytest.raises(PeerLostError, match=r"go on: folder .*, in which processes meet, is lost"):
        first.gather("trainer", 1, "go on")
    second.close()
    second.close()
    with pytest.raises(ClosedError, match="go on: this process has left the others"):
        second.gather("trainer", 1, "go on")


def test_two_of_one_number_are_found(tmp_path: Path) -> None:
    hello = tmp_path / "trainer" / "hello.0"

    def be_the_other() -> None:
        poll = Poll(LONG_S)
        while not hello.exists() and not poll.is_over:
            poll.pause(lambda: "a test waits")
        write_file(hello, b'{"run": "other", "members": [], "seen": {}}')

    first = meeting(tmp_path, "trainer", 0)
    _, found = at_once(be_the_other, lambda: first.gather("trainer", 1, "go"))
    assert isinstance(found, StrategyError)
    assert str(found).startswith("two processes say that they are trainer 0 (w0:1), in ")


def test_another_idea_of_the_job_is_found(tmp_path: Path) -> None:
    one, others = meeting(tmp_path, "trainer", 0), roster("trainer", 1, ("w0:1", "other:1"))
    two = FileRendezvous(tmp_path, others, connect_s=LONG_S, timeout_s=LONG_S)
    found = at_once(lambda: one.gather("trainer", 1, "go"), lambda: two.gather("trainer", 1, "go"))
    assert [type(each) for each in found] == [StrategyError] * 2
    assert "trainer 1 (w1:1) takes the group for trainer 0 (w0:1), trainer 1 (other:1);" in str(
        found[0]
    )


def test_another_call_is_found(tmp_path: Path) -> None:
    one, two = meeting(tmp_path, "trainer", 0), meeting(tmp_path, "trainer", 1)
    found = at_once(
        lambda: one.gather("trainer", 1, "all_gather"), lambda: two.gather("trainer", 1, "barrier")
    )
    assert [type(each) for each in found] == [ProgramError] * 2
    expected = "trainer 1 (w1:1) is at barrier, and this process at all_gather: gathering 1 in "
    assert str(found[0]).startswith(expected)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StrategyError, match="in which processes are to meet, cannot be made"):
        meeting(tmp_path / "file", "trainer", 0).join()


PLAIN: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text()
)
PLAIN |= st.binary()
KEYS = st.text() | st.integers(-9, 9)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert repr(unpack(pack(value))) == repr(value)  # not equality: nan


def test_arrays_come_back_as_they_were() -> None:
    for array in (np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(0.1), np.array(2j)):
        back = unpack(pack([array]))[0]
        assert (back.dtype, back.shape, back.tolist()) == (array.dtype, array.shape, array.tolist())
    with pytest.raises(WrongTypeError, match="of type set cannot be sent"):
        pack({1})
    with pytest.raises(WrongTypeError, match="cannot be sent"):
        pack(2**70)
