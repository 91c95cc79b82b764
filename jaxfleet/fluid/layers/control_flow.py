"""Layers that decide, when a program runs, which operators do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.crossing import crossing
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.comparisons import logical_and, logical_not
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.program import default_main_program
from jaxfleet.fluid.variable import Variable


class Switch:
    """Runs the first of several blocks whose condition holds.

    ::

        with Switch() as switch:
            with switch.case(step < 10.0):
                assign(slow, rate)
            with switch.default():
                assign(fast, rate)

    Args:
        name: of the layer; taken, as nothing is named for it.
    """

    def __init__(self, name: str | None = None) -> None:
        del name
        self._inside = False
        self._none_so_far: Variable | None = None  # whether no condition before held

    def __enter__(self) -> Self:
        self._inside = True
        return self

    def __exit__(self, *_: object) -> None:
        self._inside = False

    @contextmanager
    def case(self, condition: Variable) -> Iterator[None]:
        """Adds the operators of a `with`, which run if a condition is the first that holds."""
        self._check_inside("case")
        below = logical_not(condition)
        before, self._none_so_far = self._none_so_far, below
        if before is None:
            chosen = condition
        else:
            self._none_so_far = logical_and(before, below)
            chosen = logical_and(before, condition)
        with conditional_block(chosen):
            yield

    @contextmanager
    def default(self) -> Iterator[None]:
        """Adds the operators of a `with`, which run if no condition held."""
        self._check_inside("default")
        if self._none_so_far is None:
            raise mistake("a Switch has a default and no case before it", "switch.case(condition)")
        with conditional_block(self._none_so_far):
            yield

    def _check_inside(self, what: str) -> None:
        if not self._inside:
            raise mistake(f"{what} is called outside its Switch", "with Switch() as switch: ...")


@contextmanager
def conditional_block(condition: Variable) -> Iterator[None]:
    """Adds the operators of a `with` to a block of their own, which runs if a condition holds."""
    program = default_main_program()
    inner = program._create_block()
    try:
        yield
    finally:
        program._rollback()
    read, written = crossing(inner)
    program.current_block().append_op(
        "conditional_block",
        {"Cond": condition, "Input": read},
        {"Out": written},
        {"sub_block": inner, "is_scalar_condition": True},
    )


def increment(x: Variable, value: float = 1.0, in_place: bool = True) -> Variable:
    """Adds a number to an array of one element."""
    (given,) = variables("increment", "x", x)
    out = given if in_place else given.dtype
    (made,) = LayerHelper("increment").add({"X": given}, {"Out": out}, {"step": float(value)})
    return made


def autoincreased_step_counter(
    counter_name: str | None = None, begin: int = 1, step: int = 1
) -> Variable:
    """Counts the runs of the program, from `begin` on: `[1]`."""
    name = counter_name if counter_name is not None else "@STEP_COUNTER@"
    block = default_main_program().global_block()
    is_new = not block.has_var(name)
    helper = LayerHelper.named(name)
    counter = helper.global_variable(name, [1], "int64", float(begin - step))
    if is_new:
        attrs = {"step": float(step)}
        block._prepend_op("increment", inputs={"X": counter}, outputs={"Out": counter}, attrs=attrs)
    return counter
