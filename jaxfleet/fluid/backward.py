"""Gradients of a loss for its parameters, or of any variables for any others."""

from collections.abc import Collection, Sequence
from typing import Any

from jaxfleet.errors import AssertedError, WrongTypeError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.differentiation import Callback, Walk, ops_between
from jaxfleet.fluid.framework.operator import ROLE, ROLE_VAR, OpRole
from jaxfleet.fluid.framework.variable import Pairs, Parameter, Variable
from jaxfleet.fluid.lowering.memory import keep_checkpoints

_MANY = (list, tuple, set, frozenset)


def append_backward(
    loss: Variable,
    parameter_list: Sequence[Parameter | str] | None = None,
    no_grad_set: Collection[str | Variable] | None = None,
    callbacks: Sequence[Callback] | None = None,
    checkpoints: Sequence[Variable | str] | None = None,
) -> Pairs:
    """Adds the operators that compute the gradients of a loss.

    Args:
        loss: `[1]`.
        parameter_list: the parameters to differentiate; all trainable ones unless given.
        no_grad_set: variables at which gradients end, in addition to those with `stop_gradient`.
        callbacks: called after each added operator, with its block and a map from the names of
            gradients to those of their variables.
        checkpoints: values to keep; backward recomputes the rest of forward.

    Returns:
        Each parameter on which the loss depends, with its gradient.

    Raises:
        TypeError: an argument is of another type.
        ProgramError: the loss is of another shape, or no operator computes it.

    Examples:
        >>> from jaxfleet import fluid
        >>> with fluid.program_guard(fluid.Program(), fluid.Program()):
        ...     y = fluid.layers.fc(fluid.data("x", [None, 4]), 1, bias_attr=False, param_attr="w")
        ...     pairs = fluid.append_backward(fluid.layers.mean(y))
        >>> [(param.name, grad.name) for param, grad in pairs]
        [('w', 'w@GRAD')]
    """
    check_type(loss, "the loss", Variable)
    if loss.shape != (1,):
        what = f"the loss '{loss.name}' has shape {list(loss.shape)}, and must have [1]"
        raise mistake(what, "average it: layers.mean", AssertedError)
    check_type(checkpoints, "checkpoints", (list, tuple, type(None)))
    check_type(callbacks, "callbacks", (list, tuple, type(None)))
    block, program = loss.block, loss.block.program
    if checkpoints:
        keep_checkpoints(program, checkpoints)
    wanted, ended = _wanted(block, parameter_list), _names(no_grad_set, "no_grad_set")
    last = _made_by(loss)
    ops = ops_between(block.ops[: last + 1], [loss], [], ended)
    block.ops[last].attrs[ROLE] |= OpRole.LOSS
    program._appending_grad_times += 1
    walk = Walk(block, ops, ended, callbacks or ())

    def begin(target: Variable, name: str) -> str:
        with program.role(OpRole.BACKWARD | OpRole.LOSS):
            return _ones(target, name)

    with program._backward_role_guard():
        walk.run([loss], begin)
    found = [(p, g) for p in wanted if (g := walk.gradient_of(p.name)) is not None]
    _say_whose(block, found)
    return found


def gradients(
    targets: Variable | Sequence[Variable],
    inputs: Variable | Sequence[Variable],
    target_gradients: Variable | Sequence[Variable | None] | None = None,
    no_grad_set: Collection[str | Variable] | None = None,
) -> list[Variable | None]:
    """Adds the operators that compute the summed gradients of targets for some inputs.

    Args:
        targets: one or many.
        inputs: one or many; a variable with `stop_gradient` has no gradient.
        target_gradients: the gradients of the targets; ones unless given.
        no_grad_set: variables at which gradients end, in addition to those with `stop_gradient`.

    Returns:
        The gradient of each input; None for one on which no target depends.

    Raises:
        TypeError: an argument is of another type.
        ValueError: targets and their gradients differ in number or shape, or are in several blocks.
    """
    many, wanted = _variables(targets, "targets"), _variables(inputs, "inputs")
    given = _given(many, target_gradients)
    block = many[0].block
    for other in (*many[1:], *wanted):
        if other.block.program is not block.program:
            raise mistake(f"'{other.name}' is of another program than '{many[0].name}'")
    ended = _names(no_grad_set, "no_grad_set")
    ops = ops_between(block.ops, many, wanted, ended)
    block.program._appending_grad_times += 1
    walk = Walk(block, ops, ended)

    def begin(target: Variable, name: str) -> str:
        known = given[target.name]
        return _ones(target, name) if known is None else known.name

    with block.program._backward_role_guard():
        walk.run(many, begin)
    return [walk.gradient_of(x.name) for x in wanted]


