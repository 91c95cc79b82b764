"""GeneralRoleMaker with a rendezvous in a folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxfleet.errors import ConnectError, UnsetError, UnsupportedError
from jaxfleet.fluid.incubate.fleet.base.role_maker import GeneralRoleMaker
from tests.fleet.processes import NAMES, outputs_of

SCRIPT = Path(__file__).with_name("roles_script.py")
TRAINERS, SERVERS = ["127.0.0.1:7001", "127.0.0.1:7002"], ["127.0.0.1:6001", "127.0.0.1:6002"]
JOB = {
    "PADDLE_TRAINER_ENDPOINTS": ",".join(TRAINERS),
    "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(SERVERS),
    "SYS_JOB_ID": "a/job",
}
ROLES: list[dict[str, str]] = [
    {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0"},
    {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "1"},
    {"TRAINING_ROLE": "PSERVER", "PADDLE_PSERVER_ID": "0"},
    {"TRAINING_ROLE": "PSERVER", "POD_IP": "127.0.0.1", "PADDLE_PORT": "6002"},
]


def answers(output: str) -> dict[str, Any]:
    (line,) = (each for each in output.splitlines() if each.startswith("ANSWERS "))
    found: dict[str, Any] = json.loads(line.removeprefix("ANSWERS "))
    return found


@pytest.mark.grid
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_two_trainers_and_two_servers_meet_in_a_folder(tmp_path: Path) -> None:
    command = [str(SCRIPT), "general", str(tmp_path)]
    outputs = outputs_of(command, [JOB | role for role in ROLES], tmp_path)
    found = [answers(output) for output in outputs]
    assert [each["rank"] for each in found] == [0, 1, 2, 3]
    assert [each["index"] for each in found] == [0, 1, 0, 1]
    assert [each["first"] for each in found] == [True, False, False, False]
    for at, each in enumerate(found):
        assert (each["worker"], each["server"]) == (at < 2, at >= 2)
        assert (each["workers"], each["servers"], each["size"]) == (2, 2, 4)
        assert (each["trainers"], each["pservers"]) == (TRAINERS, SERVERS)
        assert each["gathered"] == [0, 1, 2, 3]
        assert each["worker_gathered"] == ([0, 1] if at < 2 else None)
        assert (each["sum"], each["max"]) == (([1.0, 1.0], [1]) if at < 2 else ([0.0, 0.0], [0]))
        assert each["text"].startswith(f"role: {1 if at < 2 else 2}, current_id: {at % 2}, ")
    folders = {path.parent.relative_to(tmp_path) for path in tmp_path.rglob("hello.*")}
    assert folders == {Path(group, "a%2Fjob") for group in ("trainer", "pserver", "all")}


def test_what_a_general_role_maker_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    role = GeneralRoleMaker(path=str(tmp_path), init_timeout_seconds=0.1)
    with pytest.raises(UnsetError, match="environment variable TRAINING_ROLE is not set"):
        role.is_worker()
    monkeypatch.setenv("TRAINING_ROLE", "WORKER")
    with pytest.raises(ValueError, match="TRAINING_ROLE must be PSERVER or TRAINER"):
        role.is_worker()
    monkeypatch.setenv("TRAINING_ROLE", "TRAINER")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "2")
    with pytest.raises(ValueError, match="PADDLE_TRAINER_ID is 2, and there are 2 trainers"):
        role.worker_index()
    monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
    missing = r"for trainer 1 \(127.0.0.1:7002\), pserver 0 \(127.0.0.1:6001\), pserver 1 "
    with pytest.raises(ConnectError, match=missing):
        role.get_pserver_endpoints()
    monkeypatch.setenv("PADDLE_PSERVERS_IP_PORT_LIST", "10.0.0.9:6001")
    with pytest.raises(ValueError, match="no path to meet in, and the job has several machines"):
        GeneralRoleMaker().is_worker()
    with pytest.raises(UnsupportedError, match="not in HDFS at 'hdfs://a:1'"):
        GeneralRoleMaker("hdfs://a:1", "user,key", "/folder")
