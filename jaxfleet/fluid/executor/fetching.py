"""What is fetched: names, the optimizer's operators among them, and results as numpy has them."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxfleet.errors import AssertedError, WrongTypeError
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.fetched_array import FetchedArray
from jaxfleet.fluid.lod_tensor import LoDTensor
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.variable import Variable

Fetched = Variable | str


def as_list(fetch_list: Any) -> list[Any]:
    """Returns a fetch list as a list; one variable or name is a list of one.

    Raises:
        AssertionError: it is something else.
    """
    if fetch_list is None:
        return []
    if isinstance(fetch_list, str | Variable):
        return [fetch_list]
    if not isinstance(fetch_list, list | tuple):
        what = f"what is fetched is given in a list or tuple, not in a {type(fetch_list).__name__}"
        raise mistake(what, "fetch_list=[loss]", AssertedError)
    return list(fetch_list)


def plain_names(fetch_list: Any) -> tuple[str, ...] | None:
    """Returns the names in a fetch list of variables and names; None if it holds anything else."""
    if type(fetch_list) is not list:
        return None
    names = []
    for item in fetch_list:
        if isinstance(item, Variable):
            names.append(item.name)
        elif isinstance(item, str):
            names.append(item)
        else:
            return None
    return tuple(names)


def split_optimize_ops(fetch_list: Sequence[Any]) -> tuple[list[Fetched], list[Operator]]:
    """Returns what of a fetch list are variables, and what are operators of an optimizer.

    An item is a variable, its name, an operator, a list of these, or what `minimize` returned,
    whose (parameter, gradient) pairs are not fetched. A pair of its own, `(parameter, gradient)`,
    is two variables.

    Raises:
        TypeError: an item is none of these, or an operator of no optimizer.
    """
    fetched: list[Fetched] = []
    operators: list[Operator] = []
    for item in _items(fetch_list):
        if isinstance(item, Operator):
            if not item._is_optimize_op():
                what = f"operator '{item.type}' is in a fetch_list, and belongs to no optimizer"
                hint = "fetch what it writes, or name operators that minimize returned"
                raise WrongTypeError(what, op=item, hint=hint)
            operators.append(item)
        elif isinstance(item, Variable | str):
            fetched.append(item)
        else:
            what = "an item of a fetch_list is a variable, a name or an operator of an optimizer"
            raise WrongTypeError(f"{what}, not {type(item).__name__}")
    return fetched, operators


def _items(fetch_list: Sequence[Any]) -> Iterator[Any]:
    """Yields items with lists opened, and of what `minimize` returned the operators."""
    for item in fetch_list:
        if isinstance(item, tuple) and item and isinstance(item[0], list):
            yield from item[0]
        elif isinstance(item, list | tuple):
            yield from item
        else:
            yield item


def names_of(fetched: Sequence[Fetched]) -> tuple[str, ...]:
    """Returns the names of variables or names."""
    return tuple(x if isinstance(x, str) else x.name for x in fetched)


def as_numpy(tensor: Any) -> Any:
    """Returns what was fetched as numpy arrays of their own, a list of it as a list."""
    if isinstance(tensor, list | tuple):
        return [as_numpy(one) for one in tensor]
    return np.array(tensor).view(FetchedArray)


def as_tensors(value: Any) -> Any:
    """Returns what was fetched as LoDTensors, a list of it as a list; no array is waited for."""
    if isinstance(value, list | tuple):
        return [as_tensors(one) for one in value]
    if isinstance(value, LoDTensor):
        return value
    made = LoDTensor()
    made.set(jax.numpy.asarray(value))
    return made


def as_asked(values: Any, *, return_numpy: bool) -> Any:
    """Returns fetched values as `Executor.run` returns them: numpy arrays or LoDTensors."""
    return as_numpy(values) if return_numpy else as_tensors(values)
