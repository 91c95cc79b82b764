"""The role of a process that has joined a group of ranks."""

from typing import Any

from jaxfleet.env import read_rank
from jaxfleet.fleet.meeting import Alone, GroupName, Meeting
from jaxfleet.fleet.meeting.values import pack, unpack
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
        return Alone() if joined() is None else GroupMeeting()


class GroupMeeting:
    """Lets the ranks of this process's group meet."""

    def gather(self, group: GroupName, value: Any, what: str) -> list[Any]:
        """Returns what every rank gave, in their order.

        Raises:
            PeerLostError: one is gone, or late.
            ProgramError: one is somewhere else.
        """
        here = joined()
        if here is None or group == "pserver":
            return [value]
        return [unpack(each) for each in here.gather(what, pack(value), timeout_s=_LONGEST_S)]

    def close(self) -> None:
        """Does nothing: a rank leaves its group when it ends."""
