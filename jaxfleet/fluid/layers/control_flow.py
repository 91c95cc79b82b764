"""Conditional execution: `Switch`, `cond`, `case`, `switch_case`, and counters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeAlias

import jax

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.program import default_main_program
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import variables
from jaxfleet.fluid.layers.math_ops import equal, logical_and, logical_not
from jaxfleet.fluid.layers.rank_tables import array_to_lod_tensor as array_to_lod_tensor
from jaxfleet.fluid.layers.rank_tables import lod_rank_table as lod_rank_table
from jaxfleet.fluid.layers.rank_tables import lod_tensor_to_array as lod_tensor_to_array
from jaxfleet.fluid.layers.rank_tables import max_sequence_len as max_sequence_len
from jaxfleet.fluid.layers.rank_tables import shrink_memory as shrink_memory
from jaxfleet.fluid.layers.tensor import assign, cast, fill_constant


def captured_names(inner: Block) -> tuple[list[str], list[str]]:
    """Names that a block reads and writes in enclosing blocks.

    A written variable that already has a value counts as read: the value remains if the block does
    not run, and enters the first iteration of a loop.
    """
    read, written = {}, {}
    for op in inner.ops:
        read.update(dict.fromkeys(n for n in op.input_arg_names if not inner.has_var(n)))
        written.update(dict.fromkeys(n for n in op.output_arg_names if not inner.has_var(n)))
    begun = [n for n in written if n not in read and has_value(inner, n)]
    kept = [n for n in read if n not in written or has_value(inner, n)]
    return [*kept, *begun], list(written)


def has_value(inner: Block, name: str) -> bool:
    """Whether a variable of an enclosing block has a value when the block begins."""
    declared = inner._find_var_recursive(name)
    if declared is None or declared.is_data or declared.persistable:
        return True
    return any(name in op.output_arg_names for block in _around(inner) for op in block.ops)


def _around(block: Block) -> Iterator[Block]:
    while block.parent_idx >= 0:
        block = block.program.block(block.parent_idx)
        yield block


@dataclass(frozen=True)
class Flattened:
    """Variables in order, and the nested structure that they came in."""

    leaves: list[Variable]
    form: Any

    def filled(self, leaves: list[Variable]) -> Any:
        """Rebuilds the structure with other variables."""
        return jax.tree_util.tree_unflatten(self.form, leaves)


def flattened(layer: str, given: Any) -> Flattened:
    """Flattens variables in nested lists, tuples and dicts."""
    leaves, form = jax.tree_util.tree_flatten(given)
    for one in leaves:
        check_type(one, f"what {layer} works on", Variable)
    return Flattened(leaves, form)


class Switch:
    """Runs the first of several blocks whose condition holds.

    ::

        with Switch() as switch:
            with switch.case(step < 10.0):
                assign(slow, rate)
            with switch.default():
                assign(fast, rate)

    `name` has no effect, since no variable is named for it.
    """

    def __init__(self, name: str | None = None) -> None:
        del name
        self._inside = False
        self._none_so_far: Variable | None = None  # whether all conditions before were false

    def __enter__(self) -> Self:
        self._inside = True
        return self

    def __exit__(self, *_: object) -> None:
        self._inside = False

    @contextmanager
    def case(self, condition: Variable) -> Iterator[None]:
        """Opens a block that runs if its condition is the first true one."""
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
        """Opens a block that runs if no condition is true."""
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
    """Opens a block that runs if a condition is true."""
    program = default_main_program()
    inner = program._create_block()
    try:
        yield
    finally:
        program._rollback()
    read, written = captured_names(inner)
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
    """Counts the runs of the program, from `begin`: `[1]`."""
    name = counter_name if counter_name is not None else "@STEP_COUNTER@"
    block = default_main_program().global_block()
    is_new = not block.has_var(name)
    helper = LayerHelper.named(name)
    counter = helper.global_variable(name, [1], "int64", float(begin - step))
    if is_new:
        attrs = {"step": float(step)}
        block._prepend_op("increment", inputs={"X": counter}, outputs={"Out": counter}, attrs=attrs)
    return counter


Branch: TypeAlias = Callable[[], Any]


def cond(
    pred: Variable,
    true_fn: Branch | None = None,
    false_fn: Branch | None = None,
    name: str | None = None,
) -> Any:
    """Runs one of two functions and returns its result.

    Each builds the block that runs if `pred`, bool[1], is true or false; both return as many
    variables, of the same shapes.

    Raises:
        ProgramError: the results of the functions differ in structure or shape.
    """
    check_type(pred, "'pred' of cond", Variable)
    for function, what in ((true_fn, "true_fn"), (false_fn, "false_fn")):
        if function is not None and not callable(function):
            raise mistake(f"cond: '{what}' is not a function", kind=WrongTypeError)
    helper = LayerHelper("cond", name)
    if_true = _branch(helper, pred, true_fn)
    if_false = _branch(helper, logical_not(pred), false_fn)
    if if_true.form != if_false.form:
        what = f"'true_fn' returns {if_true.form}, and 'false_fn' {if_false.form}"
        raise mistake(f"cond: {what}", "return as many variables from both")
    if not if_true.leaves:
        return None
    number = cast(pred, "int32")
    pairs = zip(if_false.leaves, if_true.leaves, strict=True)
    return if_true.filled([_selected(helper, number, *pair) for pair in pairs])


def _branch(helper: LayerHelper, condition: Variable, function: Branch | None) -> Flattened:
    """Builds a function in a block of its own; returns its results, visible outside the block."""
    if function is None:
        return flattened("cond", None)
    outer = helper.block
    with conditional_block(condition):
        made = flattened("cond", function())
        copies = []
        for one in made.leaves:
            copy = outer.create_var(name=outer.program.unique_name(helper.name), dtype=one.dtype)
            copy.sizes, copy.lod_level = one.sizes, one.lod_level
            copies.append(assign(one, copy))
    return Flattened(copies, made.form)


def _selected(
    helper: LayerHelper, number: Variable, if_false: Variable, if_true: Variable
) -> Variable:
    if if_false.sizes != if_true.sizes or if_false.dtype != if_true.dtype:
        shapes = f"'true_fn' returns {if_true}, and 'false_fn' {if_false}"
        raise mistake(f"cond: {shapes}", "both return the same shapes and dtypes")
    made = helper.output(if_true.dtype)
    made.sizes, made.lod_level = if_true.sizes, if_true.lod_level
    helper.append_op("select_input", {"X": [if_false, if_true], "Mask": number}, {"Out": made})
    return made


def case(
    pred_fn_pairs: Sequence[tuple[Variable, Branch]],
    default: Branch | None = None,
    name: str | None = None,
) -> Any:
    """Runs the function of the first true condition, and returns its result.

    Conditions are bool[1]. `default` runs if none is true; the last function unless given.
    """
    check_type(pred_fn_pairs, "'pred_fn_pairs' of case", (list, tuple))
    if not pred_fn_pairs:
        raise mistake("case: 'pred_fn_pairs' is empty", "give it pairs (condition, function)")
    for pair in pred_fn_pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not callable(pair[1]):
            what = f"case: a pair is (condition, function), and this is {pair!r}"
            raise mistake(what, kind=WrongTypeError)
        check_type(pair[0], "a condition of case", Variable)
    pairs, last = list(pred_fn_pairs), default
    if last is None:
        last = pairs.pop()[1]
    elif not callable(last):
        raise mistake("case: 'default' is not a function", kind=WrongTypeError)
    for condition, function in reversed(pairs):
        last = partial(cond, condition, function, last, name)
    return last()


def switch_case(
    branch_index: Variable,
    branch_fns: Sequence[Any] | Mapping[int, Branch],
    default: Branch | None = None,
    name: str | None = None,
) -> Any:
    """Runs the function of a number, i32[1] or i64[1], and returns its result.

    `branch_fns` are functions numbered from 0, (number, function) pairs, or a dict. `default` runs
    for any other number; the function of the largest unless given.

    Raises:
        ProgramError: a number occurs twice.
    """
    check_type(branch_index, "'branch_index' of switch_case", Variable)
    pairs = _numbered(branch_fns)
    if default is not None and not callable(default):
        raise mistake("switch_case: 'default' is not a function", kind=WrongTypeError)
    if default is None:
        default = max(pairs, key=lambda pair: pair[0])[1]
    index = branch_index if branch_index.dtype == "int64" else cast(branch_index, "int64")
    tests = [(equal(index, fill_constant([1], "int64", n)), run) for n, run in pairs]
    return case(tests, default, name)


def _numbered(given: Any) -> list[tuple[int, Branch]]:
    check_type(given, "'branch_fns' of switch_case", (list, tuple, dict))
    pairs = list(given.items()) if isinstance(given, dict) else list(given)
    if pairs and all(callable(one) for one in pairs):
        pairs = list(enumerate(pairs))
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], int) or not callable(pair[1]):
            what = f"switch_case: a branch is a function or (number, function), not {pair!r}"
            raise mistake(what, kind=WrongTypeError)
    if len({number for number, _ in pairs}) < len(pairs) or not pairs:
        raise mistake("switch_case: 'branch_fns' is empty, or has a number twice")
    return pairs
