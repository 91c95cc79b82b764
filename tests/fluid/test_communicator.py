"""The communicator, and the settings used in each mode."""

import pytest

from jaxfleet import fluid
from jaxfleet.fluid.communicator import Communicator, get_communicator_flags
from jaxfleet.fluid.transpiler import DistributedMode
from tests.fluid.test_peer_tables import Job

GEO_NEEDS = {"push_vars": {}, "trainers": 2, "push_nums": 5}


@pytest.fixture(autouse=True)
def _own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPU_NUM", raising=False)


def test_it_runs_from_start_to_stop() -> None:
    program = Job(sync_mode=False).trainer
    communicator = Communicator(program, DistributedMode.ASYNC)
    seen = [communicator.is_running()]
    communicator.start()
    seen.append(communicator.is_running())
    with pytest.warns(UserWarning, match="is running already"):
        communicator.start()
    communicator.stop()
    assert [*seen, communicator.is_running()] == [False, True, False]
    receives = [op for op in program.global_block().ops if op.type == "recv"]
    assert receives
    assert all(op.attr("do_not_run") for op in receives)


def test_each_mode_has_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    asynchronous = get_communicator_flags(DistributedMode.ASYNC)
    assert asynchronous["communicator_max_merge_var_num"] == "2"
    assert asynchronous["communicator_independent_recv_thread"] == "1"
    assert len(asynchronous) == 7
    geo = get_communicator_flags(DistributedMode.GEO)
    assert set(geo) == {"communicator_thread_pool_size", "communicator_send_wait_times"}
    assert "communicator_independent_recv_thread" not in get_communicator_flags(0)


def test_where_threads_wait_the_queue_is_as_long_as_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CPU_NUM", "100")
    with pytest.warns(UserWarning, match="communicator_send_queue_size is 100"):
        found = get_communicator_flags(
            DistributedMode.HALF_ASYNC, {"communicator_send_queue_size": "50"}
        )
    assert found["communicator_send_queue_size"] == "100"


def test_the_environment_goes_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGS_communicator_thread_pool_size", "7")
    found = get_communicator_flags(DistributedMode.GEO)
    assert found["communicator_thread_pool_size"] == "7"


def test_what_it_is_not_given_is_said() -> None:
    program = fluid.Program()
    with pytest.raises(ValueError, match="needs push_vars, trainers"):
        Communicator(program, DistributedMode.GEO, {"push_nums": 5})
    with pytest.raises(ValueError, match="no setting 'queue'"):
        get_communicator_flags(DistributedMode.ASYNC, {"queue": 1})
    with pytest.raises(ValueError, match="there is no mode 9"):
        Communicator(program, 9)
    assert not Communicator(program, DistributedMode.GEO, GEO_NEEDS).is_running()
