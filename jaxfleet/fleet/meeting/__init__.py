"""How processes of a job wait for each other and learn what the others have."""

from jaxfleet.fleet.meeting.folder import FolderMeeting as FolderMeeting
from jaxfleet.fleet.meeting.fs_folder import Folder as Folder
from jaxfleet.fleet.meeting.fs_folder import FsPath as FsPath
from jaxfleet.fleet.meeting.group import GroupMeeting as GroupMeeting
from jaxfleet.fleet.meeting.meeting import Alone as Alone
from jaxfleet.fleet.meeting.meeting import GroupName as GroupName
from jaxfleet.fleet.meeting.meeting import Meeting as Meeting
from jaxfleet.fleet.meeting.reducing import reduce_into as reduce_into
from jaxfleet.fleet.meeting.roster import Roster as Roster
