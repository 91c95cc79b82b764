"""Loops: `While` and `while_loop`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.control_flow import captured_names, flattened
from jaxfleet.fluid.layers.tensor import assign
from jaxfleet.fluid.layers.tensor_arrays import room_in_loop


class While:
    """Runs a block while a condition is true.

    ::

        i = layers.fill_constant([1], "int64", 0)
        n = layers.fill_constant([1], "int64", 10)
        go_on = layers.less_than(i, n)
        loop = layers.While(go_on)
        with loop.block():
            layers.assign(layers.fc(x, 8, param_attr="w"), x)
            layers.increment(i)
            layers.less_than(i, n, cond=go_on)

    It is differentiable. If a constant limits the iterations, as here, the values of each one are
    kept for backward; otherwise those of at most 64 are, and the others are recomputed.

    Args:
        cond: bool[1], which the block recomputes.
        is_test: no effect; values are kept only if the program has a backward.
        name: of the layer.

    Raises:
        WrongTypeError: the condition is not a boolean variable of one element.
    """

    def __init__(self, cond: Variable, is_test: bool = False, name: str | None = None) -> None:
        check_type(cond, "the condition of a While", Variable)
        if cond.dtype != "bool" or cond.sizes not in {(), (1,)}:
            what = f"the condition of a While is bool[1], and '{cond.name}' is {cond}"
            raise mistake(what, "such as less_than(i, n)", WrongTypeError)
        del is_test
        self.cond_var = cond
        self.helper = LayerHelper("while", name)

    @contextmanager
    def block(self) -> Iterator[None]:
        """Opens the block, which must recompute the condition."""
        program = self.helper.main_program
        inner = program._create_block()
        with open_loop(program, inner):
            try:
                yield
            finally:
                program._rollback()
        read, written = captured_names(inner)
        if self.cond_var.name not in written:
            what = f"the block of a While never writes its condition '{self.cond_var.name}'"
            raise mistake(what, f"end it with less_than(..., cond={self.cond_var.name})")
        loop = program.current_block().append_op(
            "while",
            {"X": read, "Condition": self.cond_var},
            {"Out": written},
            {"sub_block": inner},
        )
        if not program._open_loops:
            room_in_loop(loop)


@contextmanager
def open_loop(program: Program, inner: Block) -> Iterator[None]:
    """Marks a block as an open loop while it is built."""
    program._open_loops.append(inner.idx)
    try:
        yield
    finally:
        program._open_loops.pop()


def while_loop(
    cond: Callable[..., Variable],
    body: Callable[..., Any],
    loop_vars: Sequence[Any],
    is_test: bool = False,
    name: str | None = None,
) -> Sequence[Any]:
    """Calls `body` while `cond` is true, and returns the loop variables.

    Args:
        cond: maps the loop variables to bool[1].
        body: maps the loop variables to their next values: as many, of the same shapes.
        loop_vars: variables, or lists and dicts of them; they are overwritten.
        is_test: no effect, see `While`.
        name: of the layer.

    Raises:
        ProgramError: the result of the body does not match the loop variables.
    """
    for function, what in ((cond, "cond"), (body, "body")):
        if not callable(function):
            raise mistake(f"while_loop: '{what}' is not a function", kind=WrongTypeError)
    check_type(loop_vars, "'loop_vars' of while_loop", (list, tuple))
    if not loop_vars:
        raise mistake("while_loop: 'loop_vars' is empty", "give it at least one variable")
    go_on = cond(*loop_vars)
    loop = While(go_on, is_test, name)
    with loop.block():
        made = body(*loop_vars)
        made = list(made) if isinstance(made, list | tuple) else [made]
        new, old = flattened("while_loop", made), flattened("while_loop", list(loop_vars))
        if new.form != old.form:
            raise mistake("while_loop: 'body' returns other variables than 'loop_vars'")
        again = cond(*made)
        _assign_all(new.leaves, old.leaves)
        assign(again, go_on)
    return loop_vars


def _assign_all(new: Sequence[Variable], old: Sequence[Variable]) -> None:
    """Assigns variables simultaneously: two may swap."""
    pairs = [(x, to) for x, to in zip(new, old, strict=True) if x is not to]
    arrays = [to.name for _, to in pairs if to.type == VarType.LOD_TENSOR_ARRAY]
    if arrays:
        raise mistake(f"while_loop: 'body' returns another array than '{arrays[0]}'")
    kept = [(assign(x) if any(x is one for one in old) else x, to) for x, to in pairs]
    for x, to in kept:
        if x.sizes != to.sizes:
            what = f"'{to.name}' is {list(to.sizes or ())}, and becomes {list(x.sizes or ())}"
            raise mistake(f"while_loop: {what}", "a variable of a loop keeps its shape")
        assign(x, to)
