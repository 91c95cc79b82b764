"""The verifier: one readable rule per function, run between passes.

The structural rules are here. Rules that need the meaning of operators (shapes, replication) live
in `jaxfleet.analysis` and are passed in.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxfleet.errors import VerifyError
from jaxfleet.ir.program import Block, Operator, Program
from jaxfleet.ir.variable import Kind, Variable, dtype_of, type_text

_PROGRAM = -1  # represents the program's own variables among block indices


class Scopes:
    """The declarations in a program whose blocks are numbered correctly.

    Visibility takes constant time per query: `Program.lookup` walks up the blocks, and the optimize
    blocks of a parameter server form a chain with one block per parameter.
    """

    def __init__(self, program: Program) -> None:
        self._first, self._last = _spans(program)
        self._repeated: dict[str, list[int]] = {}  # names declared several times, with blocks
        self.constants: set[str] = set()  # names, wherever they are declared
        once: dict[str, int] = {}
        scopes = [(block.index, block.variables) for block in program.blocks]
        for index, scope in [(_PROGRAM, program.variables), *scopes]:
            for name, variable in scope.items():
                if variable.kind is Kind.CONST:
                    self.constants.add(name)
                if name in once:
                    self._repeated.setdefault(name, [once[name]]).append(index)
                else:
                    once[name] = index
        self._once = once

    def is_inside(self, inner: int, outer: int) -> bool:
        """Whether a block is another, or lies in it."""
        return self._first[outer] <= self._first[inner] <= self._last[outer]

    def unseen_from(self, index: int) -> Callable[[Sequence[str]], list[str]]:
        """Returns the function that selects the names that a block cannot see."""
        at_once = {_PROGRAM, index}
        declared = self._once.get

        def unseen(names: Sequence[str]) -> list[str]:
            return [
                name for name in names if declared(name) not in at_once and self._hides(name, index)
            ]

        return unseen

    def hiding(self) -> Iterator[tuple[str, int, int]]:
        """Yields (name, inner block, outer block or -1 for the program) of hidden variables."""
        for name, places in self._repeated.items():
            around: list[int] = []
            for place in sorted(places, key=lambda place: self._first[place]):
                while around and not self.is_inside(place, around[-1]):
                    around.pop()
                if around:
                    yield name, place, around[-1]
                around.append(place)

    def _hides(self, name: str, index: int) -> bool:
        if name not in self._once:
            return True
        places = self._repeated.get(name, [self._once[name]])
        return not any(self.is_inside(index, place) for place in places)


def _spans(program: Program) -> tuple[dict[int, int], dict[int, int]]:
    """Numbers blocks so that the blocks inside one follow it: its number, and that of the last."""
    size = [1] * len(program.blocks)  # of the block and all blocks inside it
    for block in reversed(program.blocks[1:]):
        size[block.parent] += size[block.index]
    first, last = {_PROGRAM: -1}, {_PROGRAM: len(program.blocks)}
    free = {_PROGRAM: 0}  # the next free number within a block
    for block in program.blocks:
        number = free[block.parent]
        free[block.parent] += size[block.index]
        first[block.index], last[block.index] = number, number + size[block.index] - 1
        free[block.index] = number + 1
    return first, last


Finding: TypeAlias = tuple[str, Operator | None]  # the problem, and its operator
Rule: TypeAlias = Callable[[Program], Iterator[Finding]]

_OUTLIVES_A_BLOCK = frozenset({Kind.DATA, Kind.PARAM, Kind.STATE})


def verify(program: Program, *, more_rules: Iterable[Rule] = ()) -> None:
    """Checks a program against the structural rules, then against further rules, in linear time.

    Raises:
        VerifyError: the first rule that is broken, with the operator.
    """
    for rule in (*STRUCTURAL_RULES, *more_rules):
        for what, op in rule(program):
            raise VerifyError(f"program '{program.name}': {what}", op=op)


def there_is_a_root(program: Program) -> Iterator[Finding]:
    """A program has block 0."""
    if not program.blocks:
        yield "it has no blocks", None


def blocks_are_numbered_by_place(program: Program) -> Iterator[Finding]:
    """A block's index is its place, and its parent comes before it."""
    for place, block in enumerate(program.blocks):
        if block.index != place:
            yield f"block {block.index} stands at place {place}", None
        if (block.parent != -1) if place == 0 else not 0 <= block.parent < place:
            yield f"block {place} has parent {block.parent}", None


