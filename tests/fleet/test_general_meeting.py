"""Default rendezvous of GeneralRoleMaker's processes, and that at an address."""

import secrets
import shutil
import socket
import stat
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jaxfleet.cluster.filesystems import own_folder
from jaxfleet.cluster.roles import ClusterRoleMaker
from jaxfleet.errors import CheckpointError, ConnectError, JaxfleetError, StrategyError
from jaxfleet.fluid.incubate.fleet.base.role_maker import GeneralRoleMaker, K8SRoleMaker
from tests.fleet.processes import NAMES

JOB = {
    "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:7001",
    "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:6001",
    "SYS_JOB_ID": "job",
}
SERVER = JOB | {"TRAINING_ROLE": "PSERVER", "PADDLE_PSERVER_ID": "0"}
TRAINER = JOB | {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0"}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (*NAMES, "JAXFLEET_MEETING_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def gathered(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[list[Any]]:
    """Returns the values gathered by a trainer and a server, simulated by two threads."""
    read = "jaxfleet.cluster.roles.cloud.read_roles"
    roles = [GeneralRoleMaker(init_timeout_seconds=20, **options) for _ in range(2)]

    def takes_part(role: GeneralRoleMaker, at: int) -> list[Any]:
        return role.all_gather(at) or []

    environments = iter((TRAINER, SERVER))
    monkeypatch.setattr(read, lambda: next(environments))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(takes_part, roles, range(2)))


def test_processes_of_one_machine_meet_without_a_path(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    found = gathered(monkeypatch)
    assert sorted(found[0]) == [0, 1]
    assert found[0] == found[1]
    (folder,) = temporary.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_interface_that_the_original_met_over_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="iface has no effect here") as found:
        GeneralRoleMaker(iface="lo")
    assert len(found) == 1
    assert found[0].filename == __file__


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text(secrets.token_hex())
    file.chmod(0o600)
    monkeypatch.setenv("JAXFLEET_SECRET_FILE", str(file))


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


ROLES = ("TRAINER", "PSERVER")
ENVIRONMENT = threading.local()  # of each simulated process
WORKERS, SERVERS = "127.0.0.1:7001,127.0.0.1:7002", "127.0.0.1:6001,127.0.0.1:6002"


@dataclass
class Process:
    """A process of a job with a rendezvous at an address.

    Attributes:
        role: `TRAINER` or `PSERVER`.
        found: the gathered values.
        error: its failure.
    """

    role: str
    index: int
    workers: str = WORKERS
    servers: str = SERVERS
    found: list[Any] = field(default_factory=list)
    error: JaxfleetError | None = None

    def run(self, address: str, timeout_s: float) -> None:
        ENVIRONMENT.values = {
            "PADDLE_TRAINER_ENDPOINTS": self.workers,
            "PADDLE_PSERVERS_IP_PORT_LIST": self.servers,
            "SYS_JOB_ID": "job",
            "TRAINING_ROLE": self.role,
            f"PADDLE_{self.role}_ID": str(self.index),
        }
        role = GeneralRoleMaker(http_ip_port=address, init_timeout_seconds=timeout_s)
        try:
            total = np.zeros(2)
            role.all_reduce_worker(np.array([1.0, self.index]), total)
            self.found = [role.all_gather(self.role), total.tolist()]
            role.barrier_all()
        except JaxfleetError as error:
            self.error = error
        role._finalize()  # noqa: SLF001  # what fleets call


def values() -> dict[str, str]:
    return dict(ENVIRONMENT.values)


def met(address: str, *processes: Process, timeout_s: float = 20.0) -> None:
    """Runs processes, simulated by threads, until they have met or failed."""
    with (
        mock.patch("jaxfleet.cluster.roles.cloud.read_roles", values),
        ThreadPoolExecutor(len(processes)) as pool,
    ):
        list(pool.map(lambda each: each.run(address, timeout_s), processes))


@pytest.mark.usefixtures("secret")
def test_processes_meet_at_the_address_where_trainer_0_listens(
    address: str, temporary: Path
) -> None:
    for _ in range(2):  # the address is free again for the next job
        workers, servers = ([Process(role, at) for at in range(2)] for role in ROLES)
        met(address, *servers, *workers[::-1])
        everybody = ["TRAINER", "TRAINER", "PSERVER", "PSERVER"]
        assert [each.error for each in (*workers, *servers)] == [None] * 4
        assert [each.found for each in workers] == [[everybody, [2.0, 1.0]]] * 2
        assert [each.found for each in servers] == [[everybody, [0.0, 0.0]]] * 2
    assert [file.name for file in temporary.iterdir()] == ["secret"]  # no other files


@pytest.mark.grid
@pytest.mark.usefixtures("secret")
def test_a_process_that_never_comes_to_the_address_is_named(address: str) -> None:
    there = [Process("TRAINER", 0), Process("TRAINER", 1), Process("PSERVER", 0)]
    met(address, *there, timeout_s=0.8)
    for process in there:
        assert isinstance(process.error, ConnectError)
        assert "rank 3 of 4 did not come" in str(process.error)
        assert "rank 3 is pserver 1 (127.0.0.1:6002)" in str(process.error.__notes__)
    met(address, alone := Process("TRAINER", 1), timeout_s=0.3)
    assert f"rank 0 did not answer at {address}" in str(alone.error)


@pytest.mark.usefixtures("secret")
def test_processes_that_take_the_job_for_different_ones_do_not_meet(address: str) -> None:
    first = Process("TRAINER", 0, servers="127.0.0.1:6009")
    second = Process("TRAINER", 1)
    met(address, first, second, timeout_s=1.0)
    assert isinstance(second.error, StrategyError)
    assert "here meet 3 ranks of job 'job: all: trainer 0 (127.0.0.1:7001)" in str(second.error)
    assert isinstance(first.error, ConnectError)


def test_an_address_without_a_secret_is_warned_of(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAXFLEET_INSECURE")
    met(address, Process("TRAINER", 0), timeout_s=0.1)
    assert f"trainer 0 listens at {address} without a secret" in caplog.text


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(StrategyError, match="http_ip_port is '8900', not an address and a port"):
        GeneralRoleMaker(http_ip_port="8900")


def test_a_folder_that_others_may_write_to_is_refused(temporary: Path) -> None:
    own_folder("roles").chmod(0o777)
    with pytest.raises(CheckpointError, match="is not a folder that only this user may write to"):
        own_folder("roles")


class Copied:
    """A file system that is reached by copying, as HDFS is: a folder under another root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def need_upload_download(self) -> bool:
        return True

    def ls_dir(self, fs_path: str) -> tuple[list[str], list[str]]:
        found = list(self.at(fs_path).iterdir()) if self.at(fs_path).is_dir() else []
        return [p.name for p in found if p.is_dir()], [p.name for p in found if p.is_file()]

    def list_dirs(self, fs_path: str) -> list[str]:
        return self.ls_dir(fs_path)[0]

    def is_exist(self, fs_path: str) -> bool:
        return self.at(fs_path).exists()

    def mkdirs(self, fs_path: str) -> None:
        self.at(fs_path).mkdir(parents=True, exist_ok=True)

    def delete(self, fs_path: str) -> None:
        self.at(fs_path).unlink(missing_ok=True)

    def mv(self, fs_src_path: str, fs_dst_path: str) -> None:
        self.at(fs_src_path).rename(self.at(fs_dst_path))

    def upload(self, local_path: str, fs_path: str) -> None:
        shutil.copy(local_path, self.at(fs_path))

    def download(self, fs_path: str, local_path: str) -> None:
        shutil.copy(self.at(fs_path), local_path)


def test_processes_meet_on_a_file_system_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "far"
    options = {"hdfs_name": "hdfs://a:1", "hdfs_ugi": "user,key", "path": "/jobs/one"}
    found = gathered(monkeypatch, fs=Copied(root), **options)
    assert sorted(found[0]) == [0, 1]
    assert {p.name for p in (root / "jobs" / "one").iterdir()} == {"trainer", "pserver", "all"}


def test_the_documents_role_maker_of_kubernetes_is_the_clusters() -> None:
    assert issubclass(K8SRoleMaker, ClusterRoleMaker)
