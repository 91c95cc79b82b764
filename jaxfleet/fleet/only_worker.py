"""The role of a process that trains by itself."""

from jaxfleet.fleet.meeting import Alone, GroupName, Meeting
from jaxfleet.fleet.roles import Role, RoleMakerBase


class OnlyWorker(RoleMakerBase):
    """Says that this process is the only worker, and that there are no servers."""

    def __init__(self) -> None:
        super().__init__()
        self._role, self._current_id = Role.WORKER, 0

    def generate_role(self) -> None:
        """Does nothing: there is nobody to ask."""
        self._role_is_generated = True

    def is_worker(self) -> bool:
        return True

    def is_server(self) -> bool:
        return False

    def is_first_worker(self) -> bool:
        return True

    def worker_num(self) -> int:
        return 1

    def worker_index(self) -> int:
        return 0

    def _find_meeting(self, group: GroupName) -> Meeting:
        del group
        return Alone()
