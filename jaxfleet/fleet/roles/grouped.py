"""Role makers that know the way to every process of their job."""

from typing import Any

from jaxfleet.fleet.meeting import GroupName, Meeting
from jaxfleet.fleet.roles.base import RoleMakerBase


class GroupedRoleMaker(RoleMakerBase):
    """Has what fluid's role makers offer in private too: by rank, workers first."""

    def _get_rank(self) -> int:
        """Returns which process of all this one is."""
        self._in_child_class("_get_rank")

    def _get_size(self) -> int:
        """Returns how many processes there are."""
        self._in_child_class("_get_size")

    def _way(self) -> Meeting:
        """Returns how processes meet; the role is known by then."""
        self._in_child_class("_way")

    def _find_meeting(self, group: GroupName) -> Meeting:
        del group
        return self._way()

    def _all_gather(self, obj: Any) -> list[Any]:
        """Returns what every process gave."""
        return self._way().gather("all", obj, "all_gather")

    def _worker_gather(self, obj: Any) -> list[Any] | None:
        """Returns what every worker gave, None on a server."""
        if not self.is_worker():
            return None
        return self._way().gather("trainer", obj, "worker_gather")

    def _barrier_all(self) -> None:
        """Waits until every process is here."""
        self.barrier_all()

    def _barrier_worker(self) -> None:
        """Waits until every worker is here; a server does not wait."""
        self.barrier_worker()

    def _barrier_server(self) -> None:
        """Waits until every server is here; a worker does not wait."""
        if self.is_server():
            self._way().gather("pserver", None, "barrier_server")

    def _finalize(self) -> None:
        """Leaves the others."""
        if self._meeting is not None:
            self._meeting.close()
