"""Roles from PaddleCloud's environment variables, with errors that name the variable at fault."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from jaxfleet.cluster.roles.base import RendezvousRoleMaker, Role
from jaxfleet.env import read_roles
from jaxfleet.errors import AssertedError, StrategyError, UnsetError
from jaxfleet.ops.user_frames import line_of_caller

SERVERS = "PADDLE_PSERVERS_IP_PORT_LIST"
WORKERS = "PADDLE_TRAINER_ENDPOINTS"
WORKER_NUM = "PADDLE_TRAINERS_NUM"
WORKER_ID = "PADDLE_TRAINER_ID"
SERVER_ID = "PADDLE_PSERVER_ID"
ROLE = "TRAINING_ROLE"
COLLECTIVE_ROLE = "PADDLE_TRAINING_ROLE"
CURRENT = "PADDLE_CURRENT_ENDPOINT"
IP, PORT = "POD_IP", "PADDLE_PORT"
JOB = "SYS_JOB_ID"

_ROLES = {"TRAINER": Role.WORKER, "PSERVER": Role.SERVER}


@dataclass(frozen=True)
class Variables:
    """Snapshot of the variables of roles, taken when a role maker read them."""

    values: Mapping[str, str]  # by name; unset variables are absent
    blame: str  # prefix of errors, as in fluid

    @classmethod
    def read(cls, blame: str) -> "Variables":
        return cls(read_roles(), blame)

    def required(self, name: str, hint: str) -> str:
        if name not in self.values:
            what = f"environment variable {name} is not set"
            raise UnsetError(what, source=line_of_caller(), hint=hint)
        return self.values[name]

    def number(self, name: str, hint: str) -> int:
        text = self.required(name, hint)
        if not (text.isascii() and text.isdigit()):
            self.refuse(f"{name} is '{text}'", "it is a whole number from 0 on")
        return int(text)

    def role(self, blame: str = "") -> Role:
        """Returns the role in `TRAINING_ROLE`; `PADDLE_TRAINING_ROLE` is unset or the same."""
        too, hint = self.values.get(COLLECTIVE_ROLE), "a role is TRAINER or PSERVER"
        name = COLLECTIVE_ROLE if ROLE not in self.values and too is not None else ROLE
        text = self.required(name, hint)
        if text not in _ROLES:
            self.refuse(f"{name} is '{text}'", hint, blame)
        if too is not None and too != text:
            self.refuse(f"{ROLE} is {text}, but {COLLECTIVE_ROLE} is {too}", "set them alike")
        return _ROLES[text]

    def endpoints(self, name: str) -> list[str]:
        found = self.required(name, "list them: 10.0.0.1:6174,10.0.0.2:6174").split(",")
        endpoints = [each.strip() for each in found]
        for at, each in enumerate(endpoints):
            if not each or each in endpoints[:at]:
                twice = f"names {each} twice" if each else "has an empty endpoint"
                self.refuse(f"{name} {twice}", "list every process once")
        return endpoints

    def worker_index(self, workers: int) -> int:
        index = self.number(WORKER_ID, "every trainer has a number from 0 on")
        if index >= workers:
            what = f"{WORKER_ID} is {index}, and there are {workers} trainers"
            self.refuse(what, "trainers are numbered from 0")
        return index

    def server_index(self, endpoints: list[str]) -> int:
        """Returns the index of this server.

        It is given as a number, by `POD_IP` and `PADDLE_PORT`, or by the endpoint itself; if
        several are set, they must agree.
        """
        said = dict(self._server_indices(endpoints))
        if not said:
            missing = PORT if IP in self.values else IP
            self.required(missing, f"a server needs {IP} and {PORT}, {CURRENT} or {SERVER_ID}")
        if len(set(said.values())) > 1:
            told = " and ".join(f"{name} specifies server {index}" for name, index in said.items())
            self.refuse(told, "they name one server")
        return next(iter(said.values()))

    def refuse(self, what: str, hint: str, blame: str = "") -> NoReturn:
        """Raises fluid's error, with the variables it is about."""
        message = f"{blame or self.blame}: {what}"
        raise StrategyError(message, source=line_of_caller(), hint=hint)

    def _server_indices(self, endpoints: list[str]) -> list[tuple[str, int]]:
        values, found = self.values, []
        here = {CURRENT: values.get(CURRENT)}
        if IP in values and PORT in values:
            here[f"{IP}:{PORT}"] = f"{values[IP]}:{values[PORT]}"
        for name, endpoint in here.items():
            if endpoint is not None and endpoint not in endpoints:
                known = ", ".join(endpoints)
                self.refuse(f"{name} is {endpoint}, which is not among {known}", f"see {SERVERS}")
            if endpoint is not None:
                found.append((name, endpoints.index(endpoint)))
        if SERVER_ID in values:
            index = self.number(SERVER_ID, "")
            if index >= len(endpoints):
                what = f"{SERVER_ID} is {index}, and there are {len(endpoints)} servers"
                self.refuse(what, "servers are numbered from 0")
            found.append((SERVER_ID, index))
        return found


