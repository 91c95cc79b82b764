"""Which values of a program depend on which, through sub-blocks too.

A value is what an operator writes, or what a block is given: names may be written again, values
are not. A loop's value depends on itself: what a turn hands on, the next one is given.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxfleet.ir import Block, BlockRef, Operator, Program


class Value(NamedTuple):
    """One value: of an operator, its output by number; or, with place -1, a block's argument."""

    block: int
    place: int
    output: int


@dataclass
class Flow:
    """The values of a program.

    Attributes:
        readers: the values that are computed from a value.
        sources: the values that a value is computed from.
        final: what each name of block 0 holds at the end; inputs are left out.
    """

    program: Program
    readers: dict[Value, list[Value]] = field(default_factory=dict)
    sources: dict[Value, list[Value]] = field(default_factory=dict)
    final: dict[str, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, *, inputs: Iterable[str] = ()) -> "Flow":
        """Follows the values of a program.

        Args:
            program: any program.
            inputs: variables of the program that count as values too, as arguments of block 0.
        """
        flow = cls(program)
        env = {name: Value(0, -1, number) for number, name in enumerate(inputs)}
        flow.final = flow._block(program.root, env)
        return flow

    def op(self, value: Value) -> Operator | None:
        """Returns the operator that makes a value, or None for an argument."""
        ops = self.program.blocks[value.block].ops
        return ops[value.place] if value.place >= 0 else None

    def reached(self, starts: Iterable[Value], through: Callable[[Value], bool]) -> set[Value]:
        """Returns the values computed from some, themselves left out unless in a circle.

        Args:
            starts: where to begin.
            through: tells whether to go to a value, and on from it.
        """
        found: set[Value] = set()
        waiting = list(starts)
        while waiting:
            for value in self.readers.get(waiting.pop(), ()):
                if value not in found and through(value):
                    found.add(value)
                    waiting.append(value)
        return found

    def reaching(self, ends: Iterable[Value], through: Callable[[Value], bool]) -> set[Value]:
        """Returns the values that some are computed from, by a way that `reached` would go.

        Args:
            ends: where to end.
            through: tells whether to go to a value, and on from it.
        """
        found: set[Value] = set()
        waiting = [value for value in ends if through(value)]
        while waiting:
            for value in self.sources.get(waiting.pop(), ()):
                if value not in found:
                    found.add(value)
                    if through(value):
                        waiting.append(value)
        return found

    def _block(self, block: Block, env: dict[str, Value]) -> dict[str, Value]:
        for place, op in enumerate(block.ops):
            read = [env.get(x) if isinstance(x, str) else None for x in op.inputs]
            outputs = [Value(block.index, place, count) for count in range(len(op.writes))]
            if op.blocks and self._is_function(op):
                self._function(op, read, outputs)
            else:
                self._connect_all(read, outputs)
            env.update(zip(op.writes, outputs, strict=True))
        return env

    def _is_function(self, op: Operator) -> bool:
        return op.type in {"jax.scan", "jax.while", "jax.cond", "jax.remat2"}

    def _function(self, op: Operator, read: list[Value | None], outputs: list[Value]) -> None:
        for name, sub, places in _bodies(op, self.program):
            args = [Value(sub.index, -1, place) for place in range(len(sub.args))]
            for arg, place in zip(args, places, strict=True):
                self._connect_all([read[place]], [arg])
            env = self._block(sub, dict(zip(sub.args, args, strict=True)))
            results = [env.get(x) if isinstance(x, str) else None for x in sub.results]
            if name == "cond" and op.type == "jax.while":
                continue  # it decides how long the loop runs, and no value is computed from it
            for result, output in zip(results, outputs, strict=True):
                self._connect_all([result], [output])
            for result, arg in zip(results, _carried(op, args), strict=False):
                self._connect_all([result], [arg])

    def _connect_all(self, reads: Iterable[Value | None], values: list[Value]) -> None:
        for read in reads:
            if read is not None:
                self.readers.setdefault(read, []).extend(values)
                for value in values:
                    self.sources.setdefault(value, []).append(read)


def _bodies(op: Operator, program: Program) -> Iterator[tuple[str, Block, list[int]]]:
    """Yields the sub-blocks of an operator, and which operand each argument is."""
    attrs, count = op.attrs, len(op.inputs)
    if op.type == "jax.while":
        tests, used = int(str(attrs["cond_nconsts"])), int(str(attrs["body_nconsts"]))
        carry = range(tests + used, count)
        yield "cond", _at(program, attrs["cond"]), [*range(tests), *carry]
        yield "body", _at(program, attrs["body"]), [*range(tests, tests + used), *carry]
    elif op.type == "jax.cond":
        for index in op.blocks:
            yield "branch", program.blocks[index], list(range(1, count))
    else:
        yield "body", _at(program, attrs["body"]), list(range(count))


def _at(program: Program, ref: object) -> Block:
    assert isinstance(ref, BlockRef)
    return program.blocks[ref.index]


def _carried(op: Operator, args: list[Value]) -> list[Value]:
    """Returns the arguments that a loop's next turn is given the results for."""
    if op.type == "jax.scan":
        first = int(str(op.attrs["num_consts"]))
        return args[first : first + int(str(op.attrs["num_carry"]))]
    return args[int(str(op.attrs["body_nconsts"])) :] if op.type == "jax.while" else []
