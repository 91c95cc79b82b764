"""How processes find each other, and the errors if they do not."""

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

import jaxfleet as jf
from jaxfleet.cluster import ProcessGroup, RankPlace
from jaxfleet.cluster.bootstrap import _end, _leave, _meet, detected_rank
from jaxfleet.cluster.coordinator import Coordinator, CoordinatorThread
from jaxfleet.cluster.coordinator_client import CoordinatorClient, Doing
from jaxfleet.cluster.group_view import GroupView, Termination
from jaxfleet.env import Rank
from jaxfleet.errors import ConnectError, PeerLostError, ProgramError, StrategyError
from jaxfleet.launch.placement import Ports
from jaxfleet.transport.messages import Kind, Message, Plain
from jaxfleet.transport.zmq.network import ZmqNetwork

NETWORK = ZmqNetwork(share_memory=False)
STARTED = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
)
NAMES = ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_TRAINER_ID", "PADDLE_CURRENT_ENDPOINT")


@contextmanager
def met(size: int) -> Iterator[str]:
    """Runs a coordinator; yields its endpoint."""
    listener = NETWORK.listen("127.0.0.1:0")
    center = Coordinator(size, "job", "127.0.0.1:1", lost_after_s=10.0)
    with closing(CoordinatorThread([center], listener)):
        yield listener.endpoint


def member(endpoint: str, rank: int, size: int) -> CoordinatorClient:
    return CoordinatorClient(NETWORK, endpoint, rank=rank, size=size, job="job", lost_after_s=10.0)


@pytest.mark.grid
def test_who_did_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, take = [], Coordinator.take
    monkeypatch.setattr(Coordinator, "take", lambda *given: heard.append(given) or take(*given))  # type: ignore[func-returns-value]
    with ExitStack() as stack:
        endpoint = stack.enter_context(met(4))
        first, third = (stack.enter_context(closing(member(endpoint, n, 4))) for n in (0, 2))
        other = threading.Thread(target=pytest.raises, args=(ConnectError, third.meet, 3.0))
        other.start()
        what = f"ranks 1, 3 of 4 did not come to {endpoint} within 3 s"
        with pytest.raises(ConnectError, match=what):
            first.meet(3.0)
        other.join()
    assert len(heard) < 40, "who waits says hello now and then, not as fast as it can"


