"""Roles of a single process and of a rank of a group."""

from jaxfleet.cluster import RankPlace, initialize, joined
from jaxfleet.cluster.rendezvous import GroupName, GroupRendezvous, Rendezvous, SingleProcess
from jaxfleet.cluster.roles import Role, RoleMakerBase
from jaxfleet.env import read_rank
from jaxfleet.errors import StrategyError
from jaxfleet.ops.user_frames import line_of_caller


class OnlyWorker(RoleMakerBase):
    """Role of the only worker of a job without servers."""

    def __init__(self) -> None:
        super().__init__()
        self._role, self._current_id = Role.WORKER, 0

    def generate_role(self) -> None:
        """Does nothing: there are no variables to read."""
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

    def _find_meeting(self, group: GroupName) -> Rendezvous:
        del group
        return SingleProcess()


_LONGEST_S = 600.0  # as for a step: another process may still compile


class RankRole(RoleMakerBase):
    """Joins the group that the environment specifies, and takes its rank from there."""

    def __init__(self) -> None:
        super().__init__()
        self._place = RankPlace()
        self._role = Role.WORKER

    def generate_role(self) -> None:
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

    def _find_meeting(self, group: GroupName) -> Rendezvous:
        del group
        here = joined()
        return SingleProcess() if here is None else GroupRendezvous(here, _LONGEST_S)


def check_same_rank(who: str, said: tuple[int, int], here: tuple[int, int], hint: str) -> None:
    """Rejects an object that belongs to another rank than this process.

    Args:
        who: beginning of the message: `the program is that of`.
        said: the declared rank and size.
        here: rank and size of this process, in the group that it has joined or will join.
        hint: what to do.
    """
    if said != here:
        what = f"{who} rank {said[0]} of {said[1]}, and this process is rank {here[0]} of {here[1]}"
        raise StrategyError(what, source=line_of_caller(), hint=hint)
