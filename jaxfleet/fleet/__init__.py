"""Jobs of several processes: who each is, and what a script calls."""

from jaxfleet.fleet.base import FleetBase as FleetBase
from jaxfleet.fleet.only_worker import OnlyWorker as OnlyWorker
from jaxfleet.fleet.splitting import split_files as split_files
