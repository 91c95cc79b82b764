"""File systems, where fluid has them."""

from jaxfleet.fleet.files import BDFS as BDFS
from jaxfleet.fleet.files import FS as FS
from jaxfleet.fleet.files import LocalFS as LocalFS
