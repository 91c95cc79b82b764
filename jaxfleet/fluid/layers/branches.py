"""Layers of which one of several functions runs: `cond`, `case` and `switch_case`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.comparisons import equal, logical_not
from jaxfleet.fluid.layers.control_flow import conditional_block
from jaxfleet.fluid.layers.tensors import assign, cast, fill_constant
from jaxfleet.fluid.structures import Flattened, flattened
from jaxfleet.fluid.variable import Variable

Branch: TypeAlias = Callable[[], Any]


def cond(
    pred: Variable,
    true_fn: Branch | None = None,
    false_fn: Branch | None = None,
    name: str | None = None,
) -> Any:
    """Runs one of two functions and returns what it returns.

    Args:
        pred: bool[1].
        true_fn: builds what runs if it holds.
        false_fn: builds what runs if not; it returns as many variables, of the same shapes.
        name: of the layer.

    Raises:
        WrongTypeError: an argument is of another type.
        ProgramError: the functions return different things.
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
    """Builds a function in a block of its own; returns what it made, around the block."""
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
    """Runs the function of the first condition that holds, and returns what it returns.

    Args:
        pred_fn_pairs: conditions, bool[1], with functions.
        default: runs if none holds; the last of the functions unless given.
        name: of the layer.

    Raises:
        WrongTypeError: an argument is of another type.
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
    """Runs the function of a number, and returns what it returns.

    Args:
        branch_index: the number, i32[1] or i64[1].
        branch_fns: functions in order from 0 on, pairs (number, function), or a dict of them.
        default: runs for another number; the function of the largest unless given.
        name: of the layer.

    Raises:
        WrongTypeError: an argument is of another type.
        ProgramError: a number is there twice.
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
