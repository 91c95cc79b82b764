"""The step after which a process goes on that takes a lost trainer's place."""

import pytest

from jaxfleet.ps.client.former_process import FormerProcess, find_former
from jaxfleet.ps.client.replay_log import ReplayLog
from jaxfleet.ps.client.server_session import ServerSession
from jaxfleet.ps.client.trainer_identity import TrainerIdentity


def session(
    step: int, seen: int | None, *, restored: bool = False, takes: bool = True,
    rows: int | None = None,
) -> ServerSession:  # fmt: skip
    log = ReplayLog(until_saved=True)
    return ServerSession(
        log, step=step, seen=seen, base=0, is_restored=restored, takes_pushes=takes, rows=rows
    )


def found(
    *servers: ServerSession, life: int = 1, is_sync: bool = False
) -> tuple[FormerProcess | None, list[int]]:
    me = TrainerIdentity("j", 1, 2, ("a:1", "b:1"), "abc", [], life=life, is_sync=is_sync)
    return find_former(servers, me)


def test_steps_that_some_server_lacks_are_taken_again() -> None:
    former, lacking = found(session(9, 11), session(6, 9))
    assert former == FormerProcess(11, 0, 6)
    assert lacking == []
    assert (former.done, former.has_begun) == (5, True)
    assert [step for step in range(12) if former.ended_at(step)] == [6]


def test_a_server_that_was_restarted_too_decides_where_to_go_on() -> None:
    former, lacking = found(session(9, 11), session(4, None, restored=True))
    assert (former, lacking) == (FormerProcess(11, 0, 4), [])
    alone, _ = found(session(4, None, restored=True))
    assert alone == FormerProcess(4, 0, 4)


def test_where_trainers_wait_such_a_server_lacks_gradients() -> None:
    restored = session(4, None, restored=True)
    assert found(session(10, 11), restored, is_sync=True) == (FormerProcess(11, 0), [1])


@pytest.mark.parametrize(("rows", "done"), [((5, 6), 5), ((5, 5), 5), ((4, 5), 4)])
def test_where_trainers_wait_rows_that_a_server_lacks_are_taken_again(
    rows: tuple[int, int], done: int
) -> None:
    servers = [session(5, seen, rows=n) for seen, n in zip((6, 5), rows, strict=True)]
    former, lacking = found(*servers, is_sync=True)
    assert former is not None
    assert (former.done, lacking) == (done, [])
    restored = session(done - 1, None, restored=True, rows=done - 1)
    assert found(*servers, restored, is_sync=True) == (former, [2])


def test_a_server_without_gradients_of_trainers_says_nothing() -> None:
    former, _ = found(session(7, 8), session(0, 8, takes=False))
    assert former is not None
    assert former.done == 6


@pytest.mark.parametrize("is_sync", [False, True])
def test_a_first_process_has_no_former_one(is_sync: bool) -> None:
    assert found(session(5, None), session(5, None), life=0, is_sync=is_sync) == (None, [])
    restored = session(5, None, restored=True)
    assert found(restored, life=0, is_sync=is_sync) == (None, [])


@pytest.mark.parametrize(
    ("former", "done", "has_begun"),
    [
        (FormerProcess(0, 0, 0), 0, False),  # it had not sent a state, or received one
        (FormerProcess(1, 0, 0), 0, True),
        (FormerProcess(3, 0, 1), 0, True),
        (FormerProcess(10, 10, 10), 10, True),  # restored from a checkpoint
        (FormerProcess(9, 10, 10), 0, False),  # lost in its restore
        (FormerProcess(12, 10, 12), 11, True),
        (FormerProcess(1, 0), 0, False),  # trainers wait for each other
        (FormerProcess(2, 0), 1, True),
    ],
)
def test_it_goes_on_after_the_step_before_the_last_complete_one(
    former: FormerProcess, done: int, has_begun: bool
) -> None:
    assert (former.done, former.has_begun) == (done, has_begun)


def test_it_has_begun_no_step_before_its_first() -> None:
    former = FormerProcess(4, 0, rows=3)
    assert [step for step in range(5) if former.has_not_begun_after(step)] == [3]
    assert not FormerProcess(0, 0, 0).has_not_begun_after(0)


def test_no_message_ended_with_the_step_that_the_job_began_with() -> None:
    assert not FormerProcess(12, 10, 10).ended_at(10)
    assert not FormerProcess(12, 10).ended_at(12)
