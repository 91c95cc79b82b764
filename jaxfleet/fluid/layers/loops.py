"""Layers that run a block several times: `While` and `while_loop`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.crossing import crossing
from jaxfleet.fluid.dtypes import VarType
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.tensor_arrays import room_in_loop
from jaxfleet.fluid.layers.tensors import assign
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.structures import flattened
from jaxfleet.fluid.variable import Variable


class While:
    """Runs a block for as long as a condition holds.

    ::

        i = layers.fill_constant([1], "int64", 0)
        n = layers.fill_constant([1], "int64", 10)
        go_on = layers.less_than(i, n)
        loop = layers.While(go_on)
        with loop.block():
            layers.assign(layers.fc(x, 8, param_attr="w"), x)
            layers.increment(i)
            layers.less_than(i, n, cond=go_on)

    Backward goes through it. Where a constant limits the turns, as here, the values of each are
    kept for it; else those of at most 64 are, and the others are computed again.

    Args:
        cond: bool[1], which the block computes anew.
        is_test: taken; what backward needs is kept only where there is a backward.
        name: of the layer.

    Raises:
        WrongTypeError: the condition is not a variable of one truth value.
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
        """Adds the operators of a `with` to the block.

        Raises:
            ProgramError: the block never computes the condition anew.
        """
        program = self.helper.main_program
        inner = program._create_block()
        with open_loop(program, inner):
            try:
                yield
            finally:
                program._rollback()
        read, written = crossing(inner)
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
    """Notes that a block of a loop is being built."""
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
    """Calls `body` for as long as `cond` holds, and returns the variables of the loop.

    Args:
        cond: takes the variables of the loop, returns bool[1].
        body: takes them, returns what they become: as many, of the same shapes.
        loop_vars: variables, or lists and dicts of them; they are overwritten.
        is_test: taken, see `While`.
        name: of the layer.

    Raises:
        WrongTypeError: an argument is of another type.
        ProgramError: the body returns something else than the loop has.
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
    """Assigns variables to others, all at once: two may change places."""
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
