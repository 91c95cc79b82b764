"""Roles from the environment."""

from pathlib import Path

import pytest

from jaxfleet.env import (
    PserverRole,
    cluster_environment,
    compiled_code_environment,
    read_cluster,
)
from jaxfleet.errors import StrategyError

TRAINER = {
    "TRAINING_ROLE": "TRAINER",
    "PADDLE_PSERVERS_IP_PORT_LIST": " 10.0.0.1:6174 , ps1:6175",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ID": "1",
}
SERVER = TRAINER | {"TRAINING_ROLE": "PSERVER", "PADDLE_CURRENT_ENDPOINT": "ps1:6175"}
BY_PORT = TRAINER | {"TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.1", "PADDLE_PORT": "6174"}
OF_TESTS = ("JAXFLEET_INSECURE", "JAXFLEET_SAVE_DIR")  # set by conftest
ENDPOINTS = ("10.0.0.1:6174", "ps1:6175")


def set_environment(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in {*SERVER, *BY_PORT, "PADDLE_TRAINING_ROLE", *OF_TESTS}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_no_role_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, {})
    assert read_cluster() is None
    set_environment(monkeypatch, TRAINER | {"TRAINING_ROLE": ""})
    assert read_cluster() is None


def test_a_trainer_reads_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, TRAINER)
    cluster = read_cluster()
    assert cluster == PserverRole(role="trainer", trainers=2, endpoints=ENDPOINTS, trainer_id=1)
    assert cluster.server_id is None


@pytest.mark.parametrize(("variables", "index"), [(SERVER, 1), (BY_PORT, 0)])
def test_a_server_reads_its_endpoint(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], index: int
) -> None:
    set_environment(monkeypatch, variables)
    cluster = read_cluster()
    assert cluster is not None
    assert (cluster.role, cluster.current_endpoint) == ("pserver", ENDPOINTS[index])
    assert (cluster.trainer_id, cluster.server_id) == (None, index)


def test_the_role_of_collective_jobs_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = TRAINER | {"TRAINING_ROLE": "", "PADDLE_TRAINING_ROLE": "TRAINER"}
    set_environment(monkeypatch, variables)
    assert read_cluster() is not None


@pytest.mark.parametrize(
    "cluster",
    [
        PserverRole(role="trainer", trainers=2, endpoints=ENDPOINTS, trainer_id=0, job="a job"),
        PserverRole(
            role="pserver",
            trainers=2,
            endpoints=ENDPOINTS,
            current_endpoint="ps1:6175",
            secret_file=Path("/a b/secret"),
            checkpoint_dir=Path("/kept"),
            server_return_s=12.5,
            save_dirs=(Path("/one"), Path("/a b")),
            launch_id="of this one",
        ),
        PserverRole(
            role="pserver",
            trainers=2,
            endpoints=ENDPOINTS,
            current_endpoint="ps1:6175",
            insecure=True,
        ),
    ],
)
def test_a_childs_environment_gives_it_its_role_and_nothing_of_ours(
    monkeypatch: pytest.MonkeyPatch, cluster: PserverRole
) -> None:
    set_environment(monkeypatch, BY_PORT | SERVER | {"JAXFLEET_JOB": "ours", "OTHER": "stays"})
    environment = cluster_environment(cluster)
    assert environment["OTHER"] == "stays"
    assert environment["PADDLE_TRAINING_ROLE"] == environment["TRAINING_ROLE"]
    for name in (*SERVER, *BY_PORT, "JAXFLEET_JOB"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert read_cluster() == cluster


WRONG = [
    ({"TRAINING_ROLE": "WORKER"}, "TRAINING_ROLE is 'WORKER', which is not a role"),
    ({"PADDLE_TRAINING_ROLE": "PSERVER"}, "TRAINING_ROLE is TRAINER, but PADDLE_TRAINING_ROLE is"),
    ({"PADDLE_PSERVERS_IP_PORT_LIST": ""}, "PADDLE_PSERVERS_IP_PORT_LIST is not set"),
    ({"PADDLE_PSERVERS_IP_PORT_LIST": "a:1,b:2,a:1"}, "names a:1 twice"),
    ({"PADDLE_PSERVERS_IP_PORT_LIST": "a:1,"}, "has '', which is not an endpoint"),
    ({"PADDLE_PSERVERS_IP_PORT_LIST": "a"}, "has 'a', which is not an endpoint"),
    ({"PADDLE_PSERVERS_IP_PORT_LIST": "a:0"}, "has 'a:0', whose port is not one"),
    ({"PADDLE_PSERVERS_IP_PORT_LIST": "a:65536"}, "whose port is not one"),
    ({"PADDLE_PSERVERS_IP_PORT_LIST": "a:-1"}, "whose port is not one"),
    ({"PADDLE_TRAINERS_NUM": ""}, "PADDLE_TRAINERS_NUM is not set"),
    ({"PADDLE_TRAINERS_NUM": "0"}, "PADDLE_TRAINERS_NUM is '0', not a whole number from 1 on"),
    ({"PADDLE_TRAINERS_NUM": "two"}, "PADDLE_TRAINERS_NUM is 'two'"),
    ({"PADDLE_TRAINER_ID": ""}, "PADDLE_TRAINER_ID is not set"),
    ({"PADDLE_TRAINER_ID": "2"}, "PADDLE_TRAINER_ID is 2, but PADDLE_TRAINERS_NUM is 2"),
    ({"JAXFLEET_SERVERS_RETURN": "soon"}, "JAXFLEET_SERVERS_RETURN is 'soon', not a time"),
    ({"JAXFLEET_SERVERS_RETURN": "inf"}, "not a time"),
    ({"TRAINING_ROLE": "PSERVER"}, "PADDLE_CURRENT_ENDPOINT is not set"),
    ({"TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.1"}, "PADDLE_PORT is not set"),
    ({"TRAINING_ROLE": "PSERVER", "PADDLE_PORT": "6174"}, "POD_IP is not set"),
    (
        {"TRAINING_ROLE": "PSERVER", "PADDLE_CURRENT_ENDPOINT": "ps2:1"},
        "PADDLE_CURRENT_ENDPOINT is ps2:1, which is not in PADDLE_PSERVERS_IP_PORT_LIST",
    ),
]


@pytest.mark.parametrize(("change", "what"), WRONG, ids=[what[:40] for _, what in WRONG])
def test_what_is_missing_or_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], what: str
) -> None:
    set_environment(monkeypatch, TRAINER | change)
    with pytest.raises(StrategyError) as refused:
        read_cluster()
    assert what in str(refused.value)


def test_compiled_code_is_kept_in_the_jobs_folder_unless_the_user_has_one() -> None:
    kept = compiled_code_environment({"A": "b"}, Path("here"))
    assert kept["JAX_COMPILATION_CACHE_DIR"] == "here"
    assert float(kept["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]) == 0
    own = {"JAX_COMPILATION_CACHE_DIR": "/mine"}
    assert compiled_code_environment(own, Path("here")) == own
