"""Lets operators of one block write variables that are dead instead of others."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.memory.reused import instead_of
from jaxfleet.analysis.uses import OuterUses, Uses
from jaxfleet.ir import Block, Kind, Operator, Variable
from jaxfleet.ir.names import INSTEAD_OF
from jaxfleet.ir.types import RAW
from jaxfleet.passes._pool import Log, Pool


@dataclass(frozen=True)
class Rules:
    """What may be reused.

    Attributes:
        level: 0 for equal shapes, 1 for what is large enough.
        skip: names that neither take a dead variable's memory nor give theirs.
        kept: names that give theirs to nothing: they are read when the block is over.
        exact: names that only take what has their own shape, whatever the level.
    """

    level: int
    skip: AbstractSet[str]
    kept: AbstractSet[str]
    exact: AbstractSet[str]


@dataclass
class Reuse:
    """One block, from its first operator to its last.

    Attributes:
        block: it.
        uses: what its operators use, sub-blocks included.
        rules: what may be reused.
        say: takes what is to be logged.
        count: of variables that took another's memory, in this block and those before.
        names: the variable that each name stands for now, where it is another.
        renamed: for operators with sub-blocks, what names stand for in these.
    """

    block: Block
    uses: OuterUses
    rules: Rules
    say: Log
    count: int = 0
    names: dict[str, str] = field(default_factory=dict)
    renamed: dict[int, dict[str, str]] = field(default_factory=dict)

    def run(self) -> Block:
        """Returns the block with operators that write dead variables."""
        used = [_used(op, self.uses) for op in self.block.ops]
        mentions = _Mentions(used)
        defined = {name for op in self.block.ops for name in op.writes}
        pool, ops = Pool(self.say), list[Operator]()
        for place, op in enumerate(self.block.ops):
            self._take(op, used[place], pool)
            ops.append(self._written(op))
            for index in op.blocks:
                self.renamed[index] = dict(self.names)
            self._give(place, used[place].reads & defined, mentions, pool)
        return self.block.with_ops(ops)

    def _take(self, op: Operator, used: Uses, pool: Pool) -> None:
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

    def _give(self, place: int, read: AbstractSet[str], mentions: "_Mentions", pool: Pool) -> None:
        """Puts what is dead after an operator into the pool, in the order of names."""
        dead = {self.names.get(name, name): name for name in read if mentions.is_dead(name, place)}
        for now in sorted(dead):
            name = dead[now]
            if self._may(name, now) and name not in self.rules.kept:
                again = mentions.are_more(name, place)
                pool.add(self.block.variables[now], closed=again)

    def _may(self, name: str, now: str) -> bool:
        """Tells whether a value is this block's own, and one of an array's."""
        variable = self.block.variables.get(now)
        if variable is None or {name, now} & self.rules.skip or now in self.block.args:
            return False
        return is_array(variable)

    def _written(self, op: Operator) -> Operator:
        names, before = self.names, instead_of(op)
        pairs = tuple((w, _now(names, g)) for w, g in op.role_var)
        attrs = op.attrs
        if self.block.index == 0:
            means = {_now(names, x): before.get(x, x) for x in op.writes}
            shared = tuple((now, x) for now, x in means.items() if now != x)
            attrs = attrs.updated(**{INSTEAD_OF: shared}) if shared else attrs.without(INSTEAD_OF)
            attrs = op.attrs if attrs == op.attrs else attrs
        inputs, outputs = op.inputs.renamed(names), op.outputs.renamed(names)
        return replace(op, inputs=inputs, outputs=outputs, role_var=pairs, attrs=attrs)


def is_array(variable: Variable) -> bool:
    """Tells whether a variable is a temporary that holds an array with axes."""
    return variable.kind is Kind.TEMP and variable.dtype != RAW and bool(variable.shape)


def _now(names: Mapping[str, str], name: str) -> str:
    return names.get(name, name)


def _used(op: Operator, uses: OuterUses) -> Uses:
    """Returns what an operator uses; what only its sub-block writes may stay as it was."""
    inside = {name for index in op.blocks for name in uses.of_block(index).writes}
    return Uses({*uses.of(op).reads, *inside}, {*op.writes, *inside})


class _Mentions:
    """Where names are used: (place, whether it is read there), in order."""

    def __init__(self, used: Iterable[Uses]) -> None:
        self._of: dict[str, list[tuple[int, bool]]] = {}
        for place, uses in enumerate(used):
            for name in {*uses.reads, *uses.writes}:
                self._of.setdefault(name, []).append((place, name in uses.reads))

    def is_dead(self, name: str, place: int) -> bool:
        """Tells whether nothing reads after an operator what a name then holds."""
        after = self._after(name, place)
        return after is None or not after[1]

    def are_more(self, name: str, place: int) -> bool:
        """Tells whether an operator behind one names a name."""
        return self._after(name, place) is not None

    def _after(self, name: str, place: int) -> tuple[int, bool] | None:
        mentions = self._of[name]
        at = bisect_right(mentions, (place, True))
        return mentions[at] if at < len(mentions) else None
