"""What a step asks of tables, wherever they are: in this process, or on servers."""

from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np

from jaxfleet.errors import ProgramError


class TableAccess(Protocol):
    """Gives rows, and takes their gradients."""

    def look_up(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns rows as the step before left them.

        Args:
            table: its name.
            keys: int64[n], each once.

        Returns:
            float32[n, dim]; rows that are not admitted yet as the initializer makes them.
        """
        ...

    def look_up_all(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns rows of several tables, asked for at once; otherwise as `look_up`.

        Args:
            keys: by table.
        """
        ...

    def push(
        self,
        table: str,
        keys: np.ndarray,
        grads: np.ndarray,
        *,
        shows: np.ndarray | None = None,
        clicks: np.ndarray | None = None,
    ) -> None:
        """Hands gradients over; they are applied when the step's other summands are there.

        Args:
            table: its name.
            keys: int64[n], each once; those of the step's look-up.
            grads: float32[n, dim].
            shows: float32[n], how often each key was shown; for tables with scores.
            clicks: float32[n], how often it was clicked.
        """
        ...


def unknown_table(table: object, known: Collection[str]) -> ProgramError:
    """Returns the error for rows of a table that a step does not look up.

    Args:
        table: what was asked for.
        known: the names of those that it does.
    """
    what = f"there is no table '{table}' in this step, which has {', '.join(known) or 'none'}"
    hint = "give its name; a dense table is none but a parameter, which step.explain() says"
    return ProgramError(what, hint=hint)