@pytest.mark.parametrize("accepted", [False, True])
def test_ranks_without_a_secret_are_told_once_what_to_set(
    accepted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("JAXFLEET_SECRET_FILE", raising=False)
    monkeypatch.setenv("JAXFLEET_INSECURE", "1" if accepted else "")
    with closing(Ports(2)) as ports, pytest.raises(ConnectError, match="rank 1 of 2 did not come"):
        _meet(Rank(0, tuple(ports.endpoints), "job", None, 0, ()), connect_s=0.3, lost_after_s=10.0)
    said = [line for line in caplog.messages if "JAXFLEET_SECRET_FILE=FILE" in line]
    assert len(said) == (0 if accepted else 1)


def test_nobody_there_is_said_with_the_place() -> None:
    with closing(Ports(1)) as ports:
        (endpoint,) = ports.endpoints
        with closing(member(endpoint, 1, 2)) as alone:
            what = f"rank 0 did not answer at {endpoint} within 0.5 s"
            with pytest.raises(ConnectError, match=what):
                alone.meet(0.5)


def test_another_job_at_the_same_place_is_refused() -> None:
    refused = pytest.raises(StrategyError, match="here meet 3 ranks of job 'job', not rank 1 of 2")
    with met(3) as endpoint, closing(member(endpoint, 1, 2)) as lost, refused:
        lost.meet(10.0)


def test_ranks_give_each_other_what_they_have() -> None:
    found: dict[int, list[bytes]] = {}

    def give(rank: int, endpoint: str) -> None:
        with closing(member(endpoint, rank, 3)) as here:
            here.meet(20.0)
            here.ran("a step", "the same program")
            found[rank] = here.together("here", f"of {rank}".encode(), 20.0)
            here.ran("a step", f"another program, of {rank % 2}")
            with pytest.raises(ProgramError, match="have run different steps, or the same"):
                here.bye()

    with met(3) as endpoint:
        threads = [threading.Thread(target=give, args=(rank, endpoint)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == [0, 1, 2]
    assert all(each == [b"of 0", b"of 1", b"of 2"] for each in found.values())


@pytest.mark.grid
def test_what_ends_rank_0_is_told_before_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Coordinator.take

    def slowly(*given: Any) -> Any:
        time.sleep(0.6)
        return take(*given)

    listener = NETWORK.listen("127.0.0.1:0")
    serving = CoordinatorThread([Coordinator(2, "job", "127.0.0.1:1", lost_after_s=10.0)], listener)
    first, second = (member(listener.endpoint, rank, 2) for rank in range(2))
    with closing(second):
        with closing(serving), closing(first):
            other = threading.Thread(target=second.meet, args=(20.0,))
            other.start()
            first.meet(20.0)
            other.join()
            monkeypatch.setattr(Coordinator, "take", slowly)
            time.sleep(1.0)  # until its receive queue overflows
            first.fail("ValueError: no rows")
        until = time.monotonic() + 30.0
        while second.verdict is None and time.monotonic() < until:
            time.sleep(0.05)
        with pytest.raises(PeerLostError, match="rank 0 ended in step 0: ValueError: no rows"):
            second.check()


def test_who_is_late_is_not_who_waits_too() -> None:
    news, at = GroupView(), [(1, "comparing train"), (2, "compiling")]
    ranks: list[Plain] = [{"rank": n, "step": 5, "doing": doing} for n, doing in at]
    news.hear(Message(Kind.HEARTBEAT, "rank 0", body={"ranks": ranks}))
    late = news.late(0, "comparing train", "rank 0 waited 3 s")
    said = "rank 2 is late: rank 0 waited 3 s; its last report: step 5, compiling"
    assert late == news.verdict == Termination(2, said)
    assert news.late(0, "something else", "rank 0 waited 9 s") == late, "the first one stays"


def test_a_rank_says_of_one_moment_where_it_is_and_what_it_does() -> None:
    class Moving(CoordinatorClient):
        """Changes its activity at every read, as when another thread continues."""

        moments = itertools.count()
        _doing = property(lambda self: Doing(n := next(self.moments), f"{n}"), lambda *_: None)

    sent: list[Message] = []
    lines = SimpleNamespace(send=lambda _, message: sent.append(message), close=lambda: None)
    network: Any = SimpleNamespace(connect=lambda _: lines)
    with closing(Moving(network, "one:1", rank=1, size=2, job="job", lost_after_s=9)) as it:
        it.fail("once")
        it.fail("again")
    assert [str(message.step) for message in sent] == [m.body["doing"] for m in sent]
    words = [int(str(message.body["word"])) for message in sent]
    assert words == sorted(set(words))


def test_one_process_alone_is_the_first_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert jf.initialize() == RankPlace(0, 1)
    assert jf.initialize(Rank(0, ("127.0.0.1:6170",), "job")) == RankPlace(0, 1)
    with pytest.raises(StrategyError, match="lost_after_s is 0, but must be a positive number"):
        jf.initialize(lost_after_s=0)


def test_a_cluster_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "node[3-4]",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "JAXFLEET_JOB": "big",
    }
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    found = detected_rank(5.0)
    assert found is not None
    assert (found.rank, len(found.endpoints), found.job, found.gpus) == (1, 2, "big", (0,))
    assert found.endpoints[0].startswith("node3:")
    monkeypatch.setenv("SLURM_NTASKS", "two")
    with pytest.raises(StrategyError, match=r"jax does not find out which .*: ValueError: .*'two'"):
        jf.initialize()


def test_jax_that_has_started_is_said_before_anybody_waits() -> None:
    jax.devices()
    two = Rank(0, ("127.0.0.1:6170", "127.0.0.1:6171"), "job")
    with pytest.raises(StrategyError, match=r"jf.initialize: jax has started in this process"):
        jf.initialize(two)


def test_a_step_of_all_is_refused_where_nobody_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "127.0.0.1:6170,127.0.0.1:6171")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    example = (jnp.zeros(2), jnp.zeros((4, 2)))

    def total(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        return state, jnp.sum(batch @ state)

    with pytest.raises(StrategyError, match="this is rank 1 of 2, and has not joined the others"):
        jf.distribute(total, example)
    jf.distribute(total, example, strategy="single")  # alone, as its strategy requires
    monkeypatch.setenv("PADDLE_PSERVERS_IP_PORT_LIST", "127.0.0.1:6174")  # a trainer is not a rank
    jf.distribute(total, example, jf.DistributedStrategy(devices=1))
    for name in ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_TRAINER_ID", "PADDLE_PSERVERS_IP_PORT_LIST"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_PROCID", "2")
    monkeypatch.setenv("SLURM_NTASKS", "4")  # of a batch script, which is one process
    jf.distribute(total, example, jf.DistributedStrategy(devices=1))
    for rank, size in STARTED:
        with monkeypatch.context() as started:
            started.setenv(rank, "2")
            started.setenv(size, "4")
            apart = "this is process 2 of 4 that .* started, which has joined none of the others"
            with pytest.warns(UserWarning, match=apart) as said:  # they may be meant to be alone
                jf.distribute(total, example, jf.DistributedStrategy(devices=1))
            assert [each.filename for each in said] == [__file__]
            started.setenv("PADDLE_TRAINER_ENDPOINTS", "127.0.0.1:6170")  # a launch of one rank
            started.setenv("PADDLE_TRAINERS_NUM", "1")
            started.setenv("PADDLE_TRAINER_ID", "0")
            jf.distribute(total, example, jf.DistributedStrategy(devices=1))


def test_a_rank_of_a_failed_group_ends_even_if_its_metrics_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stuck(*, is_failed: bool) -> None:
        raise TimeoutError(f"the metrics did not end, failed {is_failed}")

    joined = SimpleNamespace(metrics=SimpleNamespace(end=stuck), close=lambda: None)
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    _end(cast("ProcessGroup", joined))
    assert ended == [1]
    assert "the metrics did not end, failed True" in capsys.readouterr().err


def test_a_fork_of_a_rank_says_no_bye_in_its_name() -> None:
    nobody = cast(ProcessGroup, None)  # any use of it would fail
    _leave(nobody, os.getpid() + 1)
    with pytest.raises(AttributeError):
        _leave(nobody, os.getpid())


def test_files_are_shared_out_in_blocks_and_the_first_have_one_more() -> None:
    files = [f"part-{n}" for n in range(8)]
    shares = [jf.split_files(files, rank=rank, size=3) for rank in range(3)]
    assert shares == [files[:3], files[3:6], files[6:]]
    assert jf.split_files(files) == files
    with pytest.raises(StrategyError, match="no process 3 among 3"):
        jf.split_files(files, rank=3, size=3)
