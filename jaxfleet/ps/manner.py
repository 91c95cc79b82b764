"""How a trainer goes together with servers, as its program says."""

from dataclasses import dataclass

from jaxfleet.ir import Program


@dataclass(frozen=True)
class Manner:
    """What a trainer that does not wait for the others at every step goes by.

    Attributes:
        communication: the mode: `async`, `half_async`, `geo`, `dc_asgd`, `fl`.
        staleness: how many steps values may be behind the step that they are used in.
        merge: the most gradients that are merged into one message.
        k_steps: steps from one exchange to the next, where trainers update.
        feeds: what is sent and is no gradient: the last of it counts.
    """

    communication: str
    staleness: int
    merge: int = 1
    k_steps: int = 1
    feeds: frozenset[str] = frozenset()

    @classmethod
    def of(cls, program: Program) -> "Manner | None":
        """Returns what a trainer's program says; None where it waits at every step."""
        attrs = program.attrs
        mode = str(attrs.get("communication", "sync"))
        if mode == "sync":
            return None
        numbers = [attrs.get(name, 1) for name in ("staleness", "merge", "k_steps")]
        staleness, merge, k_steps = (n if isinstance(n, int) else 1 for n in numbers)
        feeds = attrs.get("feeds", ())
        assert isinstance(feeds, tuple)
        return cls(mode, staleness, merge, k_steps, frozenset(map(str, feeds)))

    @property
    def updates_here(self) -> bool:
        """Whether trainers update parameters themselves."""
        return self.communication in {"geo", "fl"}

    @property
    def averages_state(self) -> bool:
        """Whether what trainers have at an exchange is averaged, and not what changed."""
        return self.communication == "fl"

    @property
    def averages(self) -> bool:
        """Whether merged gradients are averaged, and sent when all of them are there."""
        return self.communication == "half_async"

    @property
    def waits(self) -> bool:
        """Whether a trainer goes on only with what servers answer to what it sent last."""
        return self.communication in {"half_async", "dc_asgd"}

    @property
    def ahead(self) -> int:
        """How many more steps are computed with what is received, besides the next."""
        if self.updates_here:
            return self.k_steps - 1
        return self.merge - 1 if self.averages else 0
