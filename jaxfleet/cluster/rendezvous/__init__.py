"""Rendezvous of a job's processes: waiting for each other and exchanging values."""

from jaxfleet.cluster.filesystems import Folder as Folder
from jaxfleet.cluster.filesystems import FsPath as FsPath
from jaxfleet.cluster.rendezvous.exchanged_values import reduce_into as reduce_into
from jaxfleet.cluster.rendezvous.file_rendezvous import FileRendezvous as FileRendezvous
from jaxfleet.cluster.rendezvous.network_rendezvous import GroupRendezvous as GroupRendezvous
from jaxfleet.cluster.rendezvous.network_rendezvous import NetworkRendezvous as NetworkRendezvous
from jaxfleet.cluster.rendezvous.protocol import GroupName as GroupName
from jaxfleet.cluster.rendezvous.protocol import Rendezvous as Rendezvous
from jaxfleet.cluster.rendezvous.protocol import Roster as Roster
from jaxfleet.cluster.rendezvous.protocol import SingleProcess as SingleProcess
