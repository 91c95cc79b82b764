"""What a server says of itself and of its trainers, at a moment, to who watches the job."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxfleet.ps.messages import Plain


@dataclass(frozen=True)
class TrainerFigures:
    """What a server knows of a trainer.

    Attributes:
        number: which.
        step: the last step that it sent anything for.
        silent_s: since when nothing was heard of it.
        late_s: how long after the first of all it came to its steps, added up.
        doing: what it last said that it did.
        has_left: whether it said bye.
    """

    number: int
    step: int
    silent_s: float
    late_s: float
    doing: str
    has_left: bool


@dataclass(frozen=True)
class Figures:
    """What a server counted.

    Attributes:
        name: the server's.
        counted: as `step.stats()` has it.
        messages: how many came, by kind.
        received_bytes: of arrays that came.
        sent_bytes: of arrays that went.
        trainers: those that said hello.
    """

    name: str
    counted: Mapping[str, Plain]
    messages: Mapping[str, int] = field(default_factory=dict)
    received_bytes: int = 0
    sent_bytes: int = 0
    trainers: tuple[TrainerFigures, ...] = ()
