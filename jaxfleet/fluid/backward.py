"""Gradients: for every operator that the loss depends on, its gradient operator.

Follows fluid: gradients are named `x@GRAD`; where several operators give parts of one, each part
has a name of its own, and a `sum` adds them once all are there.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.dtypes import VarType
from jaxfleet.fluid.operator import ROLE, ROLE_VAR, Operator
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Parameter, Variable
from jaxfleet.ops.fluid import EMPTY, GRAD, Gradient, Slot, schema_of


def grad_name(name: str) -> str:
    """Returns the name of a variable's gradient."""
    return name + GRAD


def append_backward(
    loss: Variable,
    parameter_list: Sequence[Parameter | str] | None = None,
    no_grad_set: set[str | Variable] | None = None,
    callbacks: object = None,
    checkpoints: object = None,
) -> list[tuple[Parameter, Variable]]:
    """Adds the operators that compute the gradients of a loss.

    Args:
        loss: `[1]`.
        parameter_list: whose gradients are wanted; those of all trainable parameters unless given.
        no_grad_set: variables at which gradients end, besides those that say so themselves.
        callbacks: taken and not called.
        checkpoints: taken; XLA chooses itself what to keep.

    Returns:
        Each parameter that the loss depends on, with its gradient.

    Raises:
        ProgramError: the loss is of another shape, or no operator makes it.
    """
    del callbacks, checkpoints
    if loss.shape != (1,):
        raise ProgramError(
            f"the loss '{loss.name}' has shape {list(loss.shape)}, and must have [1]"
        )
    block = loss.block
    ended = {x if isinstance(x, str) else x.name for x in no_grad_set or ()}
    at = _producer(block, loss)
    block.ops[at].attrs[ROLE] |= OpRole.LOSS
    backward = _Backward(block, ended, block.ops[: at + 1])
    with block.program.role(OpRole.BACKWARD):
        backward.run(loss)
    return backward.found(_wanted(block, parameter_list))


def _producer(block: Block, loss: Variable) -> int:
    for at in range(len(block.ops) - 1, -1, -1):
        if loss.name in block.ops[at].output_arg_names:
            return at
    raise ProgramError(f"no operator makes the loss '{loss.name}'", hint="is it of this program?")


def _wanted(block: Block, given: Sequence[Parameter | str] | None) -> list[Parameter]:
    program = block.program
    if given is None:
        return [p for p in program.all_parameters() if p.trainable]
    names = {x if isinstance(x, str) else x.name for x in given}
    found = [p for p in program.all_parameters() if p.name in names]
    missing = names - {p.name for p in found}
    if missing:
        raise ProgramError(f"'{min(missing)}' is no parameter of the program")
    return found


