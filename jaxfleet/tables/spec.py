"""What a table is, as plain data: it travels in a program's text, and is saved with the rows."""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

from jaxfleet.errors import ProgramError


@dataclass(frozen=True)
class Part:
    """A part of a table's description that has several kinds, told apart by `kind`."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class Uniform(Part):
    """Rows begin evenly spread in `[low, high)`; by the key and the seed alone."""

    kind: ClassVar[str] = "uniform"
    low: float = -0.05
    high: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class Normal(Part):
    """Rows begin normally spread; by the key and the seed alone."""

    kind: ClassVar[str] = "normal"
    mean: float = 0.0
    stddev: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Constant(Part):
    """Rows begin with one value everywhere."""

    kind: ClassVar[str] = "constant"
    value: float = 0.0


@dataclass(frozen=True)
class Sgd(Part):
    """`row -= rate * g`."""

    kind: ClassVar[str] = "sgd"
    learning_rate: float = 0.01


@dataclass(frozen=True)
class Momentum(Part):
    """`v = decay * v + g; row -= rate * v`, of touched rows alone (lazy)."""

    kind: ClassVar[str] = "momentum"
    learning_rate: float = 0.01
    momentum: float = 0.9
    nesterov: bool = False


@dataclass(frozen=True)
class Adagrad(Part):
    """`s += g * g; row -= rate * g / sqrt(s + epsilon)`, `s` from `initial`: as optax has it.

    With `epsilon_outside`, `rate * g / (sqrt(s) + epsilon)`: as fluid has it.
    """

    kind: ClassVar[str] = "adagrad"
    learning_rate: float = 0.01
    initial: float = 0.1
    epsilon: float = 1e-7
    epsilon_outside: bool = False


@dataclass(frozen=True)
class Rmsprop(Part):
    """`s = decay * s + (1 - decay) * g * g; row -= rate * g / sqrt(s + epsilon)`, lazy."""

    kind: ClassVar[str] = "rmsprop"
    learning_rate: float = 0.01
    decay: float = 0.9
    epsilon: float = 1e-8


@dataclass(frozen=True)
class Adam(Part):
    """Adam (Kingma, Ba 2015) of touched rows alone; each row counts its own steps (lazy)."""

    kind: ClassVar[str] = "adam"
    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


@dataclass(frozen=True)
class DownpourAdam(Part):
    """pslib's rule of dense tables: Adam's first average over a decaying Adagrad's sum.

    `d = keep * d + 1; s = keep * s + g * g; v = momentum * v + (1 - momentum) * g;
    row -= rate * sqrt((d + d * epsilon) / (s + d * epsilon)) * v`.
    """

    kind: ClassVar[str] = "downpour_adam"
    learning_rate: float = 5e-6
    keep: float = 0.9999
    momentum: float = 0.99
    epsilon: float = 1e-8


@dataclass(frozen=True)
class Summary(Part):
    """`row = keep * row + g`: counts and sums, which a rate does not scale."""

    kind: ClassVar[str] = "summary"
    keep: float = 0.999999


@dataclass(frozen=True)
class AfterCount(Part):
    """A key gets a row of its own when it was pushed so many times.

    At most `candidates` keys are counted at once, over all servers: those longest not pushed are
    forgotten first.
    """

    kind: ClassVar[str] = "after_count"
    count: int = 2
    candidates: int = 1 << 22


@dataclass(frozen=True)
class ByChance(Part):
    """A key gets a row of its own with so much probability at each push; by key, count, seed.

    At most `candidates` keys are counted at once, over all servers: those longest not pushed are
    forgotten first.
    """

    kind: ClassVar[str] = "by_chance"
    probability: float = 0.1
    seed: int = 0
    candidates: int = 1 << 22


@dataclass(frozen=True)
class Unseen(Part):
    """A row that no step touched for so many steps goes, at `shrink`."""

    kind: ClassVar[str] = "unseen"
    steps: int = 1_000_000


@dataclass(frozen=True)
class Capacity(Part):
    """At most so many rows: the least recently (`lru`) or least often (`lfu`) touched go."""

    kind: ClassVar[str] = "capacity"
    rows: int = 1_000_000
    policy: Literal["lru", "lfu"] = "lru"


@dataclass(frozen=True)
class ByScore(Part):
    """A row whose score is under `threshold` goes, at `shrink`, which first decays both counts.

    `score = (shows - clicks) * nonclk_coeff + clicks * click_coeff`; pushes bring shows and clicks.
    """

    kind: ClassVar[str] = "by_score"
    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0
    decay: float = 0.98
    threshold: float = 0.8


KINDS: dict[str, type[Part]] = {
    part.kind: part
    for part in (Uniform, Normal, Constant, Sgd, Momentum, Adagrad, Rmsprop, Adam,
                 DownpourAdam, Summary, AfterCount, ByChance, Unseen, Capacity, ByScore)
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """What a table is.

    Attributes:
        name: its own among a program's.
        dim: elements of a row.
        initializer: what a row begins with.
        optimizer: what a gradient does to its row.
        admission: which keys get a row; all, unless given.
        evictions: which rows go.
        on_nan: what a gradient that is not finite does: `refuse` the whole push, or `skip` its row
            and count it.
        memory_rows: how many rows all servers together have in memory; the others are on disk,
            in a file that goes with the process. All are in memory, unless given.
    """

    name: str
    dim: int
    initializer: Part = field(default_factory=Uniform)
    optimizer: Part = field(default_factory=Sgd)
    admission: Part | None = None
    evictions: tuple[Part, ...] = ()
    on_nan: Literal["refuse", "skip"] = "refuse"
    memory_rows: int | None = None

    def to_text(self) -> str:
        """Returns it as text, which `from_text` reads."""
        return json.dumps({f.name: _plain(getattr(self, f.name)) for f in fields(self)})

    @classmethod
    def from_text(cls, text: str) -> "TableSpec":
        """Reads one.

        Raises:
            ProgramError: it is none.
        """
        try:
            found = {name: _read(value) for name, value in json.loads(text).items()}
            return cls(**found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ProgramError(f"no table is described by {text[:80]!r}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return {"kind": value.kind, **asdict(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        given = dict(value)
        return KINDS[given.pop("kind")](**given)
    return tuple(map(_read, value)) if isinstance(value, list) else value
