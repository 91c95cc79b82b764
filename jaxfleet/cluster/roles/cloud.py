"""Roles from PaddleCloud's environment variables."""

from jaxfleet.cluster.roles import env_vars as v
from jaxfleet.cluster.roles.base import GeneratedRoleMaker, Role
from jaxfleet.errors import AssertedError, UnsetError
from jaxfleet.ops.user_frames import line_of_caller

_BLAME = "something wrong with PaddleCloud, please check environment"


class PaddleCloudRoleMaker(GeneratedRoleMaker):
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
        environment = v.Variables.read(_BLAME)
        if self._is_collective:
            self._read_collective(environment)
        else:
            self._read_with_servers(environment)
        self._role_is_generated = True

    def _read_with_servers(self, environment: v.Variables) -> None:
        servers = environment.endpoints(v.SERVERS)
        trainers = environment.number(v.WORKER_NUM, "how many trainers the job has")
        role = environment.role()
        if role == Role.WORKER:
            current = environment.worker_index(trainers)
        else:
            current = environment.server_index(servers)
            self._current_endpoint = servers[current]
        self._server_endpoints, self._workers = servers, trainers
        self._role, self._current_id = role, current

    def _read_collective(self, environment: v.Variables) -> None:
        values, source = environment.values, line_of_caller()
        role = values.get(v.COLLECTIVE_ROLE, "TRAINER")
        if role != "TRAINER":
            what = f"{v.COLLECTIVE_ROLE} is '{role}', and a collective job has trainers alone"
            raise AssertedError(what, source=source, hint="PaddleCloudRoleMaker() is for servers")
        try:
            endpoints = environment.endpoints(v.WORKERS)
        except UnsetError:
            hint = "start the script by jaxfleet launch --nproc 2, or list where the trainers are: "
            hint += "10.0.0.1:6170,10.0.0.2:6170"
            raise AssertedError(f"can't find {v.WORKERS}", source=source, hint=hint) from None
        current = environment.worker_index(len(endpoints)) if v.WORKER_ID in values else 0
        self._current_endpoint = values.get(v.CURRENT)
        if self._current_endpoint not in {None, endpoints[current]}:
            what = f"{v.CURRENT} is {self._current_endpoint}, but trainer {current} of {v.WORKERS}"
            environment.refuse(f"{what} is {endpoints[current]}", "they name one process")
        self._worker_endpoints, self._workers = endpoints, len(endpoints)
        self._role, self._current_id = Role.WORKER, current
