"""A server that is killed while the trainers of its job change costs nothing."""

from pathlib import Path

import pytest

from jaxfleet.errors import PeerLostError
from jaxfleet.transport.messages import Kind, Message
from tests.faults.changing_jobs import ChangingJob
from tests.faults.conftest import Undisturbed
from tests.faults.memory_jobs import forget_killed, kill
from tests.faults.test_table_trainers_change import check_close as check_close_table
from tests.faults.test_trainers_change import changing, check_close, leave

KINDS = ("clip_twice", "norm", "keys")
MESSAGES = range(1, 35, 4)  # from the first that is of the change, some steps beyond it
SLOWLY = "--pause=0.5"  # so that the job does not end before the processes have joined
_FIRST = {Kind.LEAVE, Kind.JOIN, Kind.MEMBERS}


def kill_servers_at(job: ChangingJob, servers: tuple[int, ...], number: int) -> None:
    """Kills servers before the nth message that trainers send since the members change."""
    sent = 0

    def look(_trainer: int, _server: int, message: Message) -> None:
        nonlocal sent
        changes = message.kind in _FIRST and job.computed.get(0)
        if sent or changes:
            sent += 1
            if sent == number:
                for server in servers:
                    job.kill_server(server, away_s=1.0)

    job.on_send = look


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("servers", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("number", MESSAGES)
def test_a_server_killed_while_a_trainer_leaves_changes_nothing(
    kind: str, servers: tuple[int, ...], number: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = changing(kind, folder=tmp_path, returns_s=30.0)
    kill_servers_at(job, servers, number)
    job.run({(1, 3): lambda: leave(job, 1)})
    assert all(job.starts[server] == 2 for server in servers)
    check_close(job, undisturbed, trainers=1)


@pytest.mark.grid
@pytest.mark.usefixtures("twelve_rows")
@pytest.mark.parametrize("servers", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("number", MESSAGES)
def test_a_server_killed_while_processes_join_changes_nothing(
    servers: tuple[int, ...], number: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = changing("clip", SLOWLY, joins_at_s=(0.4, 0.4), folder=tmp_path, returns_s=30.0)
    kill_servers_at(job, servers, number)
    job.run()
    assert all(job.starts[server] == 2 for server in servers)
    check_close(job, undisturbed, trainers=4)


@pytest.mark.grid
@pytest.mark.usefixtures("twelve_rows")
@pytest.mark.parametrize("servers", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("number", MESSAGES)
def test_rows_are_updated_once_where_a_server_is_killed_while_processes_join(
    servers: tuple[int, ...], number: int, tmp_path: Path
) -> None:
    job = changing("table", SLOWLY, joins_at_s=(0.4, 0.4), folder=tmp_path, returns_s=30.0)
    kill_servers_at(job, servers, number)
    job.run()
    assert all(job.starts[server] == 2 for server in servers)
    check_close_table(job, trainers=4)


def test_what_only_a_lost_trainer_had_ends_the_job_with_an_error(tmp_path: Path) -> None:
    """Trainer 1 and server 1 are killed at once, before a checkpoint has the steps of both."""
    job = changing("clip", on_lost="continue", folder=tmp_path, returns_s=30.0)

    def look(trainer: int, _server: int, _message: Message) -> None:
        if trainer == 1 and len(job.computed.get(1, ())) == 4:
            job.kill_server(1, away_s=1.0)
            kill()

    job.on_send = look
    job.run()
    assert forget_killed(job) == 1
    assert "one that is gone has the only gradients" in job.error("trainer 0", PeerLostError)