def names_match_their_keys(program: Program) -> Iterator[Finding]:
    """A variable is stored under its own name."""
    for name, variable in _variables(program):
        if name != variable.name:
            yield f"variable '{variable.name}' is kept under '{name}'", None


def everything_has_a_name(program: Program) -> Iterator[Finding]:
    """Every variable and every operator type has a non-empty name."""
    for name, variable in _variables(program):
        if not name:
            yield f"a variable of type {variable.type} has no name", None
    for op in _operators(program):
        if not op.type:
            yield "an operator has no type", op


def sizes_are_not_negative(program: Program) -> Iterator[Finding]:
    """A size is a number of at least 0, or depends on a letter."""
    for _, variable in _variables(program):
        for size in variable.shape:
            if isinstance(size, int) and size < 0:
                what = f"'{variable.name}' has type {variable.type}: {size} is not a size"
                yield f"{what}; give what is known only at run time a letter", None


def constants_have_values(program: Program) -> Iterator[Finding]:
    """Exactly the consts have a value."""
    for name, variable in _variables(program):
        if variable.kind is Kind.CONST and variable.constant is None:
            yield f"const '{name}' has no value", None
        elif variable.kind is not Kind.CONST and variable.constant is not None:
            yield f"{variable.kind.value} '{name}' has a constant's value", None


def constants_have_their_types(program: Program) -> Iterator[Finding]:
    """The value of a const, if present, has the declared type."""
    for name, variable in _variables(program):
        value = variable.constant.value if variable.constant is not None else None
        if value is not None:
            found = type_text(dtype_of(value), tuple(value.shape))
            if found != variable.type:
                yield f"const '{name}' is declared {variable.type}, its value is {found}", None


def what_outlives_a_block_is_the_programs(program: Program) -> Iterator[Finding]:
    """Data, parameters and state are declared by the program, not in a block."""
    for block in program.blocks:
        for name, variable in block.variables.items():
            if variable.kind in _OUTLIVES_A_BLOCK:
                what = f"{variable.kind.value} '{name}' is declared in block {block.index}"
                yield f"{what}, and belongs to the program", None


def names_mean_one_variable(program: Program) -> Iterator[Finding]:
    """No variable hides one of the same name in an outer block or in the program."""
    scopes = Scopes(program)
    for name, inner, outer in scopes.hiding():
        where = "the program's" if outer < 0 else f"that of block {outer}"
        yield f"'{name}' of block {inner} hides {where}", None


def sub_blocks_exist(program: Program) -> Iterator[Finding]:
    """A block reference names a block other than the root."""
    for op in _operators(program):
        for index in op.blocks:
            if not 0 < index < len(program.blocks):
                yield f"^{index} names no sub-block", op


def sub_blocks_stand_inside(program: Program) -> Iterator[Finding]:
    """An operator's sub-block lies in the operator's own block, so no block runs itself."""
    scopes = Scopes(program)
    for block in program.blocks:
        for op in block.ops:
            for index in op.blocks:
                if index == block.index or not scopes.is_inside(index, block.index):
                    yield f"^{index} does not lie in block {block.index}, which runs it", op


def sub_blocks_have_one_owner(program: Program) -> Iterator[Finding]:
    """A sub-block is run by one operator only, so that a rewrite of it changes nothing else."""
    owners: dict[int, Operator] = {}
    for op in _operators(program):
        for index in op.blocks:
            if owners.setdefault(index, op) is not op:
                yield f"^{index} is run by two operators, the other is: {owners[index]}", op


def arguments_are_distinct_temporaries(program: Program) -> Iterator[Finding]:
    """An argument of a block is a temporary that the block declares, and it is named once."""
    for block in program.blocks:
        for name in block.args:
            variable = block.variables.get(name)
            if variable is None:
                yield f"argument '{name}' of block {block.index} is not declared there", None
            elif variable.kind is not Kind.TEMP:
                kind = variable.kind.value
                yield f"argument '{name}' of block {block.index} is a {kind}, not a temp", None
        if len(set(block.args)) != len(block.args):
            yield f"block {block.index} has an argument twice: {', '.join(block.args)}", None


def operands_are_declared(program: Program) -> Iterator[Finding]:
    """Every variable named by an operator or a block's results is visible there."""
    scopes = Scopes(program)
    for block in program.blocks:
        unseen = scopes.unseen_from(block.index)
        for op in block.ops:
            for name in (*unseen(op.reads), *unseen(op.writes)):
                yield f"'{name}' is not declared in block {block.index} or around it", op
        for name in unseen(_result_names(block)):
            yield f"'{name}', a result of block {block.index}, is not declared", None


