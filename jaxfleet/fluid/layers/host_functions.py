"""Layers that run on the host: `py_func`, a function of the script's, and `Print`."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.variable import Variable
from jaxfleet.ops.fluid.host_functions import new_number, register_function

_PHASES = ("forward", "backward", "both")


def py_func(
    func: Callable[..., Any],
    x: Variable | Sequence[Variable],
    out: Variable | Sequence[Variable] | None,
    backward_func: Callable[..., Any] | None = None,
    skip_vars_in_backward_input: Variable | Sequence[Variable] | None = None,
) -> Any:
    """Calls a function of the script's when the program runs; returns `out`.

    Args:
        func: takes numpy arrays, one for each of `x`; returns one for each of `out`. It has no
            effect but on what it returns, as it may run more often than the program.
        x: what it takes.
        out: what it makes, declared with shape and dtype; None for a function that returns
            nothing, and is called for what else it does.
        backward_func: takes the arrays of `x` and `out`, then the gradients of `out`; returns those
            of `x`. Without it gradients end here.
        skip_vars_in_backward_input: variables of `x` and `out` that `backward_func` does not take.

    Raises:
        WrongTypeError: an argument is of another type.
        ProgramError: a shape is not known, or a variable that is skipped is not there.
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
        "backward_callable_id": -1 if backward_func is None else register_function(backward_func),
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
        input: it.
        first_n: how often it is printed; -1 for every time.
        message: printed beside it.
        summarize: how many elements are printed; -1 for all.
        print_tensor_name: print its name.
        print_tensor_type: print its dtype.
        print_tensor_shape: print its shape.
        print_tensor_lod: print a line for sequences.
        print_phase: `forward`, `backward` (its gradient) or `both`.

    Raises:
        WrongTypeError: the input is not a variable.
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
