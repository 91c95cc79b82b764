"""Fetched values: names, numpy results, programs pruned to fetches, and checks for NaN and Inf.

Losses in fluid are arrays of shape `[1]`, and scripts of its time write `float(loss)` and
`"%f" % loss`, which NumPy 2.4 rejects for any array with an axis; `FetchedArray` allows both.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxfleet.errors import AssertedError, NonFiniteError, WrongTypeError
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.compiler.compiled_program import CompiledProgram, warn_of_no_program
from jaxfleet.fluid.flags import flag
from jaxfleet.fluid.framework.operator import ROLE, Operator, OpRole
from jaxfleet.fluid.framework.program import Program, VersionCache
from jaxfleet.fluid.framework.program_copy import holders_of
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.lod_tensor import LoDTensor
from jaxfleet.fluid.lowering.lod_values import is_sequences


class FetchedArray(np.ndarray):
    """A numpy array; one with a single element converts by `float()`, `int()` and `complex()`.

    It prints and pickles as a plain array. Slices and results of arithmetic are of this class too;
    a reduction to no axes is a numpy scalar.
    """

    __slots__ = ()

    def __float__(self) -> float:
        return float(self._only())

    def __int__(self) -> int:
        return int(self._only())

    def __complex__(self) -> complex:
        return complex(self._only())

    def _only(self) -> Any:
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


Fetched = Variable | str


def as_list(fetch_list: Any) -> list[Any]:
    """Returns a fetch list as a list; one variable or name becomes a list of one."""
    if fetch_list is None:
        return []
    if isinstance(fetch_list, str | Variable):
        return [fetch_list]
    if not isinstance(fetch_list, list | tuple):
        what = f"what is fetched is given in a list or tuple, not in a {type(fetch_list).__name__}"
        raise mistake(what, "fetch_list=[loss]", AssertedError)
    return list(fetch_list)


def plain_names(fetch_list: Any) -> tuple[str, ...] | None:
    """Returns the names in a fetch list of variables and names; None if it has other items."""
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
    """Splits a fetch list into variables and operators of an optimizer.

    An item is a variable, its name, an operator, a list of these, or the result of `minimize`,
    whose (parameter, gradient) pairs are not fetched. A separate pair `(parameter, gradient)` is
    two variables. Raises TypeError if an item is of another type, or an operator that belongs to no
    optimizer.
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
    """Yields the items, flattening lists and taking the operators of a result of `minimize`."""
    for item in fetch_list:
        if isinstance(item, tuple) and item and isinstance(item[0], list):
            yield from item[0]
        elif isinstance(item, list | tuple):
            yield from item
        else:
            yield item


def names_of(fetched: Sequence[Fetched]) -> tuple[str, ...]:
    """Returns the names of fetched items."""
    return tuple(x if isinstance(x, str) else x.name for x in fetched)


def as_numpy(tensor: Any) -> Any:
    """Copies fetched values to numpy arrays, keeping lists."""
    if isinstance(tensor, list | tuple):
        return [as_numpy(one) for one in tensor]
    return np.array(tensor).view(FetchedArray)


def as_tensors(value: Any) -> Any:
    """Wraps fetched values in LoDTensors, keeping lists, without waiting for any array."""
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


def prune_program(
    program: Program | CompiledProgram,
    feed: Any,
    fetch_list: Sequence[Fetched],
    optimize_ops: Sequence[Operator],
) -> Program:
    """Returns a copy of a program with only the operators that the fetched values need.

    Fed values are not computed. The updates in `optimize_ops` are kept; all of the program's, if it
    is empty. A program compiled from a graph stays whole, with a warning.
    """
    whole = program.program if isinstance(program, CompiledProgram) else program
    if isinstance(program, CompiledProgram) and program._program is None:
        warn_of_no_program()
        return whole
    root = whole.global_block()
    kept = list(optimize_ops) or [op for op in root.ops if op._is_optimize_op()]
    # Other processes wait for the messages of a trainer, whatever it fetches.
    kept += [op for op in root.ops if op.attrs.get(ROLE, 0) & (OpRole.RPC | OpRole.DIST)]
    made = {name for op in root.ops for name in op.output_arg_names}
    # A value without a producer is read from the scope, so it needs no operator.
    names = names_of(fetch_list)
    lie = holders_of(whole, names)
    wanted = [name for name, where in zip(names, lie, strict=True) if where in made]
    return whole._prune_with_input(list(names_fed(feed)), [*wanted, *kept])


