"""File systems at Paddle's path."""

from jaxfleet.cluster.filesystems import BDFS as BDFS
from jaxfleet.cluster.filesystems import FS as FS
from jaxfleet.cluster.filesystems import LocalFS as LocalFS
