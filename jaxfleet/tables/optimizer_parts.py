"""Optimizers of a table's rows as parts of its spec: their formulas and numbers.

`optimizers` has their compiled loops.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxfleet.errors import ProgramError
from jaxfleet.tables.validation import (
    BELOW_ONE,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    Part,
    number,
)


@dataclass(frozen=True)
class Sgd(Part):
    """`row -= rate * g`.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Constant, Sgd, TableSpec, TableStore
        >>> rule = Sgd(0.1)
        >>> spec = TableSpec(name="w", dim=1, initializer=Constant(1.0), optimizer=rule)
        >>> store = TableStore(spec)
        >>> store.update(np.array([7]), np.array([[2.0]]))
        >>> store.look_up(np.array([7])).round(3)
        array([[0.8]], dtype=float32)
    """

    kind: ClassVar[str] = "sgd"
    learning_rate: float = number(0.01)


@dataclass(frozen=True)
class Momentum(Part):
    """`v = decay * v + g; row -= rate * v`, of touched rows only (lazy).

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Constant, Momentum, TableSpec, TableStore
        >>> rule = Momentum(0.1, momentum=0.5)
        >>> spec = TableSpec(name="w", dim=1, initializer=Constant(1.0), optimizer=rule)
        >>> store = TableStore(spec)
        >>> store.update(np.array([7]), np.array([[2.0]]))
        >>> store.update(np.array([7]), np.array([[2.0]]))
        >>> store.look_up(np.array([7])).round(3)
        array([[0.5]], dtype=float32)
    """

    kind: ClassVar[str] = "momentum"
    learning_rate: float = number(0.01)
    momentum: float = number(0.9, PART)
    nesterov: bool = False


@dataclass(frozen=True)
class Adagrad(Part):
    """`s += g * g; row -= rate * g / sqrt(s + epsilon)`, `s` from `initial`, as in optax.

    With `epsilon_outside`, `rate * g / (sqrt(s) + epsilon)`, as in fluid.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Adagrad, Constant, TableSpec, TableStore
        >>> rule = Adagrad(0.1, initial=0.0)
        >>> spec = TableSpec(name="w", dim=1, initializer=Constant(1.0), optimizer=rule)
        >>> store = TableStore(spec)
        >>> store.update(np.array([7]), np.array([[2.0]]))
        >>> store.look_up(np.array([7])).round(3)
        array([[0.9]], dtype=float32)
    """

    kind: ClassVar[str] = "adagrad"
    learning_rate: float = number(0.01)
    initial: float = number(0.1, NOT_NEGATIVE)
    epsilon: float = number(1e-7, NOT_NEGATIVE)
    epsilon_outside: bool = False


@dataclass(frozen=True)
class Rmsprop(Part):
    """`s = decay * s + (1 - decay) * g * g; row -= rate * g / sqrt(s + epsilon)`, lazy.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Constant, Rmsprop, TableSpec, TableStore
        >>> rule = Rmsprop(0.1)
        >>> spec = TableSpec(name="w", dim=1, initializer=Constant(1.0), optimizer=rule)
        >>> store = TableStore(spec)
        >>> store.update(np.array([7]), np.array([[2.0]]))
        >>> store.look_up(np.array([7])).round(3)
        array([[0.684]], dtype=float32)
    """

    kind: ClassVar[str] = "rmsprop"
    learning_rate: float = number(0.01)
    decay: float = number(0.9, PART)
    epsilon: float = number(1e-8, POSITIVE)


@dataclass(frozen=True)
class Adam(Part):
    """Adam (Kingma, Ba 2015) of touched rows only; each row counts its own steps (lazy).

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Adam, Constant, TableSpec, TableStore
        >>> rule = Adam(0.1)
        >>> spec = TableSpec(name="w", dim=1, initializer=Constant(1.0), optimizer=rule)
        >>> store = TableStore(spec)
        >>> store.update(np.array([7]), np.array([[2.0]]))
        >>> store.look_up(np.array([7])).round(3)
        array([[0.9]], dtype=float32)
    """

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

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Constant, DownpourAdam, TableSpec, TableStore
        >>> rule = DownpourAdam(0.1)
        >>> spec = TableSpec(name="w", dim=1, initializer=Constant(1.0), optimizer=rule)
        >>> store = TableStore(spec)
        >>> store.update(np.array([7]), np.array([[2.0]]))
        >>> store.look_up(np.array([7])).round(3)
        array([[0.999]], dtype=float32)
    """

    kind: ClassVar[str] = "downpour_adam"
    learning_rate: float = number(5e-6)
    keep: float = number(0.9999, PART)
    momentum: float = number(0.99, PART)
    epsilon: float = number(1e-8, NOT_NEGATIVE)


@dataclass(frozen=True)
class DownpourAdagrad(Part):
    """pslib's rule of sparse tables: Adagrad with one sum a row, of earlier gradients.

    `row = clip(row - rate * sqrt(initial / (initial + s)) * g, low, high); s += mean(g * g)`.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Constant, DownpourAdagrad, TableSpec, TableStore
        >>> rule = DownpourAdagrad(0.1)
        >>> spec = TableSpec(name="w", dim=1, initializer=Constant(1.0), optimizer=rule)
        >>> store = TableStore(spec)
        >>> store.update(np.array([7]), np.array([[2.0]]))
        >>> store.update(np.array([7]), np.array([[2.0]]))
        >>> store.look_up(np.array([7])).round(3)
        array([[0.669]], dtype=float32)
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
    """`row = keep * row + g`: counts and sums, which are not scaled by a rate.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Constant, Summary, TableSpec, TableStore
        >>> rule = Summary(keep=0.5)
        >>> spec = TableSpec(name="w", dim=1, initializer=Constant(1.0), optimizer=rule)
        >>> store = TableStore(spec)
        >>> store.update(np.array([7]), np.array([[2.0]]))
        >>> store.update(np.array([7]), np.array([[2.0]]))
        >>> store.look_up(np.array([7])).round(3)
        array([[3.25]], dtype=float32)
    """

    kind: ClassVar[str] = "summary"
    keep: float = number(0.999999, PART)
