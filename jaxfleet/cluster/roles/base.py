"""Base classes of role makers: roles, the rendezvous of a job's processes, and their groups."""

from enum import IntEnum
from typing import Any, NoReturn

from jaxfleet.cluster import initialize, joined
from jaxfleet.cluster.rendezvous import (
    FileRendezvous,
    GroupName,
    GroupRendezvous,
    Rendezvous,
    Roster,
    SingleProcess,
    reduce_into,
)
from jaxfleet.env import read_job, read_meeting_dir, read_rank
from jaxfleet.errors import UnsupportedError
from jaxfleet.ops.user_frames import line_of_caller


class Role(IntEnum):
    """Roles of a process, with fluid's numbers."""

    WORKER = 1
    SERVER = 2


class RoleMakerBase:
    """Reports a process's role in its job, and lets processes wait for each other.

    A subclass determines the role: it overrides the queries that raise here, and `generate_role`,
    which sets `_role`, `_current_id` and the endpoints. If it also overrides `_find_meeting`, its
    processes can gather, reduce and wait.
    """

    def __init__(self) -> None:
        self._worker_endpoints: list[str] = []
        self._server_endpoints: list[str] = []
        self._role_is_generated = False
        self._role: Role | None = None
        self._current_id = -1
        self._meeting: Rendezvous | None = None

    def generate_role(self) -> None:
        self._in_child_class("generate_role")

    def is_worker(self) -> bool:
        """Whether this process is a worker."""
        self._in_child_class("is_worker")

    def is_server(self) -> bool:
        """Whether this process is a server."""
        self._in_child_class("is_server")

    def is_first_worker(self) -> bool:
        """Whether this process is worker 0."""
        self._in_child_class("is_first_worker")

    def worker_num(self) -> int:
        self._in_child_class("worker_num")

    def worker_index(self) -> int:
        """Returns the index of this worker, from 0."""
        self._in_child_class("worker_index")

    def server_index(self) -> int:
        """Returns the index of this server, from 0."""
        self._in_child_class("server_index")

    def get_trainer_endpoints(self) -> list[str]:
        """Returns the workers' endpoints."""
        return self._worker_endpoints

    def get_pserver_endpoints(self) -> list[str]:
        """Returns the endpoints on which the servers listen."""
        return self._server_endpoints

    def to_string(self) -> str:
        """Returns the role, the index and the endpoints as a line."""
        role = None if self._role is None else int(self._role)
        return (
            f"role: {role}, current_id: {self._current_id}, "
            f"worker_endpoints: {self._worker_endpoints}, "
            f"server_endpoints: {self._server_endpoints}"
        )

    def all_gather(self, input: Any) -> list[Any] | None:
        """Returns the values of all processes, workers first, each group in its order."""
        meeting = self._meet("all", "all gather")
        return None if meeting is None else meeting.gather("all", input, "all_gather")

    def all_reduce_worker(self, input: Any, output: Any, mode: str = "sum") -> None:
        """Writes the sum, minimum or maximum of the workers' inputs into `output`.

        Args:
            input: an array, or a list of numbers; the same shape on every worker.
            output: an array or a list of that shape, overwritten.
            mode: `sum`, `min` or `max`.

        Raises:
            ValueError: the mode is unknown, or the shapes differ.
        """
        meeting = self._meet("trainer", "all reduce worker")
        if meeting is not None and self.is_worker():
            reduce_into(output, lambda each: meeting.gather("trainer", each, f"all_reduce {mode}"),
                        input, mode)  # fmt: skip

    def barrier_worker(self) -> None:
        """Waits for every worker; returns at once on a server."""
        meeting = self._meet("trainer", "barrier worker")
        if meeting is not None and self.is_worker():
            meeting.gather("trainer", None, "barrier_worker")

    def barrier_all(self) -> None:
        """Waits for every process of the job."""
        meeting = self._meet("all", "barrier all")
        if meeting is not None:
            meeting.gather("all", None, "barrier_all")

    def _find_meeting(self, group: GroupName) -> Rendezvous | None:
        """Returns the rendezvous of a group, or None if no other processes are known."""
        del group
        return None

    def _meet(self, group: GroupName, what: str) -> Rendezvous | None:
        found = self._meeting if self._meeting is not None else self._find_meeting(group)
        if found is None:
            print(f"warning: RoleMakerBase does not have {what}.")  # noqa: T201  # as fluid does
        return found

    def _in_child_class(self, name: str) -> NoReturn:
        hint = f"{type(self).__name__} has no {name} of its own"
        raise UnsupportedError("Please implement this method in child class", hint=hint)


