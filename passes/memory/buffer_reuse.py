"""Reuse of dead variables within one block: the pool of them, and the rewrite of operators."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.flow import OuterUses, Uses
from jaxfleet.analysis.memory.final_variables import instead_of
from jaxfleet.ir import Block, Dim, Kind, Operator, Size, Variable
from jaxfleet.ir.naming import INSTEAD_OF
from jaxfleet.ir.variable import RAW

Log = Callable[[str], None]


@dataclass
class VariablePool:
    """Dead variables of a block: first those with a batch axis, then by size, then by age.

    Those in `closed` are written again later, so they are not reused.
    """

    say: Log
    closed: set[str] = field(default_factory=set)
    _held: list[Variable] = field(default_factory=list)

    def add(self, variable: Variable, *, closed: bool = False) -> None:
        places = (at for at, held in enumerate(self._held) if _order(held) > _order(variable))
        self._held.insert(next(places, len(self._held)), variable)
        if closed:
            self.closed.add(variable.name)

    def discard(self, name: str) -> None:
        self._held = [held for held in self._held if held.name != name]
        self.closed.discard(name)

    def take(self, wanted: Variable, level: int, number: int) -> Variable | None:
        """Removes and returns the first variable that another's value may be written to.

        Level 0 requires an equal shape, level 1 a sufficient size. `number` is logged.
        """
        for at, held in enumerate(self._held):
            if held.name == wanted.name:
                self.say(f"x :  {wanted.name}  cache :  {held.name}  is same var!")
                return None
            if held.name in self.closed:
                continue
            if held.dtype != wanted.dtype:
                self.say("x_dtype and cache_dtype are different")
            elif fits(wanted.shape, held.shape, level):
                x, cache = (f"{v.name}{_shown(v.shape)}" for v in (wanted, held))
                where = f"cache idx {at}, pool size {len(self._held)}"
                self.say(f"!!! {number},  {x} => {cache}, {where}")
                return self._held.pop(at)
        return None


def fits(wanted: tuple[Size, ...], held: tuple[Size, ...], level: int) -> bool:
    """Whether a value of one shape may be written over a value of another."""
    if level == 0 or wanted == held:
        return wanted == held
    return _unknown(wanted) == _unknown(held) and _numel(wanted) <= _numel(held)


def _unknown(shape: tuple[Size, ...]) -> tuple[bool, list[str]]:
    """Returns whether the first size is dynamic, and the names of all dynamic sizes."""
    unknown = sorted(str(size) for size in shape if isinstance(size, Dim))
    return isinstance(shape[0], Dim), unknown


def _numel(shape: tuple[Size, ...]) -> int:
    return math.prod(size for size in shape if isinstance(size, int))


def _order(variable: Variable) -> tuple[bool, int]:
    return not isinstance(variable.shape[0], Dim), _numel(variable.shape)


def _shown(shape: tuple[Size, ...]) -> list[int]:
    """Returns a shape as in fluid: -1 for a dynamic size."""
    return [size if isinstance(size, int) else -1 for size in shape]


@dataclass(frozen=True)
class ReuseRules:
    """Limits of reuse."""

    level: int  # 0 for equal shapes, 1 for sufficient sizes
    skip: AbstractSet[str]  # names that neither reuse a dead variable's memory nor offer theirs
    kept: AbstractSet[str]  # names that do not offer theirs: they are read after the block
    exact: AbstractSet[str]  # names that only reuse their own shape, whatever the level


@dataclass
class BufferReuse:
    """Rewrites one block, from its first operator to its last."""

    block: Block
    uses: OuterUses  # the variables that its operators use, sub-blocks included
    rules: ReuseRules
    say: Log  # called with log messages
    count: int = 0  # of reuses, in this block and those before
    # the current replacement of each replaced name
    names: dict[str, str] = field(default_factory=dict)
    # for operators with sub-blocks, the replacements in these
    renamed: dict[int, dict[str, str]] = field(default_factory=dict)

    def run(self) -> Block:
        used = [_used(op, self.uses) for op in self.block.ops]
        mentions = _Mentions(used)
        defined = {name for op in self.block.ops for name in op.writes}
        pool, ops = VariablePool(self.say), list[Operator]()
        for place, op in enumerate(self.block.ops):
            self._take(op, used[place], pool)
            ops.append(self._written(op))
            for index in op.blocks:
                self.renamed[index] = dict(self.names)
            self._give(place, used[place].reads & defined, mentions, pool)
        return self.block.with_ops(ops)

    def _take(self, op: Operator, used: Uses, pool: VariablePool) -> None:
        read = {self.names.get(name, name) for name in used.reads}
        for name in op.writes:
            now = self.names.get(name, name)
            if now in read or not self._may(name, now):
                continue
            exact = name in self.rules.exact
            found = pool.take(
                self.block.variables[now], 0 if exact else self.rules.level, self.count
            )
            pool.discard(now)  # it holds a value again
            if found is not None:
                self.names[name] = found.name
                self.count += 1

    def _give(
        self, place: int, read: AbstractSet[str], mentions: "_Mentions", pool: VariablePool
    ) -> None:
        """Adds the variables that are dead after an operator to the pool, in the order of names."""
        dead = {self.names.get(name, name): name for name in read if mentions.is_dead(name, place)}
        for now in sorted(dead):
            name = dead[now]
            if self._may(name, now) and name not in self.rules.kept:
                again = mentions.are_more(name, place)
                pool.add(self.block.variables[now], closed=again)

    def _may(self, name: str, now: str) -> bool:
        """Whether a value belongs to this block, and is an array."""
        variable = self.block.variables.get(now)
        if variable is None or {name, now} & self.rules.skip or now in self.block.args:
            return False
        return is_array(variable)

    def _written(self, op: Operator) -> Operator:
        names, before = self.names, instead_of(op)
        pairs = tuple((w, names.get(g, g)) for w, g in op.role_var)
        attrs = op.attrs
        if self.block.index == 0:
            means = {names.get(x, x): before.get(x, x) for x in op.writes}
            shared = tuple((now, x) for now, x in means.items() if now != x)
            attrs = attrs.updated(**{INSTEAD_OF: shared}) if shared else attrs.without(INSTEAD_OF)
            attrs = op.attrs if attrs == op.attrs else attrs
        inputs, outputs = op.inputs.renamed(names), op.outputs.renamed(names)
        return replace(op, inputs=inputs, outputs=outputs, role_var=pairs, attrs=attrs)


def is_array(variable: Variable) -> bool:
    """Whether a variable is a temporary that holds an array with axes."""
    return variable.kind is Kind.TEMP and variable.dtype != RAW and bool(variable.shape)


def _used(op: Operator, uses: OuterUses) -> Uses:
    """Returns the variables that an operator uses; a sub-block may leave its outputs unwritten."""
    inside = {name for index in op.blocks for name in uses.of_block(index).writes}
    return Uses({*uses.of(op).reads, *inside}, {*op.writes, *inside})


class _Mentions:
    """The uses of each name in order: (index, whether it is read there)."""

    def __init__(self, used: Iterable[Uses]) -> None:
        self._of: dict[str, list[tuple[int, bool]]] = {}
        for place, uses in enumerate(used):
            for name in {*uses.reads, *uses.writes}:
                self._of.setdefault(name, []).append((place, name in uses.reads))

    def is_dead(self, name: str, place: int) -> bool:
        """Whether the current value of a name is not read after an operator."""
        after = self._after(name, place)
        return after is None or not after[1]

    def are_more(self, name: str, place: int) -> bool:
        return self._after(name, place) is not None

    def _after(self, name: str, place: int) -> tuple[int, bool] | None:
        mentions = self._of[name]
        at = bisect_right(mentions, (place, True))
        return mentions[at] if at < len(mentions) else None
