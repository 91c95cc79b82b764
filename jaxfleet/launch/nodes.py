"""The machines of a job, which of them this one is, and what of a job each has."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxfleet.errors import StrategyError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Nodes:
    """Names the machines of a job, in the order in which their processes are numbered.

    Every machine computes the same of the same names, and none asks another.

    Attributes:
        names: addresses or host names by which the machines reach each other.
        own: this machine's.
    """

    names: tuple[str, ...] = (LOOPBACK,)
    own: str = LOOPBACK

    def __post_init__(self) -> None:
        for at, name in enumerate(self.names):
            if not name or any(letter.isspace() or letter == "," for letter in name):
                raise StrategyError(f"{name!r} is no machine's name", hint="write --nodes a,b,c")
            if name in self.names[:at]:
                hint = "each machine stands once; --nproc says how many processes it has"
                raise StrategyError(f"the machine {name} is named twice", hint=hint)
        if self.own not in self.names:
            known = ", ".join(self.names) or "none"
            hint = "give --node as it stands in --nodes"
            raise StrategyError(
                f"this machine, {self.own}, is none of the job's: {known}", hint=hint
            )

    @property
    def several(self) -> bool:
        return len(self.names) > 1

    @property
    def index(self) -> int:
        """This machine's number."""
        return self.names.index(self.own)

    @property
    def job_name(self) -> str:
        """A job's name where nobody gives it one: all machines say the same."""
        return "+".join(self.names)

    def share(self, count: int, node: int) -> range:
        """Returns which of `count` things are a machine's: the first machines have one more.

        >>> [list(Nodes(("a", "b"), "a").share(3, node)) for node in range(2)]
        [[0, 1], [2]]
        """
        each, more = divmod(count, len(self.names))
        first = node * each + min(node, more)
        return range(first, first + each + (node < more))

    def endpoints(self, counts: Sequence[int], port: int) -> tuple[str, ...]:
        """Returns `counts[n]` endpoints of each machine n, with ports from `port` on.

        >>> Nodes(("a", "b"), "a").endpoints([2, 1], 6170)
        ('a:6170', 'a:6171', 'b:6170')
        """
        return tuple(
            f"{name}:{port + at}"
            for name, count in zip(self.names, counts, strict=True)
            for at in range(count)
        )
