"""A meeting of the processes that `jf.initialize` has joined."""

from typing import Any

from jaxfleet.fleet.meeting.meeting import GroupName
from jaxfleet.fleet.meeting.values import pack, unpack
from jaxfleet.group import Joined


class GroupMeeting:
    """Lets the ranks of a collective job gather over the group's own lines: all are workers.

    Args:
        group: this process as a rank.
        timeout_s: how long all may take to come to one gathering.
    """

    def __init__(self, group: Joined, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s

    def gather(self, group: GroupName, value: Any, what: str) -> list[Any]:
        """Returns what every rank gave; see `Meeting`."""
        del group  # all, or all workers: the same
        gathered = self._group.gather(what, pack(value), timeout_s=self._timeout_s)
        return [unpack(each) for each in gathered]

    def close(self) -> None:
        """Does nothing: the group ends with the process."""
