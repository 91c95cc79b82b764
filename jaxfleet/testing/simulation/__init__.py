"""Deterministic simulation: a job under drawn faults, in one process, by one seed.

::

    python -m jaxfleet.testing.simulation --seeds 0:1000   # prints what fails, reduced
    python -m jaxfleet.testing.simulation --seed 7 --trace

Servers, clients and steps are the real ones; time, network, disks and the order of execution are
simulated (docs/simulation.md). The method is that of FoundationDB (Zhou et al., "FoundationDB: A
Distributed Unbundled Transactional Key Value Store", 2021, section 4) and of TigerBeetle's VOPR.
"""

from jaxfleet.testing.simulation.runner import Failure as Failure
from jaxfleet.testing.simulation.runner import check as check
from jaxfleet.testing.simulation.runner import explore as explore
from jaxfleet.testing.simulation.runner import shrink as shrink
from jaxfleet.testing.simulation.schedule import Schedule as Schedule
from jaxfleet.testing.simulation.schedule import draw_schedule as draw_schedule
