"""The result of a schedule: how its processes ended, and what they saw."""

from dataclasses import dataclass, field

import numpy as np

from jaxfleet.testing.simulation.schedule import Schedule
from jaxfleet.testing.simulation.watch import Sizes, Waits
from jaxfleet.testing.simulation.workload import Record


@dataclass
class ServerEnd:
    """How a server ended, for the last time.

    Attributes:
        values: its parameters, by leaf.
        rows: the rows of its table by key.
        data: how many samples it reports as trained on once, twice, and never.
        starts: how often it was started.
        is_up: it runs, so that it can be killed.
    """

    error: BaseException | None = None
    values: dict[str, np.ndarray] = field(default_factory=dict)
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    data: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    is_up: bool = False


@dataclass
class Run:
    """The result of a schedule.

    Attributes:
        trainers: what each trainer saw.
        errors: by trainer, the error that ended it.
        crashes: errors that no process caught, by the name of the thread.
        stuck: why the run did not end by itself, if so.
        digest: of all messages.
        lost_early: a trainer was killed before all had the first state, without which none goes on.
    """

    schedule: Schedule
    trainers: list[Record]
    servers: list[ServerEnd]
    waits: Waits = field(default_factory=Waits)
    sizes: Sizes = field(default_factory=Sizes)
    errors: dict[int, BaseException] = field(default_factory=dict)
    crashes: list[tuple[str, BaseException]] = field(default_factory=list)
    stuck: str = ""
    took_s: float = 0.0
    messages: int = 0
    digest: str = ""
    lost_early: bool = False
