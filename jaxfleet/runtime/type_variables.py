"""Type variables of a step: its state and its metrics.

`Step[State, Metrics]` is a step of `(State, batch) -> (State, Metrics)`. For untyped functions both
are `Any`, so that `Step` alone is a type too.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a default needs Python 3.13, or a package that only type checkers bring
    from typing_extensions import TypeVar

    State = TypeVar("State", default=Any)
    Metrics = TypeVar("Metrics", default=Any)
    Metrics_co = TypeVar("Metrics_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    State = TypeVar("State")
    Metrics = TypeVar("Metrics")
    Metrics_co = TypeVar("Metrics_co", covariant=True)

Batch = TypeVar("Batch")
Result = TypeVar("Result")
