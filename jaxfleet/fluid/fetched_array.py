"""FetchedArray: what `Executor.run` returns, a numpy array that converts to a number if it is one.

Fluid's losses are arrays of shape `[1]`, and scripts of its time write `float(loss)` and
`"%f" % loss`. NumPy 2.4 refuses both for any array with an axis.
"""

from typing import Any

import numpy as np


class FetchedArray(np.ndarray):
    """A numpy array; one with a single element converts by `float()`, `int()` and `complex()`.

    It prints and pickles as a plain array. Slices and arithmetic of it are of this class too,
    and a reduction to no axes is a numpy scalar.
    """

    __slots__ = ()

    def __float__(self) -> float:
        return float(self._only())

    def __int__(self) -> int:
        return int(self._only())

    def __complex__(self) -> complex:
        return complex(self._only())

    def _only(self) -> Any:
        """Returns the only element; numpy's own error if there are more."""
        return self.item() if self.size == 1 else np.asarray(self)

    def __array_wrap__(
        self, array: np.ndarray, context: Any = None, return_scalar: bool = False
    ) -> Any:
        del context, return_scalar
        return array.view(FetchedArray) if array.ndim else array[()]

    def __repr__(self) -> str:
        return repr(self.view(np.ndarray))

    def __reduce__(self) -> Any:
        return self.view(np.ndarray).__reduce__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.view(np.ndarray).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any] | None) -> "FetchedArray":
        del memo
        return self.copy()
