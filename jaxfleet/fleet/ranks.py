"""The role of a process that has joined a group of ranks."""

from jaxfleet.env import read_rank
from jaxfleet.fleet.meeting import Alone, GroupMeeting, GroupName, Meeting
from jaxfleet.fleet.roles import Role, RoleMakerBase
from jaxfleet.group import Place, initialize, joined

_LONGEST_S = 600.0  # as a step: somebody may still compile


class RankRole(RoleMakerBase):
    """Joins the group that the environment names, and says which of its ranks this is."""

    def __init__(self) -> None:
        super().__init__()
        self._place = Place()
        self._role = Role.WORKER

    def generate_role(self) -> None:
        """Joins the group, the first time.

        Raises:
            ConnectError: somebody did not come in time.
            StrategyError: the environment contradicts itself, or jax has started before.
        """
        if not self._role_is_generated:
            self._place, named = initialize(), read_rank()
            self._worker_endpoints = list(named.endpoints) if named is not None else []
            self._current_id, self._role_is_generated = self._place.rank, True

    def is_worker(self) -> bool:
        return True

    def is_server(self) -> bool:
        return False

    def is_first_worker(self) -> bool:
        return self.worker_index() == 0

    def worker_num(self) -> int:
        self.generate_role()
        return self._place.size

    def worker_index(self) -> int:
        self.generate_role()
        return self._place.rank

    def _find_meeting(self, group: GroupName) -> Meeting:
        del group
        here = joined()
        return Alone() if here is None else GroupMeeting(here, _LONGEST_S)
