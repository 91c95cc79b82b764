"""What a step asks of tables, wherever they are: in this process, or on servers."""

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

    def push(self, table: str, keys: np.ndarray, grads: np.ndarray) -> None:
        """Hands gradients over; they are applied when the step's other summands are there.

        Args:
            table: its name.
            keys: int64[n], each once; those of the step's look-up.
            grads: float32[n, dim].
        """
        ...