def _ones(target: Variable, name: str) -> str:
    """Adds a gradient of ones for a target."""
    made = target.block.create_var(name=name, dtype=target.dtype)
    made.sizes = target.sizes
    attrs: dict[str, Any] = {"value": 1.0, "dtype": target.dtype}
    if -1 in target.shape:
        target.block.append_op("fill_any_like", {"X": target}, {"Out": made}, attrs)
    else:
        attrs["shape"] = list(target.shape)
        target.block.append_op("fill_constant", outputs={"Out": made}, attrs=attrs)
    return name


def _made_by(loss: Variable) -> int:
    for at in range(len(loss.block.ops) - 1, -1, -1):
        if loss.name in loss.block.ops[at].output_arg_names:
            return at
    raise mistake(f"no operator makes the loss '{loss.name}'", "is it of this program?")


def _say_whose(block: Block, pairs: Sequence[tuple[Parameter, Variable]]) -> None:
    """Records parameters on the operators that complete their gradients."""
    finishes = {name: op for op in block.ops for name in op.output_arg_names}
    for parameter, grad in pairs:
        op = finishes[grad.name]
        op._set_attr(ROLE_VAR, [parameter.name, grad.name, *(op.attr(ROLE_VAR) or [])])


def _wanted(block: Block, given: Sequence[Parameter | str] | None) -> list[Parameter]:
    """Returns the given parameters in order, by default all trainable ones."""
    if given is None:
        return [p for p in block.program.all_parameters() if p.trainable]
    known = {p.name: p for p in block.program.all_parameters()}
    names = _ordered_names(given, "parameter_list")
    for name in names:
        if name not in known:
            raise mistake(f"'{name}' is no parameter of the program")
    return [known[name] for name in names]


def _names(given: Any, what: str) -> frozenset[str]:
    return frozenset() if given is None else frozenset(_ordered_names(given, what))


def _ordered_names(given: Any, what: str) -> list[str]:
    check_type(given, what, _MANY)
    for x in given:
        check_type(x, f"a member of {what}", (Variable, str))
    return [x if isinstance(x, str) else x.name for x in given]


def _variables(given: Any, what: str) -> list[Variable]:
    many = list(given) if isinstance(given, list | tuple) else [given]
    for x in many:
        check_type(x, what, Variable, "a Variable or a list of them")
    if not many:
        raise mistake(f"{what} are none", kind=WrongTypeError)
    return many


def _given(targets: Sequence[Variable], gradients: Any) -> dict[str, Variable | None]:
    """Returns the given gradients by the names of their targets."""
    if gradients is None:
        return dict.fromkeys(x.name for x in targets)
    many = list(gradients) if isinstance(gradients, list | tuple) else [gradients]
    if len(many) != len(targets):
        raise mistake(f"{len(targets)} targets are given {len(many)} gradients", "one for each")
    for target, grad in zip(targets, many, strict=True):
        check_type(grad, "a target's gradient", (Variable, type(None)))
        if grad is not None and grad.shape != target.shape:
            what = f"'{target.name}' has shape {target.shape}, and its gradient '{grad.name}'"
            raise mistake(f"{what} has {grad.shape}")
    return {target.name: grad for target, grad in zip(targets, many, strict=True)}
