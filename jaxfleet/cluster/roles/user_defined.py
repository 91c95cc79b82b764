"""Roles that the script itself specifies."""

from typing import Any, NoReturn

from jaxfleet.cluster.roles.base import RendezvousRoleMaker, Role
from jaxfleet.errors import JaxfleetError, ProgramError, WrongTypeError
from jaxfleet.ops.user_frames import line_of_caller


class UserDefinedRoleMaker(RendezvousRoleMaker):
    """Role of a process in a job with parameter servers, given by arguments.

    Args:
        current_id: index of this worker or server, from 0.
        role: `Role.WORKER` or `Role.SERVER`.
        worker_num: the number of workers.
        server_endpoints: where the servers listen, in their order.

    Raises:
        TypeError: an argument has the wrong type, as the defaults have.
        ValueError: a number or an endpoint is invalid.
    """

    def __init__(
        self,
        current_id: int = 0,
        role: Role = Role.WORKER,
        worker_num: int = 0,
        server_endpoints: list[str] | None = None,
    ) -> None:
        super().__init__()
        self._server_endpoints = _checked_endpoints(server_endpoints, "server_endpoints")
        if isinstance(role, bool) or role not in {Role.WORKER, Role.SERVER}:
            _refuse("role must be as Role", WrongTypeError)
        self._role = Role(role)
        self._current_id = _checked_id(current_id)
        if role == Role.SERVER and current_id >= len(self._server_endpoints):
            _refuse("if role is Role.SERVER, current_id must be less than or equal to "
                    "len(server_endpoints) - 1")  # fmt: skip
        if not _is_int(worker_num):
            _refuse("worker_num must be as int", WrongTypeError)
        if worker_num <= 0:
            _refuse("worker_num must be greater than 0")
        if role == Role.WORKER and current_id >= worker_num:
            _refuse("if role is Role.WORKER, current_id must be less than or equal to "
                    f"worker_num - 1: it is {current_id} of {worker_num}")  # fmt: skip
        self._workers = worker_num


class UserDefinedCollectiveRoleMaker(RendezvousRoleMaker):
    """Role of a process in a job without servers, given by arguments.

    Args:
        current_id: index of this worker, from 0.
        worker_endpoints: where the workers are, in their order.

    Raises:
        TypeError: an argument has the wrong type, as the defaults have.
        ValueError: the number or an endpoint is invalid.
    """

    _has_servers = False  # is_server is False: fluid raises, which does not help a caller

    def __init__(self, current_id: int = 0, worker_endpoints: list[str] | None = None) -> None:
        super().__init__()
        self._role = Role.WORKER
        self._worker_endpoints = _checked_endpoints(worker_endpoints, "worker_endpoints")
        self._current_id = _checked_id(current_id)
        if current_id >= len(self._worker_endpoints):
            _refuse("current_id must be less than or equal to len(worker_endpoints) - 1")
        self._workers = len(self._worker_endpoints)


def _checked_endpoints(endpoints: Any, name: str) -> list[str]:
    if not isinstance(endpoints, list):
        _refuse(f"{name} must be as string list", WrongTypeError)
    if not endpoints:
        _refuse(f"the length of {name} list must be greater than 0")
    if any(each in endpoints[:at] for at, each in enumerate(endpoints)):
        _refuse(f"{name} can't have duplicate elements")
    if not all(isinstance(each, str) for each in endpoints):
        _refuse(f"every element in {name} list must be as string", WrongTypeError)
    return list(endpoints)  # the script may modify its own list


def _checked_id(current_id: Any) -> int:
    if not _is_int(current_id):
        _refuse("current_id must be as int", WrongTypeError)
    if current_id < 0:
        _refuse("current_id must be greater than or equal to 0")
    return int(current_id)


def _is_int(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _refuse(what: str, kind: type[JaxfleetError] = ProgramError) -> NoReturn:
    raise kind(what, source=line_of_caller())
