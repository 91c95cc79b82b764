"""The values of variables between a scope and arrays of the dtypes that a program declares."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import SavedError
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.scope import global_scope
from jaxfleet.fluid.variable import Variable
from jaxfleet.ops.fluid.arrays import ON_DEVICE, device_dtype
from jaxfleet.ops.jax_adapter import numpy_dtype


def value_of(variable: Variable) -> np.ndarray:
    """Returns what the global scope holds of a variable, in the declared dtype.

    Raises:
        SavedError: it holds nothing, or something of another dtype.
    """
    name, scope = variable.name, global_scope()
    if name not in scope:
        hint = "run the startup program in this scope; what servers alone hold is saved there"
        raise mistake(f"'{name}' has no value in the scope, and cannot be saved", hint, SavedError)
    array = np.asarray(scope.peek(name))
    _check_dtype(variable, array, "the scope")
    return array.astype(numpy_dtype(variable.dtype), copy=False)


def check_value(variable: Variable, array: np.ndarray, where: str) -> np.ndarray:
    """Returns a value as a device takes it.

    Args:
        variable: whose value it shall be.
        array: it.
        where: what it comes from, for the error.

    Raises:
        SavedError: its shape or dtype is not what the program declares.
    """
    _check_shape(variable, array, where)
    _check_dtype(variable, array, where)
    narrow = array.astype(device_dtype(variable.dtype), copy=False)
    if array.dtype.kind in "iu" and not np.array_equal(narrow, array):
        what = f"'{variable.name}' in {where} holds numbers that do not fit in {narrow.dtype.name}"
        raise mistake(what, "integers are computed in 32 bits", SavedError)
    return narrow


def set_values(values: Mapping[str, np.ndarray]) -> None:
    """Gives the variables of the global scope their values."""
    global_scope().keep({name: jnp.array(value, copy=True) for name, value in values.items()})


def _check_shape(variable: Variable, array: np.ndarray, where: str) -> None:
    declared: Sequence[int] = variable.shape
    fits = len(declared) == array.ndim and all(
        wanted in {-1, size} for wanted, size in zip(declared, array.shape, strict=True)
    )
    if not fits:
        what = f"'{variable.name}' has shape {list(array.shape)} in {where}"
        hint = "was it saved by another version of the model?"
        raise mistake(f"{what}, and {list(declared)} in the program", hint, SavedError)


def _check_dtype(variable: Variable, array: np.ndarray, where: str) -> None:
    if array.dtype.name not in {variable.dtype, ON_DEVICE.get(variable.dtype)}:
        what = f"'{variable.name}' is {array.dtype.name} in {where}"
        raise mistake(f"{what}, and {variable.dtype} in the program", kind=SavedError)
