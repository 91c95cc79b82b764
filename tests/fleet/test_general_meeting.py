"""Where the processes of GeneralRoleMaker meet, unless they are given a folder."""

import shutil
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxfleet.errors import CheckpointError
from jaxfleet.fleet.files import own_folder
from jaxfleet.fleet.roles import ClusterRoleMaker
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
    """Returns what a trainer and a server gather, which are two threads here."""
    read = "jaxfleet.fleet.roles.variables.read_roles"
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


@pytest.mark.parametrize("given", [{"iface": "lo"}, {"http_ip_port": "127.0.0.1:8900"}])
def test_how_the_original_met_over_a_network_is_warned_of(given: dict[str, str]) -> None:
    with pytest.warns(UserWarning, match=f"{next(iter(given))} has no effect here") as found:
        GeneralRoleMaker(**given)  # type: ignore[arg-type]
    assert len(found) == 1
    assert found[0].filename == __file__


def test_a_folder_that_others_may_write_to_is_refused(temporary: Path) -> None:
    own_folder("roles").chmod(0o777)
    with pytest.raises(CheckpointError, match="is not a folder that only this user may write to"):
        own_folder("roles")


class Copied:
    """A file system that is reached by copying, as HDFS is; it is a folder under another root."""

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