class KnownRoleMaker(RoleMakerBase):
    """Answers from the attributes that the constructor or `generate_role` has set."""

    _has_servers = True

    def __init__(self) -> None:
        super().__init__()
        self._workers = 0

    def generate_role(self) -> None:
        """Does nothing: the constructor knows the role."""
        self._role_is_generated = True

    def _ensure_role(self) -> None:
        """Makes the role known, before each query.

        By default it is: a script's subclass may query its role in its own `generate_role`.
        """

    def is_worker(self) -> bool:
        self._ensure_role()
        return self._role == Role.WORKER

    def is_server(self) -> bool:
        self._ensure_role()
        return self._role == Role.SERVER

    def is_first_worker(self) -> bool:
        return self.is_worker() and self._current_id == 0

    def worker_num(self) -> int:
        self._ensure_role()
        return self._workers

    def worker_index(self) -> int:
        self._ensure_role()
        return self._current_id

    def server_index(self) -> int:
        return self.worker_index() if self._has_servers else super().server_index()

    def get_trainer_endpoints(self) -> list[str]:
        self._ensure_role()
        return self._worker_endpoints

    def get_pserver_endpoints(self) -> list[str]:
        self._ensure_role()
        return self._server_endpoints

    def to_string(self) -> str:
        self._ensure_role()
        return super().to_string()


class OnlyWorker(KnownRoleMaker):
    """Role of the only worker of a job without servers.

    Examples:
        >>> from jaxfleet.fleet import FleetBase, OnlyWorker
        >>> job = FleetBase()
        >>> job.init(OnlyWorker())
        >>> job.worker_num(), job.is_first_worker()
        (1, True)
    """

    _has_servers = False

    def __init__(self) -> None:
        super().__init__()
        self._role, self._current_id, self._workers = Role.WORKER, 0, 1

    def _find_meeting(self, group: GroupName) -> Rendezvous:
        del group
        return SingleProcess()


_LONGEST_S = 600.0  # as for a step: another process may still compile


class RankRole(KnownRoleMaker):
    """Joins the group that the environment specifies, and takes its rank from there."""

    _has_servers = False

    def generate_role(self) -> None:
        if not self._role_is_generated:
            place, named = initialize(), read_rank()
            self._worker_endpoints = list(named.endpoints) if named is not None else []
            self._role, self._current_id = Role.WORKER, place.rank
            self._workers, self._role_is_generated = place.size, True

    def _ensure_role(self) -> None:
        self.generate_role()

    def _find_meeting(self, group: GroupName) -> Rendezvous:
        del group
        here = joined()
        return SingleProcess() if here is None else GroupRendezvous(here, _LONGEST_S)


_CONNECT_S = _TIMEOUT_S = 3600.0


class RendezvousRoleMaker(KnownRoleMaker):
    """A role maker with known numbers of workers and servers.

    Its processes meet at the rendezvous given to `meet_by`; without one, workers without servers
    meet over the group that `jf.initialize` has joined, and all others in the folder that
    `JAXFLEET_MEETING_DIR` names, which `jaxfleet launch` creates for servers and trainers of one
    machine.
    """

    def meet_by(self, meeting: Rendezvous) -> None:
        """Sets the rendezvous of this job's processes, the same in all of them."""
        self._meeting = meeting

    def roster(self) -> Roster:
        is_worker = self.is_worker()
        return Roster(
            self.get_trainer_endpoints() or [""] * self.worker_num(),
            self.get_pserver_endpoints(),
            is_worker=is_worker,
            index=self.worker_index() if is_worker else self.server_index(),
        )

    def _find_meeting(self, group: GroupName) -> Rendezvous:
        roster = self.roster()
        if group not in {"all", roster.group} or len(roster.members(group)) == 1:
            return SingleProcess()
        here = joined()
        if here is not None and (here.rank, here.size) == (roster.rank, len(roster.members("all"))):
            self._meeting = GroupRendezvous(here, _TIMEOUT_S)
            return self._meeting
        if (folder := read_meeting_dir()) is None:
            what = f"{type(self).__name__} knows no way to the other processes of this job"
            hint = "call jf.initialize(), or set JAXFLEET_MEETING_DIR to a folder that all see"
            raise UnsupportedError(what, source=line_of_caller(), hint=hint)
        self._meeting = FileRendezvous(
            folder, roster, connect_s=_CONNECT_S, timeout_s=_TIMEOUT_S, job=read_job().name
        )
        return self._meeting


class GroupedRoleMaker(RoleMakerBase):
    """Adds fluid's private methods of role makers: by rank, workers first."""

    def server_num(self) -> int:
        return len(self.get_pserver_endpoints())

    def _get_rank(self) -> int:
        self._in_child_class("_get_rank")

    def _get_size(self) -> int:
        self._in_child_class("_get_size")

    def _way(self) -> Rendezvous:
        self._in_child_class("_way")

    def _find_meeting(self, group: GroupName) -> Rendezvous:
        del group
        return self._way()

    def _all_gather(self, obj: Any) -> list[Any]:
        return self._way().gather("all", obj, "all_gather")

    def _worker_gather(self, obj: Any) -> list[Any] | None:
        """Returns the values of all workers; None on a server."""
        if not self.is_worker():
            return None
        return self._way().gather("trainer", obj, "worker_gather")

    def _barrier_all(self) -> None:
        self.barrier_all()

    def _barrier_worker(self) -> None:
        """Waits for every worker; returns at once on a server."""
        self.barrier_worker()

    def _barrier_server(self) -> None:
        """Waits for every server; returns at once on a worker."""
        if self.is_server():
            self._way().gather("pserver", None, "barrier_server")

    def _finalize(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