def kept_feed(program: Program | CompiledProgram, feed: Any) -> Any:
    """Returns the part of a feed that a pruned program still reads."""
    runs = program.program if isinstance(program, CompiledProgram) else program
    declared = runs.global_block().vars
    if isinstance(feed, Mapping):
        return {name: value for name, value in feed.items() if name in declared}
    if isinstance(feed, list | tuple):
        return [kept_feed(runs, one) for one in feed]
    return feed


def names_fed(feed: Any) -> tuple[str, ...]:
    """Returns the names in a feed: a dict, or one for each device."""
    feeds = [feed] if isinstance(feed, Mapping) else feed or ()
    return tuple(dict.fromkeys(name for one in feeds for name in one))


_FLAG = "FLAGS_check_nan_inf"
_LOSS = OpRole.LOSS
_COMPUTES = (OpRole.FORWARD, OpRole.BACKWARD, OpRole.FORWARD | _LOSS, OpRole.BACKWARD | _LOSS)
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


def finite_check_enabled() -> bool:
    """Whether runs are checked for NaN and Inf."""
    return bool(flag(_FLAG))


def checked_names(program: Program) -> tuple[str, ...]:
    """Returns the variables to check after a run, in the order in which they are computed.

    There are none unless runs are checked for NaN and Inf.
    For a program whose names share memory these are only the persistable ones, since the others
    may have been overwritten before they are fetched. Sequences are left out: results that
    depend on them show their values.
    """
    return _NAMES.get(program) if finite_check_enabled() else ()


def _names(program: Program) -> tuple[str, ...]:
    declared = program.global_block().vars
    ops = program.global_block().ops
    if program._is_distributed:  # sent and received variables have names of their own
        ops = [op for op in ops if op.attr(ROLE) in _COMPUTES]
    written = dict.fromkeys(name for op in ops for name in op.output_arg_names)
    found = [declared[name] for name in written if name in declared]
    checked = [v for v in found if _is_checked(v, keeps=not program._is_mem_optimized)]
    return tuple(v.name for v in checked if not is_sequences(program, v.name))


_NAMES: VersionCache[tuple[str, ...]] = VersionCache(_names)


def _is_checked(variable: Variable, *, keeps: bool) -> bool:
    is_array = variable.type == VarType.LOD_TENSOR and not variable.lod_level
    return is_array and variable.dtype in _FLOATS and (keeps or variable.persistable)


def check_finite(program: Program, names: Iterable[str], values: Sequence[Any]) -> None:
    """Raises NonFiniteError if a result of a run has NaN or Inf.

    `values` are in order of computation: an array each, or a list of the devices' arrays.
    """
    for name, value in zip(names, values, strict=True):
        for part in value if isinstance(value, list) else [value]:
            array = np.asarray(part)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise _found(program, name, array)


def _found(program: Program, name: str, array: np.ndarray) -> NonFiniteError:
    makers = [op for op in program.global_block().ops if name in op.output_arg_names]
    op = makers[-1] if makers else None
    maker = f"operator '{op.type}'" if op is not None else "the run"
    nans, infs = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    what = f"{_FLAG}: {maker} made {nans} NaN and {infs} Inf of {array.size} in '{name}'"
    hint = "it is the first in the program's order; the state has been written all the same"
    return NonFiniteError(what, op=op, hint=hint)
