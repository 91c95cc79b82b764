"""Batches in a deterministic order that a restarted job, of any size, goes on with."""

from jaxfleet.data.loader import Batches as Batches
from jaxfleet.data.loader import Loader as Loader
