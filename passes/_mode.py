"""How trainers and servers of a captured step go together, as programs say it."""

from dataclasses import dataclass

from jaxfleet.errors import PassError
from jaxfleet.ir import Attr

_DISTRIBUTED_MODES = {"sync": 0, "async": 1, "half_async": 2, "geo": 3, "dc_asgd": 1, "fl": 0}


@dataclass(frozen=True)
class Mode:
    """A mode, with what it needs to know.

    Attributes:
        communication: `sync`, `async`, `half_async`, `geo`, `dc_asgd` or `fl`.
        staleness: the most steps that values may be behind.
        merge: the most gradients in one message.
        k_steps: steps between exchanges of trainers that update.
        compensation: how much a late gradient is corrected.
        by_rows: an average counts rows, not trainers.
    """

    communication: str = "sync"
    staleness: int = 0
    merge: int = 1
    k_steps: int = 1
    compensation: float = 1.0
    by_rows: bool = False

    def __post_init__(self) -> None:
        if self.communication not in _DISTRIBUTED_MODES:
            what = f"insert_send_recv: mode is '{self.communication}'"
            raise PassError(what, hint=f"choose one of {', '.join(_DISTRIBUTED_MODES)}")

    @property
    def is_sync(self) -> bool:
        """Whether all wait for each other at every step."""
        return self.communication == "sync"

    @property
    def updates_on_trainers(self) -> bool:
        """Whether the optimizer stays on trainers."""
        return self.communication in {"geo", "fl"}

    @property
    def distributed_mode(self) -> int:
        """Fluid's number of it, for `listen_and_serv`: 0 where servers wait for all trainers."""
        return _DISTRIBUTED_MODES[self.communication]

    def facts(self) -> dict[str, Attr]:
        """Returns the attributes of a program; none for `sync`."""
        if self.is_sync:
            return {}
        found: dict[str, Attr] = {"communication": self.communication}
        if self.communication != "fl":
            found["staleness"] = self.staleness
        if self.merge > 1 and self.communication in {"async", "half_async"}:
            found["merge"] = self.merge
        if self.updates_on_trainers:
            found["k_steps"] = self.k_steps
        if self.communication == "dc_asgd":
            found["compensation"] = self.compensation
        return found
