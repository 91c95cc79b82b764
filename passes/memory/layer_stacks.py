"""Stacked arrays of a loop over layers: the values of all iterations, stacked and unstacked."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from jaxfleet.ir import (
    Attrs,
    Literal,
    Operand,
    Operands,
    Operator,
    Program,
    Size,
    Variable,
    Word,
    block_name,
)
from jaxfleet.ir.naming import layers_name, unique


@dataclass(frozen=True)
class Steps:
    """The numbers `start`, `start + step`, ...: one for each iteration."""

    start: int
    step: int

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Steps | None":
        """Returns numbers as steps, if evenly spaced."""
        steps = {after - before for before, after in pairwise(numbers)}
        return cls(numbers[0], steps.pop()) if len(steps) == 1 else None


@dataclass
class LayerStacks:
    """Writes the operators that stack and unstack arrays.

    A temporary of one iteration is unstacked only when an operator outside of loops reads it: a
    value made in one loop and read in another stays stacked between them.

    Attributes:
        program: the program to add operators to.
        declared: the variables that these operators need.
        lies: the array that holds a variable, and its index in it.
        waiting: the temporaries that exist only in such an array.
    """

    program: Program
    declared: dict[str, Variable] = field(default_factory=dict)
    lies: dict[str, tuple[str, int]] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        blocks = self.program.blocks
        self._taken = {*self.program.variables, *(name for b in blocks for name in b.variables)}

    def new(self, name: str, dtype: str, shape: Sequence[Size]) -> str:
        """Returns the name of a new temporary, the given one if it is free."""
        name = self.free(name)
        self.declared[name] = Variable(name, dtype, tuple(shape))
        return name

    def free(self, name: str) -> str:
        name = unique(name, self._taken)
        self._taken.add(name)
        return name

    def type(self, operand: Operand) -> tuple[str, tuple[Size, ...]]:
        if isinstance(operand, Literal):
            return operand.dtype, ()
        known = self.declared.get(operand)
        variable = known if known is not None else self.program.lookup(operand)
        return variable.dtype, variable.shape

    def needed(self, operands: Iterable[Operand]) -> Iterator[Operator]:
        """Yields the operators that unstack waiting temporaries among the operands."""
        for name in dict.fromkeys(x for x in operands if isinstance(x, str)):
            if name in self.waiting:
                self.waiting.remove(name)
                yield from self.taken_out(name, *self.lies[name])

    def taken_out(self, name: str, stack: str, place: int) -> Iterator[Operator]:
        """Yields the operators that write a variable from an element of an array."""
        dtype, shape = self.type(name)
        one = self.new(block_name(stack, place), dtype, (1, *shape))
        limits: tuple[Size, ...] = (place + 1, *shape)
        attrs = Attrs({"start_indices": (place, *(0 for _ in shape)), "limit_indices": limits})
        yield Operator("jax.slice", Operands.of(stack), Operands.of(one), attrs)
        attrs = Attrs({"dimensions": (0,)})
        yield Operator("jax.squeeze", Operands.of(one), Operands.of(name), attrs)

    def put_together(self, operands: Sequence[Operand]) -> tuple[str, Operator]:
        """Returns a new array of stacked operands, and the operator that makes it."""
        (dtype, shape), first = self.type(operands[0]), operands[0]
        name = first if isinstance(first, str) else "number"
        stack = self.new(layers_name(name), dtype, (len(operands), *shape))
        attrs = Attrs({"axis": 0})
        return stack, Operator("jax.stack", Operands.of(*operands), Operands.of(stack), attrs)

    def numbers(self, steps: Steps, count: int, dtype: str) -> tuple[str, list[Operator]]:
        """Returns a new array of `count` numbers, and the operators that make it."""
        at = self.new(layers_name("place"), dtype, (count,))
        attrs = Attrs({"dimension": 0, "dtype": Word(dtype), "shape": (count,)})
        made = [Operator("jax.iota", Operands.of(), Operands.of(at), attrs)]
        start, size = (Literal.of(n, dtype) for n in (steps.start, abs(steps.step)))
        if abs(steps.step) != 1:
            made.append(self._of_two("jax.mul", at, size))
        if steps.step < 0:
            made.append(self._of_two("jax.sub", start, made[-1].writes[0]))
        elif steps.start:
            made.append(self._of_two("jax.add", made[-1].writes[0], start))
        return made[-1].writes[0], made

    def _of_two(self, op_type: str, x: Operand, y: Operand) -> Operator:
        dtype, shape = max(self.type(x), self.type(y), key=lambda type_: len(type_[1]))
        out = self.new(layers_name("place"), dtype, shape)
        return Operator(op_type, Operands.of(x, y), Operands.of(out))

    def steps_in(self, operands: Sequence[Operand]) -> tuple[str, Steps] | None:
        """Returns the array that holds all operands, and their indices, if these are steps."""
        found = [self.lies.get(x) if isinstance(x, str) else None for x in operands]
        lies = [at for at in found if at is not None]
        if len(lies) < len(found) or len({stack for stack, _ in lies}) > 1:
            return None
        steps = Steps.of([place for _, place in lies])
        return (lies[0][0], steps) if steps is not None else None

    def hold(self, stack: str, names: Sequence[str | None], live: Collection[str]) -> None:
        """Records the contents of an array, and the temporaries that may be read later.

        State is unstacked at once, so it is not recorded.
        """
        for place, name in enumerate(names):
            if name and not self.program.lookup(name).kind.persistable:
                self.lies[name] = (stack, place)
                if name in live:
                    self.waiting.add(name)

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.lies.pop(name, None)
            self.waiting.discard(name)
