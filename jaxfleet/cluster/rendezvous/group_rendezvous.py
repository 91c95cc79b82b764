"""Rendezvous of the processes joined by `jf.initialize`."""

from typing import Any

from jaxfleet.cluster import ProcessGroup
from jaxfleet.cluster.rendezvous.exchanged_values import pack, unpack
from jaxfleet.cluster.rendezvous.protocol import GroupName


class GroupRendezvous:
    """Gathers over the connections of the collective group; all ranks are workers."""

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s

    def gather(self, group: GroupName, value: Any, what: str) -> list[Any]:
        del group  # all processes, or all workers: the same
        gathered = self._group.gather(what, pack(value), timeout_s=self._timeout_s)
        return [unpack(each) for each in gathered]

    def close(self) -> None:
        """Does nothing: the group ends with the process."""