def slots_are_named_once(program: Program) -> Iterator[Finding]:
    """An operator names each slot of its inputs, and of its outputs, once."""
    for op in _operators(program):
        for what, operands in (("input", op.inputs), ("output", op.outputs)):
            slots = [slot for slot, _ in operands.slots]
            if len(slots) > 1 and (slot := _first_repeated(slots)) is not None:
                yield f"{what} slot '{slot}' is given twice", op


def outputs_are_variables(program: Program) -> Iterator[Finding]:
    """An operator writes variables, not literals."""
    for op in _operators(program):
        if len(op.writes) != len(op.outputs):
            yield "a literal is written", op


def outputs_are_distinct(program: Program) -> Iterator[Finding]:
    """An operator writes no variable twice."""
    for op in _operators(program):
        if len(op.writes) > 1 and len(set(op.writes)) != len(op.writes):
            yield f"'{_first_repeated(op.writes)}' is written twice by one operator", op


def constants_are_not_written(program: Program) -> Iterator[Finding]:
    """No operator writes a const."""
    scopes = Scopes(program)
    if not scopes.constants:
        return
    for block in program.blocks:
        for op in block.ops:
            for name in op.writes:
                if name in scopes.constants and program.lookup(name, block).kind is Kind.CONST:
                    yield f"const '{name}' is written", op


def temporaries_are_written_before_read(program: Program) -> Iterator[Finding]:
    """In the root and in function blocks, a block's own temporary is written before it is read."""
    uses = _uses_with_sub_blocks(program)
    for block in program.blocks:
        if block.index and not (block.args or block.results):
            continue  # a loop body may read what its previous iteration wrote
        unwritten = {name for name, var in block.variables.items() if var.kind is Kind.TEMP}
        unwritten.difference_update(block.args)
        for op in block.ops:
            early = [name for name in op.reads if name in unwritten]
            unwritten.difference_update(op.writes)
            for index in op.blocks:
                unwritten -= uses[index].writes
            for index in op.blocks:
                early += sorted(unwritten & uses[index].reads)
            for name in early:
                yield f"'{name}' is read before anything writes it", op
        for name in _result_names(block):
            if name in unwritten:
                yield f"'{name}', a result of block {block.index}, is never written", None


def role_vars_are_declared(program: Program) -> Iterator[Finding]:
    """The parameter of a (parameter, gradient) pair is visible from its operator."""
    scopes = Scopes(program)
    for block in program.blocks:
        unseen = scopes.unseen_from(block.index)
        for op in block.ops:
            for param, _ in op.role_var:
                if unseen((param,)):
                    yield f"'{param}', which the operator is for, is not declared", op


# A rule may rely on earlier ones.
STRUCTURAL_RULES: tuple[Rule, ...] = (
    there_is_a_root,
    blocks_are_numbered_by_place,
    names_match_their_keys,
    everything_has_a_name,
    sizes_are_not_negative,
    constants_have_values,
    constants_have_their_types,
    what_outlives_a_block_is_the_programs,
    names_mean_one_variable,
    sub_blocks_exist,
    sub_blocks_stand_inside,
    sub_blocks_have_one_owner,
    arguments_are_distinct_temporaries,
    operands_are_declared,
    slots_are_named_once,
    outputs_are_variables,
    outputs_are_distinct,
    constants_are_not_written,
    temporaries_are_written_before_read,
    role_vars_are_declared,
)


def _variables(program: Program) -> Iterator[tuple[str, Variable]]:
    yield from program.variables.items()
    for block in program.blocks:
        yield from block.variables.items()


def _operators(program: Program) -> Iterator[Operator]:
    for block in program.blocks:
        yield from block.ops


def _result_names(block: Block) -> tuple[str, ...]:
    return tuple(item for item in block.results if isinstance(item, str))


def _first_repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


@dataclass
class _Uses:
    """The reads and writes of a block, those of its operators' sub-blocks included."""

    reads: set[str]
    writes: set[str]


def _uses_with_sub_blocks(program: Program) -> list[_Uses]:
    uses = [_Uses(set(), set()) for _ in program.blocks]
    for block in reversed(program.blocks[1:]):  # a sub-block comes after the block that runs it
        use = uses[block.index]
        use.reads.update(_result_names(block))
        for op in block.ops:
            use.reads.update(op.reads)
            use.writes.update(op.writes)
            for index in op.blocks:
                use.reads |= uses[index].reads
                use.writes |= uses[index].writes
    return uses
