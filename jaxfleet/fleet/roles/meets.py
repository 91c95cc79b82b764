"""Role makers whose processes may meet, although nothing but their roles is known at first."""

from urllib.parse import quote

from jaxfleet.env import read_job, read_meeting_dir
from jaxfleet.errors import UnsupportedError
from jaxfleet.fleet.meeting import Alone, FolderMeeting, GroupMeeting, GroupName, Meeting, Roster
from jaxfleet.fleet.roles.base import RoleMakerBase
from jaxfleet.group import joined
from jaxfleet.ops.frames import line_of_caller

_CONNECT_S = _TIMEOUT_S = 3600.0


class MeetingRoleMaker(RoleMakerBase):
    """Is a role maker that knows how many workers and servers there are.

    Its processes meet as `meet_by` says; workers without servers over the lines of the group that
    `jf.initialize` has joined; else all in the folder that `JAXFLEET_MEETING_DIR` names, which
    `jaxfleet launch` makes for servers and trainers of one machine.
    """

    def meet_by(self, meeting: Meeting) -> None:
        """Says how processes of this job meet; all of them say the same."""
        self._meeting = meeting

    def roster(self) -> Roster:
        """Returns who takes part."""
        is_worker = self.is_worker()
        return Roster(
            self.get_trainer_endpoints() or [""] * self.worker_num(),
            self.get_pserver_endpoints(),
            is_worker=is_worker,
            index=self.worker_index() if is_worker else self.server_index(),
        )

    def _find_meeting(self, group: GroupName) -> Meeting:
        """Returns how processes meet.

        Raises:
            UnsupportedError: there are others, and no way to them is known.
        """
        roster = self.roster()
        if group not in {"all", roster.group} or len(roster.members(group)) == 1:
            return Alone()
        here = joined()
        if here is not None and (here.rank, here.size) == (roster.rank, len(roster.members("all"))):
            self._meeting = GroupMeeting(here, _TIMEOUT_S)
            return self._meeting
        if (folder := read_meeting_dir()) is None:
            what = f"{type(self).__name__} knows no way to the other processes of this job"
            hint = "call jf.initialize(), or set JAXFLEET_MEETING_DIR to a folder that all see"
            raise UnsupportedError(what, source=line_of_caller(), hint=hint)
        self._meeting = FolderMeeting(
            folder,
            roster,
            connect_s=_CONNECT_S,
            timeout_s=_TIMEOUT_S,
            prefix=quote(read_job().name, safe=""),
        )
        return self._meeting
