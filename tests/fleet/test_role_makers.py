"""Roles from arguments and from the environment."""

import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.errors import StrategyError, UnsetError, UnsupportedError
from jaxfleet.fluid.incubate.fleet.base import role_maker
from jaxfleet.fluid.incubate.fleet.base.role_maker import (
    PaddleCloudRoleMaker,
    Role,
    RoleMakerBase,
    UserDefinedCollectiveRoleMaker,
    UserDefinedRoleMaker,
)
from jaxfleet.launch import Job, launch
from tests.fluid.surface import rows

SERVERS = "127.0.0.1:36001,127.0.0.2:36001"
TRAINER = {
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_PSERVERS_IP_PORT_LIST": SERVERS,
    "TRAINING_ROLE": "TRAINER",
    "PADDLE_TRAINER_ID": "0",
}
SERVER = {
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_PSERVERS_IP_PORT_LIST": SERVERS,
    "TRAINING_ROLE": "PSERVER",
    "POD_IP": "127.0.0.1",
    "PADDLE_PORT": "36001",
}
COLLECTIVE = {"PADDLE_TRAINER_ENDPOINTS": "a:1,b:1,c:1", "PADDLE_TRAINER_ID": "1"}
OTHERS = ("PADDLE_TRAINING_ROLE", "PADDLE_CURRENT_ENDPOINT", "PADDLE_PSERVER_ID", "SYS_JOB_ID")
WRONG = "something wrong with PaddleCloud, please check environment"


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that sets exactly these role variables."""

    def says(variables: Mapping[str, str], **more: str) -> None:
        for name in {*TRAINER, *SERVER, *COLLECTIVE, *OTHERS}:
            monkeypatch.delenv(name, raising=False)
        for name, value in (dict(variables) | more).items():
            monkeypatch.setenv(name, value)

    return says


def test_a_cloud_trainer_is_read_from_the_environment(environ: Any) -> None:
    environ(TRAINER)
    role = PaddleCloudRoleMaker(is_collective=False)
    role.generate_role()
    assert (role.is_worker(), role.is_server(), role.is_first_worker()) == (True, False, True)
    assert (role.worker_num(), role.worker_index()) == (2, 0)
    assert role.get_pserver_endpoints() == SERVERS.split(",")
    assert role.get_trainer_endpoints() == []
    assert role.to_string() == (
        "role: 1, current_id: 0, worker_endpoints: [], "
        "server_endpoints: ['127.0.0.1:36001', '127.0.0.2:36001']"
    )


@pytest.mark.parametrize(
    ("base", "args"),
    [
        (UserDefinedRoleMaker, (1, Role.WORKER, 2, ["a:1"])),
        (UserDefinedCollectiveRoleMaker, (1, ["a:1", "b:1"])),
    ],
)
def test_a_scripts_own_role_maker_may_query_its_role_while_it_generates_it(
    base: Any, args: tuple[Any, ...]
) -> None:
    class Own(base):
        def generate_role(self) -> None:
            self.known = (self.is_worker(), self.worker_index(), self.worker_num())
            super().generate_role()

    role = Own(*args)
    role.generate_role()
    assert role.known == (True, 1, 2)


def test_a_cloud_server_is_found_by_its_address(environ: Any) -> None:
    for index, address in enumerate(["127.0.0.1", "127.0.0.2"]):
        environ(SERVER, POD_IP=address)
        role = PaddleCloudRoleMaker()
        assert (role.is_worker(), role.is_server(), role.is_first_worker()) == (False, True, False)
        assert (role.server_index(), role.worker_index(), role.worker_num()) == (index, index, 2)


@pytest.mark.parametrize(
    "says",
    [{"PADDLE_CURRENT_ENDPOINT": "127.0.0.2:36001"}, {"PADDLE_PSERVER_ID": "1"}],
    ids=["endpoint", "number"],
)
def test_a_cloud_server_may_be_found_otherwise(environ: Any, says: dict[str, str]) -> None:
    without = {name: SERVER[name] for name in SERVER if name not in {"POD_IP", "PADDLE_PORT"}}
    environ(without, **says)
    assert PaddleCloudRoleMaker().server_index() == 1


def test_the_environment_is_read_once(environ: Any) -> None:
    environ(TRAINER)
    role = PaddleCloudRoleMaker()
    role.generate_role()
    environ(TRAINER, PADDLE_TRAINER_ID="1")
    role.generate_role()
    assert role.worker_index() == 0


@pytest.mark.parametrize(
    ("variables", "change", "about"),
    [
        pytest.param(TRAINER, {"TRAINING_ROLE": "TEST"}, "TRAINING_ROLE is 'TEST'", id="role"),
        pytest.param(
            TRAINER,
            {"TRAINING_ROLE": "", "PADDLE_TRAINING_ROLE": "A"},
            "PADDLE_TRAINING_ROLE is 'A'",
            id="other_role",
        ),
        pytest.param(TRAINER, {"PADDLE_TRAINING_ROLE": "PSERVER"}, "is TRAINER, but", id="roles"),
        pytest.param(TRAINER, {"PADDLE_TRAINER_ID": "one"}, "PADDLE_TRAINER_ID is 'one'", id="id"),
        pytest.param(TRAINER, {"PADDLE_TRAINER_ID": "2"}, "there are 2 trainers", id="above"),
        pytest.param(
            SERVER, {"POD_IP": "10.0.0.9"}, "10.0.0.9:36001, which is not among", id="unknown"
        ),
        pytest.param(SERVER, {"PADDLE_PSERVER_ID": "1"}, "specifies server 0 and PADDLE", id="two"),
        pytest.param(SERVER, {"PADDLE_PSERVER_ID": "2"}, "there are 2 servers", id="server"),
        pytest.param(
            TRAINER, {"PADDLE_PSERVERS_IP_PORT_LIST": "a:1,a:1"}, "names a:1 twice", id="twice"
        ),
    ],
)
def test_an_inconsistent_environment_is_refused(
    environ: Any, variables: dict[str, str], change: dict[str, str], about: str
) -> None:
    environ(variables, **change)
    with pytest.raises(ValueError, match=re.escape(WRONG)) as raised:
        PaddleCloudRoleMaker().is_worker()
    assert about in str(raised.value)
    assert isinstance(raised.value, StrategyError)


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        *((TRAINER, name) for name in TRAINER),
        *((SERVER, name) for name in ("POD_IP", "PADDLE_PORT")),
    ],
)
def test_a_missing_variable_is_named(environ: Any, variables: dict[str, str], missing: str) -> None:
    environ({name: value for name, value in variables.items() if name != missing})
    with pytest.raises(KeyError) as raised:
        PaddleCloudRoleMaker().generate_role()
    assert str(raised.value) == f"environment variable {missing} is not set"
    assert isinstance(raised.value, UnsetError)


def test_a_collective_rank_is_a_worker(environ: Any) -> None:
    environ(COLLECTIVE)  # in fluid it is neither a worker nor a server
    role = PaddleCloudRoleMaker(is_collective=True)
    assert (role.worker_num(), role.worker_index()) == (3, 1)
    assert (role.is_worker(), role.is_server(), role.is_first_worker()) == (True, False, False)
    assert role.to_string().startswith("role: 1, current_id: 1, worker_endpoints: ['a:1', 'b:1'")
    environ({"PADDLE_TRAINER_ENDPOINTS": "a:1,b:1"}, PADDLE_CURRENT_ENDPOINT="a:1")
    assert PaddleCloudRoleMaker(is_collective=True).is_first_worker()


def test_a_collective_job_needs_endpoints_and_a_valid_rank(environ: Any) -> None:
    environ({})
    role = PaddleCloudRoleMaker(is_collective=True)
    with pytest.raises(AssertionError, match="can't find PADDLE_TRAINER_ENDPOINTS"):
        role.generate_role()
    environ(COLLECTIVE, PADDLE_TRAINING_ROLE="PSERVER")
    with pytest.raises(AssertionError, match="PADDLE_TRAINING_ROLE is 'PSERVER'"):
        role.generate_role()
    environ(COLLECTIVE, PADDLE_TRAINER_ID="3")
    with pytest.raises(ValueError, match="PADDLE_TRAINER_ID is 3, and there are 3 trainers"):
        role.generate_role()
    environ(COLLECTIVE, PADDLE_CURRENT_ENDPOINT="a:1")
    with pytest.raises(ValueError, match="PADDLE_CURRENT_ENDPOINT is a:1, but trainer 1"):
        role.worker_num()


def test_a_server_is_made_by_arguments() -> None:
    role = UserDefinedRoleMaker(1, Role.SERVER, 2, ["a:1", "b:1"])
    role.generate_role()
    assert (role.is_server(), role.is_worker(), role.is_first_worker()) == (True, False, False)
    assert (role.server_index(), role.worker_num()) == (1, 2)
    assert role.get_pserver_endpoints() == ["a:1", "b:1"]
    worker = UserDefinedRoleMaker(0, Role.WORKER, 2, ["a:1"])
    assert (worker.is_worker(), worker.is_first_worker(), worker.worker_index()) == (True, True, 0)
    assert (Role.WORKER, Role.SERVER) == (1, 2)


def test_the_default_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="server_endpoints must be as string list"):
        UserDefinedRoleMaker()
    with pytest.raises(TypeError, match="worker_endpoints must be as string list"):
        UserDefinedCollectiveRoleMaker()


BAD_ENDPOINTS: list[tuple[Any, type[Exception], str]] = [
    ("a:1", TypeError, "{} must be as string list"),
    ([], ValueError, "the length of {} list must be greater than 0"),
    (["a:1", "a:1"], ValueError, "{} can't have duplicate elements"),
    (["a:1", 1], TypeError, "every element in {} list must be as string"),
    (["a:1", []], TypeError, "every element in {} list must be as string"),
]


@pytest.mark.parametrize(("endpoints", "kind", "text"), BAD_ENDPOINTS, ids=range(5))
def test_endpoints_by_arguments_are_checked(
    endpoints: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text.format("server_endpoints")):
        UserDefinedRoleMaker(0, Role.WORKER, 1, endpoints)
    with pytest.raises(kind, match=text.format("worker_endpoints")):
        UserDefinedCollectiveRoleMaker(0, endpoints)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((0, 3, 1), TypeError, "role must be as Role"),
        ((0, True, 1), TypeError, "role must be as Role"),
        (("0", Role.WORKER, 1), TypeError, "current_id must be as int"),
        ((-1, Role.WORKER, 1), ValueError, "current_id must be greater than or equal to 0"),
        (
            (2, Role.SERVER, 3),
            ValueError,
            "current_id must be less than or equal to len(server_endpoints) - 1",
        ),
        ((0, Role.WORKER, "1"), TypeError, "worker_num must be as int"),
        ((0, Role.WORKER, 0), ValueError, "worker_num must be greater than 0"),
        ((1, Role.WORKER, 1), ValueError, "if role is Role.WORKER, current_id must be less than"),
    ],
    ids=["role", "bool", "str", "below", "server", "num", "none", "worker"],
)
def test_a_role_by_arguments_is_checked(
    arguments: tuple[Any, Any, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        UserDefinedRoleMaker(*arguments, ["a:1", "b:1"])


def test_a_collective_worker_is_made_by_arguments() -> None:
    role = UserDefinedCollectiveRoleMaker(1, ["a:1", "b:1"])
    role.generate_role()
    assert (role.worker_index(), role.worker_num()) == (1, 2)
    assert (role.is_worker(), role.is_first_worker()) == (True, False)
    assert not role.is_server()  # in fluid an error
    with pytest.raises(NotImplementedError, match="Please implement this method in child class"):
        role.server_index()
    for wrong, kind, text in [
        ("1", TypeError, "current_id must be as int"),
        (-1, ValueError, "current_id must be greater than or equal to 0"),
        (2, ValueError, "current_id must be less than or equal to len(worker_endpoints) - 1"),
    ]:
        with pytest.raises(kind, match=re.escape(text)):
            UserDefinedCollectiveRoleMaker(wrong, ["a:1", "b:1"])  # type: ignore[arg-type]


def test_the_base_class_has_no_role(capsys: pytest.CaptureFixture[str]) -> None:
    base = RoleMakerBase()
    queries = ("is_worker", "is_server", "is_first_worker", "worker_num", "worker_index")
    for query in (*queries, "server_index", "generate_role"):
        with pytest.raises(NotImplementedError, match="Please implement this method in child"):
            getattr(base, query)()
    assert (base.get_trainer_endpoints(), base.get_pserver_endpoints()) == ([], [])
    expected = "role: None, current_id: -1, worker_endpoints: [], server_endpoints: []"
    assert base.to_string() == expected
    assert base.all_gather(1) is None
    base.all_reduce_worker([1], [0])
    base.barrier_worker()
    base.barrier_all()
    warned = capsys.readouterr().out.splitlines()
    names = ("all gather", "all reduce worker", "barrier worker", "barrier all")
    assert warned == [f"warning: RoleMakerBase does not have {name}." for name in names]


def test_one_worker_meets_itself() -> None:
    role = UserDefinedCollectiveRoleMaker(0, ["a:1"])
    assert role.all_gather({"a": 1}) == [{"a": 1}]
    out, numbers = np.zeros(2), [0, 0]
    role.all_reduce_worker(np.array([1.5, 2.0]), out)
    role.all_reduce_worker([1, 2], numbers, mode="max")
    assert (out.tolist(), numbers) == ([1.5, 2.0], [1, 2])
    role.barrier_worker()
    role.barrier_all()
    with pytest.raises(ValueError, match="unknown mode: mean"):
        role.all_reduce_worker([1], [0], mode="mean")
    with pytest.raises(ValueError, match=r"of shape \(1,\), and the output of shape \(2,\)"):
        role.all_reduce_worker([1], [0, 0])
    with pytest.raises(TypeError, match="float64, which an output of int64 cannot hold"):
        role.all_reduce_worker([1.5], np.zeros(1, np.int64))


def test_who_has_no_way_to_the_others_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXFLEET_MEETING_DIR", raising=False)
    role = UserDefinedRoleMaker(0, Role.WORKER, 2, ["a:1"])
    with pytest.raises(UnsupportedError, match="UserDefinedRoleMaker knows no way to the other"):
        role.barrier_worker()
    server = UserDefinedRoleMaker(0, Role.SERVER, 2, ["a:1"])
    server.barrier_worker()  # does not take part in the barrier
    with pytest.raises(UnsupportedError):
        server.all_gather(1)


SCRIPT = """
from jaxfleet.cluster.roles import PaddleCloudRoleMaker
role = PaddleCloudRoleMaker()
total = [0.0]
role.all_reduce_worker([role.worker_index() + 1.5], total)
role.barrier_worker()
print("GATHERED", role.all_gather((role.is_worker(), role.worker_index(), total)))
"""


@pytest.mark.grid
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_processes_of_a_launch_meet_although_nobody_said_where(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = (sys.executable, "-c", SCRIPT)
    status = launch(Job(trainer=command, server=command, trainers=2, servers=1, timeout_s=150.0))
    output = capfd.readouterr().out
    sys.stdout.write(output)
    assert status == 0
    gathered = "GATHERED [(True, 0, [4.0]), (True, 1, [4.0]), (False, 0, [0.0])]"
    assert output.count(gathered) == 3


def test_every_name_of_the_module_is_there() -> None:
    ours = [row for row in rows() if row.path.startswith("incubate.fleet.base.role_maker")]
    assert len(ours) > 20
    assert {row.text: how for row in ours if (how := row.difference())} == {}
    defaults = inspect.signature(UserDefinedRoleMaker).parameters.values()
    assert [each.default for each in defaults] == [0, Role.WORKER, 0, None]


def test_the_old_name_is_the_same_module() -> None:
    from jaxfleet import compat  # noqa: PLC0415  # the old names exist for one test

    compat.install()
    try:
        from paddle.fluid.incubate.fleet.base import (  # type: ignore[import-not-found]  # noqa: PLC0415
            role_maker as old,
        )

        assert old.PaddleCloudRoleMaker is role_maker.PaddleCloudRoleMaker
    finally:
        compat.uninstall()
