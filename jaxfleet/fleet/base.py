"""FleetBase: which process of a job this is, whatever it trains."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.env import read_roles
from jaxfleet.errors import StrategyError, WrongTypeError
from jaxfleet.fleet.only_worker import OnlyWorker
from jaxfleet.fleet.roles import PaddleCloudRoleMaker, RoleMakerBase
from jaxfleet.group import split_files
from jaxfleet.ops.frames import line_of_caller

_SERVERS, _WORKERS = "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_TRAINER_ENDPOINTS"


class FleetBase:
    """Answers who takes part in a job, by its role maker."""

    def __init__(self) -> None:
        self._role_maker: RoleMakerBase | None = None
        self._is_initialized = False

    def init(self, role_maker: RoleMakerBase | None = None) -> None:
        """Says which process of the job this is.

        Args:
            role_maker: says it. Unless given, the environment does; where it says nothing, this is
                the only worker, without servers.

        Raises:
            TypeError: it is no role maker.
            ValueError: the environment is no job's.
        """
        if role_maker is not None and not isinstance(role_maker, RoleMakerBase):
            what = "role_maker must be an instance of RoleMakerBase"
            hint = f"PaddleCloudRoleMaker(), not {role_maker!r}"
            raise WrongTypeError(what, source=line_of_caller(), hint=hint)
        chosen = self._by_environment() if role_maker is None else role_maker
        chosen.generate_role()
        self._role_maker, self._is_initialized = chosen, True

    def _by_environment(self) -> RoleMakerBase:
        """Returns the role maker of who gives none."""
        return PaddleCloudRoleMaker() if _SERVERS in read_roles() else self._without_servers()

    def _without_servers(self) -> RoleMakerBase:
        """Returns the role maker of who gives none, where the environment names no servers."""
        is_one_of_many = _WORKERS in read_roles()
        return PaddleCloudRoleMaker(is_collective=True) if is_one_of_many else OnlyWorker()

    @property
    def role_maker(self) -> RoleMakerBase:
        """What says which process this is.

        Raises:
            StrategyError: nothing does yet.
        """
        if self._role_maker is None:
            what = "nobody has said which process of the job this is"
            raise StrategyError(what, source=line_of_caller(), hint="call fleet.init() first")
        return self._role_maker

    def is_first_worker(self) -> bool:
        """Tells whether this is worker 0."""
        return self.role_maker.is_first_worker()

    def worker_index(self) -> int:
        """Returns the worker's number, from 0."""
        return self.role_maker.worker_index()

    def worker_num(self) -> int:
        """Returns how many workers there are."""
        return self.role_maker.worker_num()

    def is_worker(self) -> bool:
        """Tells whether this process trains."""
        return self.role_maker.is_worker()

    def is_server(self) -> bool:
        """Tells whether this process serves."""
        return self.role_maker.is_server()

    def server_index(self) -> int:
        """Returns the server's number, from 0."""
        return self.role_maker.server_index()

    def server_num(self) -> int:
        """Returns how many servers there are."""
        return len(self.role_maker.get_pserver_endpoints())

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Returns `host:port` of every worker, where they are known: a list, or with commas."""
        return _shown(self.role_maker.get_trainer_endpoints(), to_string=to_string)

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Returns `host:port` of every server: a list, or with commas."""
        return _shown(self.role_maker.get_pserver_endpoints(), to_string=to_string)

    def split_files(self, files: Sequence[str]) -> list[str]:
        """Returns this worker's files: a contiguous block; the first workers have one more.

        Raises:
            TypeError: the files are no list.
        """
        if not isinstance(files, list | tuple):
            what = "files should be a list of file need to be read."
            hint = f"a list of paths, not {type(files).__name__}"
            raise WrongTypeError(what, source=line_of_caller(), hint=hint)
        return split_files(files, rank=self.worker_index(), size=self.worker_num())

    def _check_serves(self) -> None:
        """Refuses to be a server in a worker: it would take the endpoint of one.

        Raises:
            StrategyError: this process is a worker.
        """
        if not self.is_server():
            what = "this process is a worker, and serves nothing"
            hint = "if fleet.is_server(): fleet.run_server()"
            raise StrategyError(what, source=line_of_caller(), hint=hint)

    def _check_works(self) -> None:
        """Refuses to be a worker in a server: it would speak in the name of one.

        Raises:
            StrategyError: this process is a server.
        """
        if not self.is_worker():
            what = "this process is a server, and trains nothing"
            hint = "if fleet.is_worker(): fleet.init_worker()"
            raise StrategyError(what, source=line_of_caller(), hint=hint)

    def all_reduce_worker(self, input: Any, output: Any) -> None:
        """Adds up an array over workers, into another."""
        self.role_maker.all_reduce_worker(input, output)

    def barrier_worker(self) -> None:
        """Waits until all workers are here."""
        self.role_maker.barrier_worker()


def _shown(endpoints: Sequence[str], *, to_string: bool) -> list[str] | str:
    return ",".join(endpoints) if to_string else list(endpoints)
