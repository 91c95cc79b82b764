"""Type variables of a step: its state and its metrics.

`Step[State, Metrics]` is a step of `(State, batch) -> (State, Metrics)`. For untyped functions both
are `Any`, so that `Step` alone is a type too.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a default needs Python 3.13, or a package that only type checkers bring
    from typing_extensions import TypeVar

    State = TypeVar("State", default=Any)
    Metrics = TypeVar("Metrics", default=Any)
else:
    from typing import TypeVar

    State = TypeVar("State")
    Metrics = TypeVar("Metrics")

Batch = TypeVar("Batch")
Result = TypeVar("Result")