@dataclass
class _Backward:
    """One walk from the loss back.

    Attributes:
        block: whose operators are differentiated.
        ended: names at which gradients end.
        ops: the operators up to the loss, in order.
        parts: names of what was given to a gradient so far, by variable.
        expected: how many operators give parts of a variable's gradient.
    """

    block: Block
    ended: set[str]
    ops: list[Operator]
    parts: dict[str, list[str]] = field(default_factory=dict)
    expected: Counter[str] = field(default_factory=Counter)
    makers: dict[str, Operator] = field(default_factory=dict)

    def run(self, loss: Variable) -> None:
        """Adds all gradient operators."""
        chosen = self._on_the_way(loss)
        for op in chosen:
            self.expected.update(name for _, _, name in self._given_back(op))
        self._begin(loss)
        for op in chosen:
            self._differentiate(op)

    def found(self, parameters: Sequence[Parameter]) -> list[tuple[Parameter, Variable]]:
        """Returns parameters with their gradients, and tells the makers whose they are."""
        pairs = []
        for parameter in parameters:
            name = grad_name(parameter.name)
            if name in self.makers:
                maker = self.makers[name]
                maker.attrs[ROLE_VAR] = [*maker.attrs.get(ROLE_VAR, ()), parameter.name, name]
                pairs.append((parameter, self.block.var(name)))
        return pairs

    def _on_the_way(self, loss: Variable) -> list[Operator]:
        """Returns the operators that gradients go through, from the loss back."""
        reached, chosen = {loss.name}, []
        for op in reversed(self.ops):
            if self._gradient(op) is None or reached.isdisjoint(op.output_arg_names):
                continue
            names = [name for _, _, name in self._given_back(op)]
            if names:
                reached.update(names)
                chosen.append(op)
        return chosen

    def _gradient(self, op: Operator) -> Gradient | None:
        schema = schema_of(op.type)
        return None if schema is None else schema.gradient

    def _given_back(self, op: Operator) -> Iterator[tuple[str, int, str]]:
        """Yields the inputs that get gradients: slot, place in it, name."""
        gradient = self._gradient(op)
        for slot in () if gradient is None else gradient.writes:
            for at, name in enumerate(op.input(slot)):
                if not self._ends_at(name):
                    yield slot, at, name

    def _ends_at(self, name: str) -> bool:
        variable = self.block._var_recursive(name)
        is_number = variable.dtype.startswith(("float", "bfloat"))
        frozen = isinstance(variable, Parameter) and not variable.trainable
        return name in self.ended or variable.stop_gradient or frozen or not is_number

    def _begin(self, loss: Variable) -> None:
        name = grad_name(loss.name)
        self._declare(name, loss)
        with self.block.program.role(OpRole.BACKWARD | OpRole.LOSS):
            attrs = {"shape": [1], "value": 1.0, "dtype": loss.dtype}
            self.block.append_op("fill_constant", outputs={"Out": name}, attrs=attrs)

    def _differentiate(self, op: Operator) -> None:
        gradient, schema = self._gradient(op), schema_of(op.type)
        assert gradient is not None
        assert schema is not None
        inputs = {slot: op.input(slot) or op.output(slot) for slot in gradient.reads}
        for slot in schema.outputs:
            inputs[grad_name(slot.name)] = self._of_outputs(op, slot)
        written: dict[str, list[str]] = {}
        for place, at, name in self._given_back(op):
            names = written.setdefault(grad_name(place), [EMPTY] * len(op.input(place)))
            names[at] = self._part(name, is_sparse=bool(op.attr("is_sparse")))
        attrs = {k: v for k, v in op.attrs.items() if k in schema.attrs}
        made = self.block.append_op(gradient.type, inputs, written, attrs)
        made.source = op.source
        for _, _, name in self._given_back(op):
            self._add_up(name, made)

    def _of_outputs(self, op: Operator, slot: Slot) -> list[str]:
        names = [grad_name(name) for name in op.output(slot.name)]
        known = [name for name in names if name in self.block.vars]
        if len(known) < len(names) and known:
            self._zeros(op, slot)
            return names
        return known

    def _zeros(self, op: Operator, slot: Slot) -> None:
        """Makes the gradients of outputs that nothing depends on, beside those that have one."""
        for name in op.output(slot.name):
            if grad_name(name) not in self.block.vars:
                self._declare(grad_name(name), self.block._var_recursive(name))
                outputs = {"Out": grad_name(name)}
                self.block.append_op("fill_zeros_like", {"X": name}, outputs)

    def _part(self, name: str, *, is_sparse: bool) -> str:
        """Returns what the next part of a gradient is called."""
        parts = self.parts.setdefault(name, [])
        whole = grad_name(name)
        several = self.expected[name] > 1
        number = len(parts)
        part = f"{whole}@RENAME@block{self.block.idx}@{number}" if several else whole
        parts.append(part)
        self._declare(part, self.block._var_recursive(name))
        if is_sparse:
            self.block.var(part).type = VarType.SELECTED_ROWS
        return part

    def _add_up(self, name: str, made: Operator) -> None:
        """Adds the parts of a gradient once the last is there."""
        whole, parts = grad_name(name), self.parts[name]
        if len(parts) == self.expected[name] > 1 and whole not in self.block.vars:
            self._declare(whole, self.block._var_recursive(name))
            made = self.block.append_op("sum", {"X": parts}, {"Out": whole})
            self.block.var(whole).type = self.block.var(parts[0]).type
        self.makers[whole] = made

    def _declare(self, name: str, like: Variable) -> None:
        made = self.block.create_var(name=name, dtype=like.dtype)
        made.sizes = like.sizes
