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
        has_served: a trainer has greeted it.
        is_told: the launch has ended it.
    """

    error: BaseException | None = None
    values: dict[str, np.ndarray] = field(default_factory=dict)
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    data: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    is_up: bool = False
    has_served: bool = False
    is_told: bool = False


@dataclass
class Run:
    """The result of a schedule.

    Attributes:
        trainers: what each trainer saw.
        servers: how those that the job has, or may move to, ended.
        former: how those ended, by number, that it did without.
        unsaved: trainers that ended while a server had no space for a checkpoint of their pushes.
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
    unsaved: list[str] = field(default_factory=list)
    errors: dict[int, BaseException] = field(default_factory=dict)
    crashes: list[tuple[str, BaseException]] = field(default_factory=list)
    stuck: str = ""
    took_s: float = 0.0
    messages: int = 0
    digest: str = ""
    lost_early: bool = False
    former: list[tuple[int, ServerEnd]] = field(default_factory=list)

    @property
    def counts_of_servers(self) -> set[int]:
        """How many servers the trainers had that ended well; one number if all is well."""
        return {record.servers[-1] for record in self.trainers if record.final and record.servers}

    def last_ends(self) -> list[tuple[int, ServerEnd]]:
        """Returns the servers that the job had last, with their numbers."""
        count = max(self.counts_of_servers, default=len(self.servers))
        return list(enumerate(self.servers[:count]))

    def values(self) -> dict[str, np.ndarray]:
        """Returns the parameters of all servers, by leaf."""
        return {leaf: value for end in self.servers for leaf, value in end.values.items()}

    def rows(self) -> dict[int, np.ndarray]:
        """Returns the rows of all servers, by key."""
        return {key: row for end in self.servers for key, row in end.rows.items()}
