"""Table specs as plain data, which programs carry as text and checkpoints save with the rows."""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

from jaxfleet.errors import ProgramError
from jaxfleet.tables.optimizer_parts import (
    Adagrad,
    Adam,
    DownpourAdagrad,
    DownpourAdam,
    Momentum,
    Rmsprop,
    Sgd,
    Summary,
)
from jaxfleet.tables.validation import (
    COUNT,
    NOT_NEGATIVE,
    PART,
    SEED,
    SOME,
    STEPS,
    Part,
    number,
)


@dataclass(frozen=True)
class Uniform(Part):
    """Initial rows are uniform in `[low, high)`, by the key and the seed alone.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import TableSpec, TableStore, Uniform
        >>> spec = TableSpec(name="users", dim=2, initializer=Uniform(low=0.0, high=0.5, seed=3))
        >>> store = TableStore(spec)
        >>> rows = store.look_up(np.array([7, 2**40]))
        >>> bool((0.0 <= rows).all() and (rows < 0.5).all())
        True
    """

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
    """Initial rows are normally distributed, by the key and the seed alone.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Normal, TableSpec, TableStore
        >>> spec = TableSpec(name="users", dim=2, initializer=Normal(stddev=0.1))
        >>> store = TableStore(spec)
        >>> bool(np.abs(store.look_up(np.arange(100))).max() < 0.6)
        True
    """

    kind: ClassVar[str] = "normal"
    mean: float = number(0.0)
    stddev: float = number(0.01, NOT_NEGATIVE)
    seed: int = number(0, SEED)


@dataclass(frozen=True)
class Constant(Part):
    """Initial rows have one value everywhere.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Constant, TableSpec, TableStore
        >>> spec = TableSpec(name="users", dim=2, initializer=Constant(0.25))
        >>> store = TableStore(spec)
        >>> store.look_up(np.array([7]))
        array([[0.25, 0.25]], dtype=float32)
    """

    kind: ClassVar[str] = "constant"
    value: float = number(0.0)


@dataclass(frozen=True)
class AfterCount(Part):
    """Admits a key after `count` pushes.

    At most `candidates` keys are counted at once, on any number of servers: a 1024th of them in
    each bucket, which drops its least recently pushed ones first.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import AfterCount, TableSpec, TableStore
        >>> store = TableStore(TableSpec(name="users", dim=1, admission=AfterCount(2)))
        >>> store.update(np.array([7]), np.array([[1.0]]))
        >>> len(store)
        0
        >>> store.update(np.array([7]), np.array([[1.0]]))
        >>> len(store)
        1
    """

    kind: ClassVar[str] = "after_count"
    count: int = number(2, COUNT)
    candidates: int = number(1 << 22, SOME)


@dataclass(frozen=True)
class ByChance(Part):
    """Admits a key with this probability at each push, by key, count and seed.

    `candidates` bounds the waiting keys as in `AfterCount`.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import ByChance, TableSpec, TableStore
        >>> store = TableStore(TableSpec(name="users", dim=1, admission=ByChance(0.1)))
        >>> store.update(np.arange(1000), np.ones((1000, 1)))
        >>> 50 < len(store) < 150
        True
    """

    kind: ClassVar[str] = "by_chance"
    probability: float = number(0.1, PART)
    seed: int = number(0, SEED)
    candidates: int = number(1 << 22, SOME)


@dataclass(frozen=True)
class Unseen(Part):
    """Evicts a row that no step touched for this number of steps, at `shrink`.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import TableSpec, TableStore, Unseen
        >>> store = TableStore(TableSpec(name="users", dim=1, evictions=(Unseen(100),)))
        >>> store.update(np.array([1, 2]), np.ones((2, 1)), step=0)
        >>> store.update(np.array([2]), np.ones((1, 1)), step=90)
        >>> store.shrink(step=150), len(store)
        (1, 1)
    """

    kind: ClassVar[str] = "unseen"
    steps: int = number(1_000_000, STEPS)


@dataclass(frozen=True)
class Capacity(Part):
    """Bounds the rows: evicts the least recently (`lru`) or least often (`lfu`) touched.

    Each bucket keeps a 1024th, so the same rows are evicted on any number of servers; 1024 is the
    least bound.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Capacity, TableSpec, TableStore
        >>> store = TableStore(TableSpec(name="users", dim=1, evictions=(Capacity(2048),)))
        >>> store.update(np.arange(10_000), np.ones((10_000, 1)))
        >>> len(store) <= 2048
        True
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
    """Evicts a row whose score is under `threshold`, at `shrink`, which first decays both counts.

    `score = (shows - clicks) * nonclk_coeff + clicks * click_coeff`; pushes carry shows and clicks.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import ByScore, TableSpec, TableStore
        >>> store = TableStore(TableSpec(name="ads", dim=1, evictions=(ByScore(threshold=0.5),)))
        >>> shows, clicks = np.array([5.0, 3.0]), np.array([1.0, 0.0])
        >>> store.update(np.array([1, 2]), np.ones((2, 1)), shows=shows, clicks=clicks)
        >>> store.shrink(step=1), len(store)
        (1, 1)
    """

    kind: ClassVar[str] = "by_score"
    nonclk_coeff: float = number(0.1)
    click_coeff: float = number(1.0)
    decay: float = number(0.98, PART)
    threshold: float = number(0.8)


# Kinds allowed for each part of a table.
ROLES: dict[str, tuple[type[Part], ...]] = {
    "initializer": (Uniform, Normal, Constant),
    "optimizer": (Sgd, Momentum, Adagrad, Rmsprop, Adam, DownpourAdagrad, DownpourAdam, Summary),
    "admission": (AfterCount, ByChance),
    "evictions": (Unseen, Capacity, ByScore),
}
KINDS: dict[str, type[Part]] = {part.kind: part for parts in ROLES.values() for part in parts}


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """Description of a table.

    Attributes:
        name: unique in a program.
        dim: elements of a row.
        initializer: initial values of a row.
        optimizer: update of a row by a gradient.
        admission: which keys get a row; by default all.
        evictions: which rows are removed.
        on_nan: effect of a non-finite gradient: `refuse` the whole push, or `skip` its row and
            count it.
        memory_rows: number of rows that all servers together keep in memory; the others are on
            disk, in a file that is deleted with the process. By default all are in memory.

    Raises:
        ProgramError: a part has a kind that is not allowed there.

    Examples:
        >>> from jaxfleet.tables import Adagrad, TableSpec, Unseen
        >>> spec = TableSpec(name="users", dim=8, optimizer=Adagrad(0.05), evictions=(Unseen(100),))
        >>> TableSpec.from_text(spec.to_text()) == spec
        True
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
        return any(isinstance(part, ByScore) for part in self.evictions)

    def to_text(self) -> str:
        return json.dumps({f.name: _plain(getattr(self, f.name)) for f in fields(self)})

    @classmethod
    def from_text(cls, text: str) -> "TableSpec":
        """Parses the result of `to_text`.

        Raises:
            ProgramError: the text is not a table spec.
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
