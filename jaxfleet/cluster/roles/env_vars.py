"""Environment variables of roles, with errors that name the variable at fault."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from jaxfleet.cluster.roles.base import Role
from jaxfleet.env import read_roles
from jaxfleet.errors import StrategyError, UnsetError
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
    """Snapshot of the variables of roles, taken when a role maker read them.

    Attributes:
        values: by name; unset variables are absent.
        blame: prefix of errors, as in fluid.
    """

    values: Mapping[str, str]
    blame: str

    @classmethod
    def read(cls, blame: str) -> "Variables":
        """Takes a snapshot of the environment."""
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
            told = " and ".join(f"{name} says server {index}" for name, index in said.items())
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
                self.refuse(f"{name} is {endpoint}, which is none of {known}", f"see {SERVERS}")
            if endpoint is not None:
                found.append((name, endpoints.index(endpoint)))
        if SERVER_ID in values:
            index = self.number(SERVER_ID, "")
            if index >= len(endpoints):
                what = f"{SERVER_ID} is {index}, and there are {len(endpoints)} servers"
                self.refuse(what, "servers are numbered from 0")
            found.append((SERVER_ID, index))
        return found
