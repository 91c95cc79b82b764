"""Readers as program data, host callbacks (`py_func`, `Print`), and unsupported RPC layers."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jaxfleet.errors import UnsupportedError, WrongTypeError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.program import default_main_program
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import variables
from jaxfleet.fluid.layers.tensor import declare_data
from jaxfleet.fluid.reader import PyReader
from jaxfleet.ops.fluid.host_functions import new_number, register_function
from jaxfleet.ops.user_frames import line_of_caller


class ListenAndServ:
    """Unsupported: serving a block written by a script. Raises NotImplementedError."""

    def __init__(
        self, endpoint: str, inputs: Any, fan_in: int = 1, optimizer_mode: bool = True
    ) -> NoReturn:
        del endpoint, inputs, fan_in, optimizer_mode
        raise _refused_rpc("ListenAndServ")


def Send(  # noqa: N802  # fluid's name
    endpoints: str, send_vars: Any, dummy_output: Any = None, sync: bool = True
) -> NoReturn:
    """Unsupported: sending to a script's own server. Raises NotImplementedError."""
    del endpoints, send_vars, dummy_output, sync
    raise _refused_rpc("Send")


def Recv(  # noqa: N802  # fluid's name
    endpoints: str, get_vars: Any, dummy_input: Any = None, sync: bool = True
) -> NoReturn:
    """Unsupported: receiving from a script's own server. Raises NotImplementedError."""
    del endpoints, get_vars, dummy_input, sync
    raise _refused_rpc("Recv")


def _refused_rpc(name: str) -> UnsupportedError:
    what = f"layers.io.{name}: servers here serve the updates of a job that all processes know"
    hint = "write the job's programs by DistributeTranspiler"
    return UnsupportedError(what, source=line_of_caller(), hint=hint)


def _pull_box_sparse(input: Any, size: int, dtype: Any = "float32") -> NoReturn:
    """Unsupported: look-up in BoxPS, tables on GPUs of another library; NotImplementedError."""
    del input, size, dtype
    what = "_pull_box_sparse: the tables of BoxPS are in a library of their own"
    hint = "layers.embedding(ids, size, is_sparse=True, is_distributed=True)"
    raise UnsupportedError(what, source=line_of_caller(), hint=hint)


def py_reader(
    capacity: int,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[Any],
    lod_levels: Sequence[int] | None = None,
    name: str | None = None,
    use_double_buffer: bool = True,
) -> PyReader:
    """Declares data that a loader yields by batch, between its `start` and `reset`.

    `capacity` batches are prefetched. In a shape, -1 is an axis known at run time; a level of 1 is
    for sequences of unequal lengths. `name` is the prefix of the variables' names.

    Raises:
        ProgramError: the numbers of shapes and dtypes differ.
    """
    levels = [0] * len(shapes) if lod_levels is None else list(lod_levels)
    if not len(shapes) == len(dtypes) == len(levels):
        what = f"py_reader: {len(shapes)} shapes, {len(dtypes)} dtypes and {len(levels)} lod_levels"
        raise mistake(what, "one of each for every variable")
    key = default_main_program().unique_name(name or "py_reader")
    found = [
        declare_data(f"{key}_data_{at}", list(shape), dtype, level)
        for at, (shape, dtype, level) in enumerate(zip(shapes, dtypes, levels, strict=True))
    ]
    return PyReader(found, capacity, use_double_buffer, iterable=False)


def create_py_reader_by_data(
    capacity: int, feed_list: Sequence[Variable], name: str | None = None,
    use_double_buffer: bool = True,
) -> PyReader:  # fmt: skip
    """The loader of already declared data; see `py_reader`."""
    del name
    return PyReader(feed_list, capacity, use_double_buffer, iterable=False)


def read_file(reader: PyReader) -> Any:
    """The variables of a loader; a single one by itself."""
    check_type(reader, "what read_file reads", PyReader, "what layers.py_reader returned")
    found = reader.variables
    return found[0] if len(found) == 1 else found


