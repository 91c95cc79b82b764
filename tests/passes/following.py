"""Tracks values from operator to operator, independent of names and storage.

Two programs are traversed side by side: one, and the result of `memory_optimize` and
`release_memory`. Each value gets a number at its definition; a variable is storage, and holds the
number of the last value written to it, or nothing after its release. So equal inputs of every
operator show that no value was read after its storage was reused or released.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from jaxfleet.analysis.memory.final_variables import final_variables
from jaxfleet.errors import FeedError
from jaxfleet.ir import Block, Kind, Operator, Program, Size, evaluate
from jaxfleet.ir.dims import letters

Held = dict[str, object]


@dataclass(frozen=True)
class Followed:
    """Final content of variables in both programs, and counts of reuses and rejections."""

    served: int
    refused: int


def check_rewritten(
    before: Program, after: Program, *, level: int = 0, skip: Collection[str] = ()
) -> Followed:
    """Checks all invariants of a program whose names were shared, or released.

    Args:
        before: the original.
        after: the rewritten program.
        level: of sharing; 0 if names were only released.
        skip: names that were skipped.
    """
    old: Held = {name: ("given", name) for name in before.variables}
    new = dict(old)
    walk = _Walk(before, after, level, {*skip, *before.variables}, dict(new))
    walk.block(0, old, new)
    served = refused = 0
    for name in (*before.variables, *before.root.variables):
        if name not in old:
            continue
        try:
            (where,) = final_variables(after, [name])
        except FeedError:
            assert name not in skip, f"'{name}' is skipped, and cannot be fetched"
            assert before.lookup(name).kind in {Kind.TEMP, Kind.DATA}
            refused += 1
            continue
        found = walk.end.get(where)
        assert found == old[name], f"'{name}' is fetched from '{where}', which holds {found}"
        served += 1
    return Followed(served, refused)


class _Walk:
    """Traverses both programs.

    Attributes:
        end: last content of the rewritten program's variables, including released ones.
    """

    def __init__(
        self, before: Program, after: Program, level: int, fixed: set[str], end: Held
    ) -> None:
        self.before, self.after, self.level, self.fixed = before, after, level, fixed
        self.end = end

    def block(self, index: int, old: Held, new: Held) -> None:
        block = self.before.blocks[index]
        assert self.after.blocks[index].args == block.args
        for place, (was, op) in enumerate(self._pairs(index, new)):
            here = f"block {index}, operator {place}: {op}"
            assert (was.type, was.blocks, was.role) == (op.type, op.blocks, op.role), here
            for o, n in zip(was.reads, op.reads, strict=True):
                assert n in new, f"'{n}' is read, and holds nothing: {here}"
                assert new[n] == old[o], f"'{n}' is read for '{o}', and holds {new[n]}: {here}"
                self._check_names(o, n, here)
            for inner in op.blocks:
                self._inside(inner, was, op, old, new)
            for count, (o, n) in enumerate(zip(was.writes, op.writes, strict=True)):
                self._check_names(o, n, here)
                self._check_room(block, o, n, here)
                old[o] = new[n] = (index, place, count)
                self.end[n] = new[n]
        for one, other in zip(block.results, self.after.blocks[index].results, strict=True):
            if isinstance(one, str):
                assert isinstance(other, str)
                assert old[one] == new[other]

    def _pairs(self, index: int, new: Held) -> Iterator[tuple[Operator, Operator]]:
        """Yields the operators of both; records releases between them."""
        rest = iter(op for op in self.before.blocks[index].ops if op.type != "delete_var")
        for op in self.after.blocks[index].ops:
            if op.type != "delete_var":
                yield next(rest), op
                continue
            for name in op.reads:
                assert new.pop(name, None) is not None, f"'{name}' is let go, and holds nothing"
                kind = self.after.lookup(name).kind
                assert kind is Kind.DATA or name not in self.fixed, f"'{name}' is let go"
        assert next(rest, None) is None

    def _inside(self, index: int, was: Operator, op: Operator, old: Held, new: Held) -> None:
        """Tracks a sub-block: a function of its arguments, or one that sees outer variables."""
        block, made = self.before.blocks[index], self.after.blocks[index]
        mine = {n: x for n, x in old.items() if n not in block.variables}
        theirs = {n: x for n, x in new.items() if n not in made.variables}
        for held in (mine, theirs):
            held.update({name: (index, "argument", n) for n, name in enumerate(block.args)})
        if not block.args and not block.results:
            # Written by an earlier turn of a loop, or there before.
            for count, (o, n) in enumerate(zip(was.writes, op.writes, strict=True)):
                mine[o] = theirs[n] = (index, "turn", count)
        self.block(index, mine, theirs)
        if not block.args and not block.results:
            for o, n in zip(was.writes, op.writes, strict=True):
                assert mine[o] == theirs[n], f"a turn of block {index} leaves another '{o}'"

    def _check_names(self, o: str, n: str, here: str) -> None:
        assert o == n or not {o, n} & self.fixed, f"'{o}' became '{n}': {here}"

    def _check_room(self, block: Block, o: str, n: str, here: str) -> None:
        """Checks that a value fits the storage that it is written to."""
        wanted, held = self.before.lookup(o, block), self.before.lookup(n, block)
        assert wanted.dtype == held.dtype, here
        if self.level == 0:
            assert wanted.shape == held.shape, here
        for number in (1, 7):  # for any value of a letter
            numbers = dict.fromkeys(letters((*wanted.shape, *held.shape)), number)
            assert _elements(wanted.shape, numbers) <= _elements(held.shape, numbers), here


def _elements(shape: tuple[Size, ...], numbers: dict[str, int]) -> int:
    return math.prod(evaluate(size, numbers) for size in shape)
