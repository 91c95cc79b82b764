"""What a table is, as plain data: it travels in a program's text, and is saved with the rows."""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

from jaxfleet.errors import ProgramError
from jaxfleet.tables.numbers import (
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    SEED,
    SOME,
    STEPS,
    checked,
    number,
    rule_of,
)


@dataclass(frozen=True)
class Part:
    """A part of a table's description that has several kinds, told apart by `kind`.

    Raises:
        ProgramError: one of its numbers is none that it may be.
    """

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for each in fields(self):
            if (rule := rule_of(each.metadata)) is not None:
                what = f"{type(self).__name__}: {each.name}"
                object.__setattr__(self, each.name, checked(what, getattr(self, each.name), rule))


@dataclass(frozen=True)
class Uniform(Part):
    """Rows begin evenly spread in `[low, high)`; by the key and the seed alone."""

    kind: ClassVar[str] = "uniform"
    low: float = number(-0.05)
    high: float = number(0.05)
    seed: int = number(0, SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ProgramError(f"Uniform: low is {self.low}, and high {self.high}, which is less")


@dataclass(frozen=True)
class Normal(Part):
    """Rows begin normally spread; by the key and the seed alone."""

    kind: ClassVar[str] = "normal"
    mean: float = number(0.0)
    stddev: float = number(0.01, NOT_NEGATIVE)
    seed: int = number(0, SEED)


@dataclass(frozen=True)
class Constant(Part):
    """Rows begin with one value everywhere."""

    kind: ClassVar[str] = "constant"
    value: float = number(0.0)


@dataclass(frozen=True)
class Sgd(Part):
    """`row -= rate * g`."""

    kind: ClassVar[str] = "sgd"
    learning_rate: float = number(0.01)


@dataclass(frozen=True)
class Momentum(Part):
    """`v = decay * v + g; row -= rate * v`, of touched rows alone (lazy)."""

    kind: ClassVar[str] = "momentum"
    learning_rate: float = number(0.01)
    momentum: float = number(0.9, PART)
    nesterov: bool = False


@dataclass(frozen=True)
class Adagrad(Part):
    """`s += g * g; row -= rate * g / sqrt(s + epsilon)`, `s` from `initial`: as optax has it.

    With `epsilon_outside`, `rate * g / (sqrt(s) + epsilon)`: as fluid has it.
    """

    kind: ClassVar[str] = "adagrad"
    learning_rate: float = number(0.01)
    initial: float = number(0.1, NOT_NEGATIVE)
    epsilon: float = number(1e-7, NOT_NEGATIVE)
    epsilon_outside: bool = False


@dataclass(frozen=True)
class Rmsprop(Part):
    """`s = decay * s + (1 - decay) * g * g; row -= rate * g / sqrt(s + epsilon)`, lazy."""

    kind: ClassVar[str] = "rmsprop"
    learning_rate: float = number(0.01)
    decay: float = number(0.9, PART)
    epsilon: float = number(1e-8, POSITIVE)


@dataclass(frozen=True)
class Adam(Part):
    """Adam (Kingma, Ba 2015) of touched rows alone; each row counts its own steps (lazy)."""

    kind: ClassVar[str] = "adam"
    learning_rate: float = number(0.001)
    beta1: float = number(0.9, BELOW_ONE)
    beta2: float = number(0.999, BELOW_ONE)
    epsilon: float = number(1e-8, POSITIVE)


@dataclass(frozen=True)
class DownpourAdam(Part):
    """pslib's rule of dense tables: Adam's first average over a decaying Adagrad's sum.

    `d = keep * d + 1; s = keep * s + g * g; v = momentum * v + (1 - momentum) * g;
    row -= rate * sqrt((d + d * epsilon) / (s + d * epsilon)) * v`.
    """

    kind: ClassVar[str] = "downpour_adam"
    learning_rate: float = number(5e-6)
    keep: float = number(0.9999, PART)
    momentum: float = number(0.99, PART)
    epsilon: float = number(1e-8, NOT_NEGATIVE)


@dataclass(frozen=True)
class DownpourAdagrad(Part):
    """pslib's rule of sparse tables: Adagrad with one sum a row, of what came before.

    `row = clip(row - rate * sqrt(initial / (initial + s)) * g, low, high); s += mean(g * g)`.
    """

    kind: ClassVar[str] = "downpour_adagrad"
    learning_rate: float = number(0.05)
    initial: float = number(3.0, POSITIVE)
    low: float = number(-10.0)
    high: float = number(10.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            what = f"DownpourAdagrad: rows are from {self.low} to {self.high}"
            raise ProgramError(what, hint="low is less than high")


@dataclass(frozen=True)
class Summary(Part):
    """`row = keep * row + g`: counts and sums, which a rate does not scale."""

    kind: ClassVar[str] = "summary"
    keep: float = number(0.999999, PART)


@dataclass(frozen=True)
class AfterCount(Part):
    """A key gets a row of its own when it was pushed so many times.

    At most `candidates` keys are counted at once, on any number of servers: a 1024th of them in
    each bucket, of which those longest not pushed are forgotten first.
    """

    kind: ClassVar[str] = "after_count"
    count: int = number(2, COUNT)
    candidates: int = number(1 << 22, SOME)


@dataclass(frozen=True)
class ByChance(Part):
    """A key gets a row of its own with so much probability at each push; by key, count, seed.

    At most `candidates` keys are counted at once, on any number of servers: a 1024th of them in
    each bucket, of which those longest not pushed are forgotten first.
    """

    kind: ClassVar[str] = "by_chance"
    probability: float = number(0.1, PART)
    seed: int = number(0, SEED)
    candidates: int = number(1 << 22, SOME)


@dataclass(frozen=True)
class Unseen(Part):
    """A row that no step touched for so many steps goes, at `shrink`."""

    kind: ClassVar[str] = "unseen"
    steps: int = number(1_000_000, STEPS)


@dataclass(frozen=True)
class Capacity(Part):
    """At most so many rows: the least recently (`lru`) or least often (`lfu`) touched go.

    They go bucket by bucket, each of which keeps a 1024th, so the same rows go on any number of
    servers; 1024 is the least.
    """

    kind: ClassVar[str] = "capacity"
    rows: int = number(1_000_000, SOME)
    policy: Literal["lru", "lfu"] = "lru"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy not in {"lru", "lfu"}:
            raise ProgramError(f"Capacity: policy is {self.policy!r}, and must be 'lru' or 'lfu'")


@dataclass(frozen=True)
class ByScore(Part):
    """A row whose score is under `threshold` goes, at `shrink`, which first decays both counts.

    `score = (shows - clicks) * nonclk_coeff + clicks * click_coeff`; pushes bring shows and clicks.
    """

    kind: ClassVar[str] = "by_score"
    nonclk_coeff: float = number(0.1)
    click_coeff: float = number(1.0)
    decay: float = number(0.98, PART)
    threshold: float = number(0.8)


# What each part of a table may be.
ROLES: dict[str, tuple[type[Part], ...]] = {
    "initializer": (Uniform, Normal, Constant),
    "optimizer": (Sgd, Momentum, Adagrad, Rmsprop, Adam, DownpourAdagrad, DownpourAdam, Summary),
    "admission": (AfterCount, ByChance),
    "evictions": (Unseen, Capacity, ByScore),
}
KINDS: dict[str, type[Part]] = {part.kind: part for parts in ROLES.values() for part in parts}


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

    Raises:
        ProgramError: a part is none that may stand there.
    """

    name: str
    dim: int
    initializer: Part = field(default_factory=Uniform)
    optimizer: Part = field(default_factory=Sgd)
    admission: Part | None = None
    evictions: tuple[Part, ...] = ()
    on_nan: Literal["refuse", "skip"] = "refuse"
    memory_rows: int | None = None

    def __post_init__(self) -> None:
        given = [("initializer", self.initializer), ("optimizer", self.optimizer)]
        given += [("evictions", part) for part in self.evictions]
        if self.admission is not None:
            given.append(("admission", self.admission))
        for name, part in given:
            if not isinstance(part, ROLES[name]):
                known = [kind.__name__ for kind in ROLES[name]]
                what = f"table '{self.name}': {part!r} is no {name.removesuffix('s')} of jf.tables"
                hint = f"take one of {', '.join(known)}, as in {name}=jf.tables.{known[0]}()"
                raise ProgramError(what, hint=hint)

    @property
    def has_scores(self) -> bool:
        """Whether rows have shows and clicks."""
        return any(isinstance(part, ByScore) for part in self.evictions)

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
