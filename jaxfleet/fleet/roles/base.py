"""What every role maker answers."""

from typing import Any, NoReturn

from jaxfleet.errors import UnsupportedError
from jaxfleet.fleet.meeting import GroupName, Meeting, reduce_into
from jaxfleet.fleet.roles.role import Role


class RoleMakerBase:
    """Tells a process of a job what it is, and lets processes wait for each other.

    A class of your own says how its role is found: it overrides the queries that raise here, and
    `generate_role`, which sets `_role`, `_current_id` and the endpoints. Where it also overrides
    `_find_meeting`, its processes can gather, reduce and wait.
    """

    def __init__(self) -> None:
        self._worker_endpoints: list[str] = []
        self._server_endpoints: list[str] = []
        self._role_is_generated = False
        self._role: Role | None = None
        self._current_id = -1
        self._meeting: Meeting | None = None

    def generate_role(self) -> None:
        """Finds out what this process is."""
        self._in_child_class("generate_role")

    def is_worker(self) -> bool:
        """Tells whether this process is a worker."""
        self._in_child_class("is_worker")

    def is_server(self) -> bool:
        """Tells whether this process is a server."""
        self._in_child_class("is_server")

    def is_first_worker(self) -> bool:
        """Tells whether this process is worker 0."""
        self._in_child_class("is_first_worker")

    def worker_num(self) -> int:
        """Returns how many workers the job has."""
        self._in_child_class("worker_num")

    def worker_index(self) -> int:
        """Returns which worker this process is, from 0."""
        self._in_child_class("worker_index")

    def server_index(self) -> int:
        """Returns which server this process is, from 0."""
        self._in_child_class("server_index")

    def get_trainer_endpoints(self) -> list[str]:
        """Returns where the workers are."""
        return self._worker_endpoints

    def get_pserver_endpoints(self) -> list[str]:
        """Returns where the servers listen."""
        return self._server_endpoints

    def to_string(self) -> str:
        """Returns the role, the number and the endpoints as a line."""
        role = None if self._role is None else int(self._role)
        return (
            f"role: {role}, current_id: {self._current_id}, "
            f"worker_endpoints: {self._worker_endpoints}, "
            f"server_endpoints: {self._server_endpoints}"
        )

    def all_gather(self, input: Any) -> list[Any] | None:
        """Returns what every process of the job gave, workers first, each in their order."""
        meeting = self._meet("all", "all gather")
        return None if meeting is None else meeting.gather("all", input, "all_gather")

    def all_reduce_worker(self, input: Any, output: Any, mode: str = "sum") -> None:
        """Writes the sum, the smallest or the largest of what the workers gave into `output`.

        Args:
            input: an array, or a list of numbers; the same shape on every worker.
            output: an array or a list of that shape, written to.
            mode: `sum`, `min` or `max`.

        Raises:
            ValueError: the mode is another, or the shapes differ.
        """
        meeting = self._meet("trainer", "all reduce worker")
        if meeting is not None and self.is_worker():
            reduce_into(output, lambda each: meeting.gather("trainer", each, f"all_reduce {mode}"),
                        input, mode)  # fmt: skip

    def barrier_worker(self) -> None:
        """Waits until every worker is here; a server does not wait."""
        meeting = self._meet("trainer", "barrier worker")
        if meeting is not None and self.is_worker():
            meeting.gather("trainer", None, "barrier_worker")

    def barrier_all(self) -> None:
        """Waits until every process of the job is here."""
        meeting = self._meet("all", "barrier all")
        if meeting is not None:
            meeting.gather("all", None, "barrier_all")

    def _find_meeting(self, group: GroupName) -> Meeting | None:
        """Returns how processes meet, None where nothing is known of others.

        Args:
            group: who are to meet.
        """
        del group
        return None

    def _meet(self, group: GroupName, what: str) -> Meeting | None:
        found = self._meeting if self._meeting is not None else self._find_meeting(group)
        if found is None:
            print(f"warning: RoleMakerBase does not have {what}.")  # noqa: T201  # as fluid does
        return found

    def _in_child_class(self, name: str) -> NoReturn:
        hint = f"{type(self).__name__} has no {name} of its own"
        raise UnsupportedError("Please implement this method in child class", hint=hint)
