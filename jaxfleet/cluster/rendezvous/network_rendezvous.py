"""Rendezvous over the network: at an address where trainer 0 listens, or through a joined group."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxfleet.cluster import ProcessGroup
from jaxfleet.cluster.coordinator import Coordinator, CoordinatorThread
from jaxfleet.cluster.coordinator_client import CoordinatorClient
from jaxfleet.cluster.rendezvous.exchanged_values import pack, unpack
from jaxfleet.cluster.rendezvous.protocol import GroupName, Roster, left_error
from jaxfleet.errors import JaxfleetError
from jaxfleet.transport.messages import Network

_LOST_AFTER_S = 60.0  # a process may compile or wait for a lock for this long


class NetworkRendezvous:
    """Gathers by messages through trainer 0, as ranks do through rank 0.

    Trainers, servers and all processes form one group each, with its own coordinator in trainer 0,
    which must therefore outlive every gather of the others.
    """

    def __init__(
        self,
        network: Network,
        endpoint: str,
        roster: Roster,
        *,
        connect_s: float,
        timeout_s: float,
        job: str = "",
    ) -> None:
        self._network, self._endpoint, self._roster, self._job = network, endpoint, roster, job
        self._connect_s, self._timeout_s = connect_s, timeout_s
        self._members: dict[GroupName, CoordinatorClient] = {}
        self._serving: CoordinatorThread | None = None
        self._is_closed = False

    def join(self) -> None:
        """Waits until all processes are present.

        Raises:
            ConnectError: a process never arrived, or trainer 0 cannot listen at the address.
            StrategyError: another process has a different view of the job, or claims this rank.
        """
        atexit.register(self.close)  # sends pending messages
        if self._roster.is_worker and self._roster.index == 0:
            groups: tuple[GroupName, ...] = ("all", "trainer", "pserver")
            coordinators = [
                Coordinator(
                    len(self._roster.members(group)), self._name(group), "",
                    lost_after_s=_LOST_AFTER_S,
                )
                for group in groups
            ]  # fmt: skip
            self._serving = CoordinatorThread(coordinators, self._network.listen(self._endpoint))
        try:
            for group in ("all", self._roster.group):
                self._join(group)
        except BaseException:
            self.close()
            raise

    def _join(self, group: GroupName) -> None:
        names = self._roster.members(group)
        if len(names) == 1:
            return
        self._members[group] = member = CoordinatorClient(
            self._network, self._endpoint, rank=self._roster.rank_in(group), size=len(names),
            job=self._name(group), lost_after_s=_LOST_AFTER_S,
        )  # fmt: skip
        with self._explained(group):
            member.meet(self._connect_s)

    def _name(self, group: GroupName) -> str:
        """Returns the group's name; processes with different names do not meet."""
        return f"{self._job}: {group}: {', '.join(self._roster.members(group))}"

    def gather(self, group: GroupName, value: Any, what: str) -> list[Any]:
        if self._is_closed:
            raise left_error(what)
        if len(self._roster.members(group)) == 1:
            return [value]
        with self._explained(group):
            gathered = self._members[group].together(what, pack(value), self._timeout_s)
        return [unpack(each) for each in gathered]

    @contextmanager
    def _explained(self, group: GroupName) -> Iterator[None]:
        """Adds the names of processes to errors, which only contain ranks."""
        try:
            yield
        except JaxfleetError as error:
            named = [f"rank {at} is {name}" for at, name in enumerate(self._roster.members(group))]
            error.add_note(f"  {', '.join(named)}; trainer 0 listens at {self._endpoint}")
            raise

    def close(self) -> None:
        """Leaves after sending pending messages; in trainer 0 this ends the rendezvous."""
        atexit.unregister(self.close)
        self._is_closed = True
        for member in self._members.values():
            member.close()
        self._members = {}
        if self._serving is not None:
            self._serving.close()
            self._serving = None


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
