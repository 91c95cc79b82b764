"""What a step asks of tables, wherever they are: in this process, or on servers."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np


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

    def push(self, table: str, keys: np.ndarray, grads: np.ndarray) -> None:
        """Hands gradients over; they are applied when the step's other summands are there.

        Args:
            table: its name.
            keys: int64[n], each once; those of the step's look-up.
            grads: float32[n, dim].
        """
        ...
