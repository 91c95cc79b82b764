"""Role makers whose processes may meet, although nothing but their roles is known at first."""

from jaxfleet.errors import UnsupportedError
from jaxfleet.fleet.meeting import Alone, GroupName, Meeting
from jaxfleet.fleet.roles.base import RoleMakerBase
from jaxfleet.ops.frames import line_of_caller


class MeetingRoleMaker(RoleMakerBase):
    """Is a role maker that knows how many workers and servers there are."""

    def meet_by(self, meeting: Meeting) -> None:
        """Says how processes of this job meet; all of them say the same."""
        self._meeting = meeting

    def _find_meeting(self, group: GroupName) -> Meeting:
        """Returns how processes meet.

        Raises:
            UnsupportedError: there are others, and no way to them is known.
        """
        others = self.worker_num() - 1
        if group == "all":
            others += len(self.get_pserver_endpoints())
        if not others or (group == "trainer" and not self.is_worker()):
            return Alone()
        what = f"{type(self).__name__} knows no way to the other processes of this job"
        hint = "GeneralRoleMaker meets through a folder, MPISymetricRoleMaker by MPI"
        raise UnsupportedError(what, source=line_of_caller(), hint=hint)
