"""Role queries of a process, independent of the model it trains."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.cluster import split_files
from jaxfleet.cluster.roles import PaddleCloudRoleMaker, RoleMakerBase
from jaxfleet.cluster.roles.base import OnlyWorker
from jaxfleet.env import read_roles
from jaxfleet.errors import StrategyError, WrongTypeError
from jaxfleet.ops.user_frames import line_of_caller

_SERVERS, _WORKERS = "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_TRAINER_ENDPOINTS"


class FleetBase:
    """Reports the role of this process and its peers, as given by a role maker.

    Examples:
        >>> from jaxfleet.cluster.roles import Role, UserDefinedRoleMaker
        >>> from jaxfleet.fleet import FleetBase
        >>> job = FleetBase()
        >>> job.init(UserDefinedRoleMaker(1, Role.SERVER, 4, ["ps0:6174", "ps1:6174"]))
        >>> job.server_index(), job.server_num(), job.worker_num()
        (1, 2, 4)
    """

    def __init__(self) -> None:
        self._role_maker: RoleMakerBase | None = None
        self._is_initialized = False

    def init(self, role_maker: RoleMakerBase | None = None) -> None:
        """Sets the role of this process.

        Args:
            role_maker: its role. By default the environment decides; without such variables this
                process is the only worker, and there are no servers.

        Raises:
            TypeError: `role_maker` is not a role maker.
            ValueError: the environment does not describe a job.
        """
        if role_maker is not None and not isinstance(role_maker, RoleMakerBase):
            what = "role_maker must be an instance of RoleMakerBase"
            hint = f"PaddleCloudRoleMaker(), not {role_maker!r}"
            raise WrongTypeError(what, source=line_of_caller(), hint=hint)
        chosen = self._by_environment() if role_maker is None else role_maker
        chosen.generate_role()
        self._role_maker, self._is_initialized = chosen, True

    def _by_environment(self) -> RoleMakerBase:
        return PaddleCloudRoleMaker() if _SERVERS in read_roles() else self._without_servers()

    def _without_servers(self) -> RoleMakerBase:
        """Returns the default role maker for an environment without servers."""
        is_one_of_many = _WORKERS in read_roles()
        return PaddleCloudRoleMaker(is_collective=True) if is_one_of_many else OnlyWorker()

    @property
    def role_maker(self) -> RoleMakerBase:
        """The role maker of this process.

        Raises:
            StrategyError: `init` was not called.
        """
        if self._role_maker is None:
            what = "the role of this process is not set"
            raise StrategyError(what, source=line_of_caller(), hint="call fleet.init() first")
        return self._role_maker

    def is_first_worker(self) -> bool:
        """Whether this process is worker 0, which prints and saves.

        Examples:
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> fleet.is_first_worker()
            True
        """
        return self.role_maker.is_first_worker()

    def worker_index(self) -> int:
        """Returns the worker's number, from 0.

        Examples:
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> fleet.worker_index()
            0
        """
        return self.role_maker.worker_index()

    def worker_num(self) -> int:
        """Returns the number of workers of the job.

        Examples:
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> fleet.worker_num()
            1
        """
        return self.role_maker.worker_num()

    def is_worker(self) -> bool:
        """Whether this process trains.

        Examples:
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> fleet.is_worker()
            True
        """
        return self.role_maker.is_worker()

    def is_server(self) -> bool:
        """Whether this process is a parameter server.

        Examples:
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> fleet.is_server()
            False
        """
        return self.role_maker.is_server()

    def server_index(self) -> int:
        """Returns the server's number, from 0.

        Examples:
            >>> from jaxfleet.cluster.roles import Role, UserDefinedRoleMaker
            >>> from jaxfleet.fleet import FleetBase
            >>> job = FleetBase()
            >>> job.init(UserDefinedRoleMaker(1, Role.SERVER, 4, ["ps0:6174", "ps1:6174"]))
            >>> job.server_index()
            1
        """
        return self.role_maker.server_index()

    def server_num(self) -> int:
        """Returns the number of servers of the job.

        Examples:
            >>> from jaxfleet.cluster.roles import Role, UserDefinedRoleMaker
            >>> from jaxfleet.fleet import FleetBase
            >>> job = FleetBase()
            >>> job.init(UserDefinedRoleMaker(1, Role.SERVER, 4, ["ps0:6174", "ps1:6174"]))
            >>> job.server_num()
            2
        """
        return len(self.role_maker.get_pserver_endpoints())

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Returns the known `host:port` of workers: a list, or joined by commas.

        Examples:
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> fleet.worker_endpoints()
            []
        """
        return _shown(self.role_maker.get_trainer_endpoints(), to_string=to_string)

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Returns the `host:port` of every server: a list, or joined by commas.

        Examples:
            >>> from jaxfleet.cluster.roles import Role, UserDefinedRoleMaker
            >>> from jaxfleet.fleet import FleetBase
            >>> job = FleetBase()
            >>> job.init(UserDefinedRoleMaker(1, Role.SERVER, 4, ["ps0:6174", "ps1:6174"]))
            >>> job.server_endpoints()
            ['ps0:6174', 'ps1:6174']
            >>> job.server_endpoints(to_string=True)
            'ps0:6174,ps1:6174'
        """
        return _shown(self.role_maker.get_pserver_endpoints(), to_string=to_string)

    def split_files(self, files: Sequence[str]) -> list[str]:
        """Returns this worker's block of files; the first workers take one of the remainder each.

        Raises:
            TypeError: `files` is not a list.

        Examples:
            >>> from jaxfleet.cluster.roles import Role, UserDefinedRoleMaker
            >>> from jaxfleet.fleet import FleetBase
            >>> job = FleetBase()
            >>> job.init(UserDefinedRoleMaker(1, Role.WORKER, 2, ["ps0:6174"]))
            >>> job.split_files(["a", "b", "c", "d", "e"])
            ['d', 'e']
        """
        if not isinstance(files, list | tuple):
            what = "files should be a list of file need to be read."
            hint = f"a list of paths, not {type(files).__name__}"
            raise WrongTypeError(what, source=line_of_caller(), hint=hint)
        return split_files(files, rank=self.worker_index(), size=self.worker_num())

    def _check_serves(self) -> None:
        """Rejects serving from a worker, which would take a server's endpoint."""
        if not self.is_server():
            what = "this process is a worker, and serves nothing"
            hint = "if fleet.is_server(): fleet.run_server()"
            raise StrategyError(what, source=line_of_caller(), hint=hint)

    def _check_works(self) -> None:
        """Rejects training from a server, which would impersonate a worker."""
        if not self.is_worker():
            what = "this process is a server, and trains nothing"
            hint = "if fleet.is_worker(): fleet.init_worker()"
            raise StrategyError(what, source=line_of_caller(), hint=hint)

    def all_reduce_worker(self, input: Any, output: Any) -> None:
        """Sums an array over all workers into `output`.

        Examples:
            >>> import numpy as np
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> total = np.zeros(2)
            >>> fleet.all_reduce_worker(np.array([3.0, 4.0]), total)
            >>> total
            array([3., 4.])
        """
        self.role_maker.all_reduce_worker(input, output)

    def barrier_worker(self) -> None:
        """Waits until all workers reach the barrier.

        Examples:
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> fleet.barrier_worker()
        """
        self.role_maker.barrier_worker()


def _shown(endpoints: Sequence[str], *, to_string: bool) -> list[str] | str:
    return ",".join(endpoints) if to_string else list(endpoints)