def double_buffer(reader: PyReader, place: Any = None, name: str | None = None) -> PyReader:
    """Returns the loader unchanged: JAX transfers a feed during the step before."""
    del place, name
    return reader


_PHASES = ("forward", "backward", "both")


def py_func(
    func: Callable[..., Any],
    x: Variable | Sequence[Variable],
    out: Variable | Sequence[Variable] | None,
    backward_func: Callable[..., Any] | None = None,
    skip_vars_in_backward_input: Variable | Sequence[Variable] | None = None,
) -> Any:
    """Calls a Python function when the program runs; returns `out`.

    Args:
        func: maps numpy arrays, one for each of `x`, to one for each of `out`. If it has results,
            it must have no side effects, as it may run more often than the program.
        x: inputs.
        out: results, declared with shape and dtype; None for a function that returns nothing and is
            called for its side effects.
        backward_func: maps the arrays of `x` and `out` and the gradients of `out` to the gradients
            of `x`. Without it gradients stop here.
        skip_vars_in_backward_input: variables of `x` and `out` that `backward_func` does not take.

    Raises:
        ProgramError: a shape is unknown, or a skipped variable is neither in `x` nor in `out`.
    """
    for function, name in ((func, "func"), (backward_func, "backward_func")):
        if not callable(function) and (name == "func" or function is not None):
            raise mistake(f"py_func: '{name}' is not a function", kind=WrongTypeError)
    read = variables("py_func", "x", x)
    made = [] if out is None else variables("py_func", "out", out)
    skipped = skip_vars_in_backward_input
    skips = [] if skipped is None else variables("py_func", "skip_vars_in_backward_input", skipped)
    names = [v.name for v in (*read, *made)]
    for one in skips:
        if one.name not in names:
            raise mistake(f"py_func: '{one.name}' is to be skipped, and is neither in x nor in out")
    for one in made:
        if one.sizes is None:
            raise mistake(f"py_func: the shape of '{one.name}' is not known", "create_var(shape=)")
    attrs = {
        "forward_callable_id": register_function(func),
        "backward_callable_id": "" if backward_func is None else register_function(backward_func),
        "names": names,
        "skipped": [one.name for one in skips],
        "out_shapes": [list(one.sizes or ()) for one in made],
        "out_dtypes": [one.dtype for one in made],
    }
    LayerHelper("py_func").append_op("py_func", {"X": read}, {"Out": made}, attrs)
    return out


def Print(  # noqa: N802  # fluid's name
    input: Variable,
    first_n: int = -1,
    message: str | None = None,
    summarize: int = 20,
    print_tensor_name: bool = True,
    print_tensor_type: bool = True,
    print_tensor_shape: bool = True,
    print_tensor_lod: bool = True,
    print_phase: str = "both",
) -> Variable:
    """Prints a variable when the program runs, and returns it.

    Args:
        input: the variable.
        first_n: number of times it is printed; -1 for no limit.
        message: printed beside it.
        summarize: number of printed elements; -1 for all.
        print_tensor_name: print its name.
        print_tensor_type: print its dtype.
        print_tensor_shape: print its shape.
        print_tensor_lod: print a line for sequences.
        print_phase: `forward`, `backward` (its gradient) or `both`.

    Raises:
        ProgramError: there is no such phase.
    """
    check_type(input, "'input' of Print", Variable)
    if print_phase.lower() not in _PHASES:
        what = f"Print: there is no print_phase {print_phase!r}"
        raise mistake(what, f"one of {', '.join(_PHASES)}")
    helper = LayerHelper("print")
    attrs = {
        "first_n": first_n,
        "message": message or "",
        "summarize": summarize,
        "print_tensor_name": print_tensor_name,
        "print_tensor_type": print_tensor_type,
        "print_tensor_shape": print_tensor_shape,
        "print_tensor_lod": print_tensor_lod,
        "print_phase": print_phase.upper(),
        "variable": input.name,
        "number": new_number(),
    }
    (made,) = helper.add({"In": input}, {"Out": input.dtype}, attrs)
    made.lod_level = input.lod_level
    return made
