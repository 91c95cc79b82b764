"""Data flow: uses and effects of operators, dependencies between values, the forward operators.

A value is an output of an operator or an argument of a block: names may be written again, values
are not. A value carried by a loop depends on itself, since each iteration receives the results of
the previous one.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Block, BlockRef, Operator, OpTraits, Program, Role, ir_traits


@dataclass(frozen=True)
class Uses:
    """Names of variables that an operator, or a block, reads and writes."""

    reads: AbstractSet[str]
    writes: AbstractSet[str]


class OuterUses:
    """Variables read and written by each operator, sub-blocks included.

    A sub-block comes after the block that uses it, so one backward walk takes time linear in the
    program.
    """

    def __init__(self, program: Program) -> None:
        self._of_block: dict[int, Uses] = {}
        for block in reversed(program.blocks):
            reads, writes = {x for x in block.results if isinstance(x, str)}, set[str]()
            for op in block.ops:
                uses = self.of(op)
                reads.update(uses.reads)
                writes.update(uses.writes)
            own = block.variables.keys()
            self._of_block[block.index] = Uses(reads - own, writes - own)

    def of_block(self, index: int) -> Uses:
        return self._of_block[index]

    def of(self, op: Operator) -> Uses:
        inner = [self._of_block[index] for index in op.blocks]
        if not inner:
            return Uses(frozenset(op.reads), frozenset(op.writes))
        return Uses(
            set(op.reads).union(*(uses.reads for uses in inner)),
            set(op.writes).union(*(uses.writes for uses in inner)),
        )


def inner_blocks(program: Program, ops: Iterable[Operator]) -> Iterator[Block]:
    """Yields the blocks that operators run, at any depth."""
    waiting = [index for op in ops for index in op.blocks]
    while waiting:
        block = program.blocks[waiting.pop()]
        yield block
        waiting += [index for op in block.ops for index in op.blocks]


class Effects:
    """Operator types with effects besides their outputs.

    An unregistered type is assumed to have one, unless it is a primitive of jax.
    """

    def __init__(self) -> None:
        self._known: dict[str, OpTraits] = {}

    def has_effect(self, op: Operator) -> bool:
        """Whether the operator has an effect other than a collective."""
        return self._traits(op.type).has_effect

    def is_collective(self, op: Operator) -> bool:
        """Whether all devices must run the operator together."""
        return self._traits(op.type).is_collective

    def runs_once(self, op: Operator) -> bool:
        """Whether the operator has an effect or is a collective: no pass may drop or repeat it."""
        traits = self._traits(op.type)
        return traits.has_effect or traits.is_collective

    def _traits(self, op_type: str) -> OpTraits:
        if op_type not in self._known:
            self._known[op_type] = ir_traits(op_type) or _registered_traits(op_type)
        return self._known[op_type]


def _registered_traits(op_type: str) -> OpTraits:
    from jaxfleet.ops import find_op  # noqa: PLC0415  # imports JAX, which the IR's own do not need

    try:
        return find_op(op_type).traits
    except ProgramError:
        return OpTraits(has_effect=True)


_BACKWARD = frozenset({Role.BACKWARD, Role.BACKWARD_LOSS, Role.OPTIMIZE, Role.OPTIMIZE_LR_SCHED})
_EXCHANGE = frozenset({Role.RPC, Role.DIST})
_FUNCTIONS = frozenset({"jax.scan", "jax.while", "jax.cond", "jax.remat2"})


def forward_places(program: Program) -> AbstractSet[int]:
    """Returns the places of the forward operators of a training step, and of those they need.

    Schedules are included. An operator marked forward that reads results of the backward pass or of
    the optimizer (a metric of gradients, or of new parameters) is not.
    """
    uses = OuterUses(program)
    late, ops = _late(program, uses), program.root.ops
    found, needed = set[int](), set[str]()
    for place in sorted(set(range(len(ops))) - late, reverse=True):
        op, used = ops[place], uses.of(ops[place])
        if (op.role.is_forward and op.type != "fetch") or not needed.isdisjoint(used.writes):
            found.add(place)
            needed -= set(op.writes)
            needed |= used.reads
    return found


def _late(program: Program, uses: OuterUses) -> AbstractSet[int]:
    """Returns the places of operators that make gradients or depend on them."""
    found, made = set[int](), set[str]()
    for place, op in enumerate(program.root.ops):
        used = uses.of(op)
        waits = op.role in _BACKWARD or (op.role in _EXCHANGE and bool(found))
        if waits or not made.isdisjoint(used.reads):
            found.add(place)
            made |= used.writes
        else:
            made -= set(op.writes)
    return found


class FlowValue(NamedTuple):
    """One value: output `number` of an operator or, with place -1, an argument of a block."""

    block: int
    place: int
    output: int


@dataclass
class Flow:
    """The values of a program."""

    program: Program
    # the values computed from a value
    readers: dict[FlowValue, list[FlowValue]] = field(default_factory=dict)
    # the values that a value depends on
    sources: dict[FlowValue, list[FlowValue]] = field(default_factory=dict)
    # the value of each name of block 0 at the end, inputs excluded
    final: dict[str, FlowValue] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, *, inputs: Iterable[str] = ()) -> "Flow":
        """Follows the values of a program, with `inputs` as arguments of block 0."""
        flow = cls(program)
        env = {name: FlowValue(0, -1, number) for number, name in enumerate(inputs)}
        flow.final = flow._block(program.root, env)
        return flow

    def op(self, value: FlowValue) -> Operator | None:
        """Returns the operator that makes a value, or None for an argument."""
        ops = self.program.blocks[value.block].ops
        return ops[value.place] if value.place >= 0 else None

    def reached(
        self, starts: Iterable[FlowValue], through: Callable[[FlowValue], bool]
    ) -> set[FlowValue]:
        """Returns the values computed from `starts`, these themselves only if in a cycle.

        `through` decides whether to visit a value and continue from it.
        """
        found: set[FlowValue] = set()
        waiting = list(starts)
        while waiting:
            for value in self.readers.get(waiting.pop(), ()):
                if value not in found and through(value):
                    found.add(value)
                    waiting.append(value)
        return found

    def reaching(
        self, ends: Iterable[FlowValue], through: Callable[[FlowValue], bool]
    ) -> set[FlowValue]:
        """Returns the values that `ends` are computed from, along the paths of `reached`."""
        found: set[FlowValue] = set()
        waiting = [value for value in ends if through(value)]
        while waiting:
            for value in self.sources.get(waiting.pop(), ()):
                if value not in found:
                    found.add(value)
                    if through(value):
                        waiting.append(value)
        return found

    def _block(self, block: Block, env: dict[str, FlowValue]) -> dict[str, FlowValue]:
        for place, op in enumerate(block.ops):
            read = [env.get(x) if isinstance(x, str) else None for x in op.inputs]
            outputs = [FlowValue(block.index, place, count) for count in range(len(op.writes))]
            if op.blocks and op.type in _FUNCTIONS:
                self._function(op, read, outputs)
            else:
                self._connect_all(read, outputs)
            env.update(zip(op.writes, outputs, strict=True))
        return env

    def _function(
        self, op: Operator, read: list[FlowValue | None], outputs: list[FlowValue]
    ) -> None:
        for name, sub, places in _bodies(op, self.program):
            args = [FlowValue(sub.index, -1, place) for place in range(len(sub.args))]
            for arg, place in zip(args, places, strict=True):
                self._connect_all([read[place]], [arg])
            env = self._block(sub, dict(zip(sub.args, args, strict=True)))
            results = [env.get(x) if isinstance(x, str) else None for x in sub.results]
            if name == "cond" and op.type == "jax.while":
                continue  # it decides how long the loop runs; no value is computed from it
            for result, output in zip(results, outputs, strict=True):
                self._connect_all([result], [output])
            for result, arg in zip(results, _carried(op, args), strict=False):
                self._connect_all([result], [arg])

    def _connect_all(self, reads: Iterable[FlowValue | None], values: list[FlowValue]) -> None:
        for read in reads:
            if read is not None:
                self.readers.setdefault(read, []).extend(values)
                for value in values:
                    self.sources.setdefault(value, []).append(read)


def _bodies(op: Operator, program: Program) -> Iterator[tuple[str, Block, list[int]]]:
    """Yields the sub-blocks of an operator, with the operand for each argument."""
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


def _carried(op: Operator, args: list[FlowValue]) -> list[FlowValue]:
    """Returns the arguments that receive the results of the loop's previous iteration."""
    if op.type == "jax.scan":
        first = int(str(op.attrs["num_consts"]))
        return args[first : first + int(str(op.attrs["num_carry"]))]
    return args[int(str(op.attrs["body_nconsts"])) :] if op.type == "jax.while" else []