_BLAME = "something wrong with PaddleCloud, please check environment"


class PaddleCloudRoleMaker(RendezvousRoleMaker):
    """Reads the role of a process from its environment, once, at the first query.

    With servers, `TRAINING_ROLE` (or `PADDLE_TRAINING_ROLE`) is `TRAINER` or `PSERVER`,
    `PADDLE_PSERVERS_IP_PORT_LIST` lists the servers, and `PADDLE_TRAINERS_NUM` is the number of
    trainers. A trainer has `PADDLE_TRAINER_ID`; a server has `POD_IP` and `PADDLE_PORT`,
    `PADDLE_CURRENT_ENDPOINT` or `PADDLE_PSERVER_ID`.

    Without servers, `PADDLE_TRAINER_ENDPOINTS` lists the trainers and `PADDLE_TRAINER_ID` is the
    index of this one; `PADDLE_CURRENT_ENDPOINT`, if set, is its entry in the list.

    Queries raise the errors of `generate_role`.

    Args:
        is_collective: whether the job has no servers.
    """

    def __init__(self, is_collective: bool = False) -> None:
        super().__init__()
        self._is_collective = is_collective
        self._current_endpoint: str | None = None

    def generate_role(self) -> None:
        """Reads the environment, at the first call.

        Raises:
            KeyError: a variable is not set.
            ValueError: a variable is invalid, or contradicts another.
            AssertionError: a collective job's role is not TRAINER, or its trainers are not listed.
        """
        if self._role_is_generated:
            return
        environment = Variables.read(_BLAME)
        if self._is_collective:
            self._read_collective(environment)
        else:
            self._read_with_servers(environment)
        self._role_is_generated = True

    def _ensure_role(self) -> None:
        self.generate_role()

    def _read_with_servers(self, environment: Variables) -> None:
        servers = environment.endpoints(SERVERS)
        trainers = environment.number(WORKER_NUM, "how many trainers the job has")
        role = environment.role()
        if role == Role.WORKER:
            current = environment.worker_index(trainers)
        else:
            current = environment.server_index(servers)
            self._current_endpoint = servers[current]
        self._server_endpoints, self._workers = servers, trainers
        self._role, self._current_id = role, current

    def _read_collective(self, environment: Variables) -> None:
        values, source = environment.values, line_of_caller()
        role = values.get(COLLECTIVE_ROLE, "TRAINER")
        if role != "TRAINER":
            what = f"{COLLECTIVE_ROLE} is '{role}', and a collective job has trainers alone"
            raise AssertedError(what, source=source, hint="PaddleCloudRoleMaker() is for servers")
        try:
            endpoints = environment.endpoints(WORKERS)
        except UnsetError:
            hint = "start the script by jaxfleet launch --nproc 2, or list where the trainers are: "
            hint += "10.0.0.1:6170,10.0.0.2:6170"
            raise AssertedError(f"can't find {WORKERS}", source=source, hint=hint) from None
        current = environment.worker_index(len(endpoints)) if WORKER_ID in values else 0
        self._current_endpoint = values.get(CURRENT)
        if self._current_endpoint not in {None, endpoints[current]}:
            what = f"{CURRENT} is {self._current_endpoint}, but trainer {current} of {WORKERS}"
            environment.refuse(f"{what} is {endpoints[current]}", "they name one process")
        self._worker_endpoints, self._workers = endpoints, len(endpoints)
        self._role, self._current_id = Role.WORKER, current
