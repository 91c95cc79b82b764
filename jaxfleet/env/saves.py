"""Periodic checkpoints of a job, as the launch requests them from its processes."""

import re
from dataclasses import dataclass
from pathlib import Path

from jaxfleet.env.variables import SAVE_EVERY, SAVE_KEEP, SAVE_TO, get, read_number, refuse
from jaxfleet.errors import StrategyError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_INTERVAL = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|steps?)")
_HINT = "write 300s, 5m, 1h or 100steps"


@dataclass(frozen=True)
class SaveInterval:
    """Time or number of steps between two checkpoints; exactly one of them is set."""

    seconds: float | None = None
    steps: int | None = None

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.seconds is not None else f"{self.steps}steps"

    @classmethod
    def parse(cls, text: str) -> "SaveInterval":
        """Reads an interval.

        >>> SaveInterval.parse("5m"), SaveInterval.parse("100steps")
        (SaveInterval(seconds=300.0, steps=None), SaveInterval(seconds=None, steps=100))

        Raises:
            StrategyError: it is not an interval, or zero.
        """
        found = _INTERVAL.fullmatch(text.strip())
        number = float(found[1]) if found is not None else 0.0
        if found is None or not number:
            raise StrategyError(f"{text!r} is not an interval of checkpoints", hint=_HINT)
        if found[2] in _UNITS:
            return cls(seconds=number * _UNITS[found[2]])
        if not number.is_integer():
            raise StrategyError(f"{text!r} is not a number of steps", hint=_HINT)
        return cls(steps=int(number))


@dataclass(frozen=True)
class PeriodicSaves:
    """Checkpoints that a job's steps write without a line in the script.

    Attributes:
        folder: `JAXFLEET_SAVE_TO`; of the checkpoints, which all processes of the job can access.
        every: `JAXFLEET_SAVE_EVERY`.
        keep: `JAXFLEET_SAVE_KEEP`; how many are kept, 3 by default.
    """

    folder: Path
    every: SaveInterval
    keep: int = 3

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise StrategyError(f"{self.keep} periodic checkpoints are kept", hint="keep 1 or more")


def read_periodic_saves() -> PeriodicSaves | None:
    """Returns the periodic checkpoints that this process takes part in, if any."""
    if not get(SAVE_EVERY):
        return None
    if not get(SAVE_TO):
        refuse(SAVE_TO, "is not set", f"{SAVE_EVERY} needs a folder for checkpoints")
    keep = read_number(SAVE_KEEP, least=1, hint="keep 1 or more") if get(SAVE_KEEP) else 3
    return PeriodicSaves(Path(get(SAVE_TO)), SaveInterval.parse(get(SAVE_EVERY)), keep)


def periodic_saves_environment(saves: PeriodicSaves | None) -> dict[str, str]:
    """Returns the variables that request periodic checkpoints from a child; none without them."""
    if saves is None:
        return {}
    folder = str(saves.folder.absolute())
    return {SAVE_TO: folder, SAVE_EVERY: str(saves.every), SAVE_KEEP: str(saves.keep)}
