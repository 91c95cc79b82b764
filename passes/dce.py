"""Remove operators whose results nobody needs."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from jaxfleet.ir import Attr, Attrs, Block, BlockRef, Kind, Operator, Program, Variable
from jaxfleet.ir.values import map_attr
from jaxfleet.passes._effects import Effects
from jaxfleet.pipeline import Pass, register_pass


@register_pass("dce")
@dataclass(frozen=True)
class DeadCodeElimination(Pass):
    """Removes operators whose results nobody needs.

    Other passes leave such operators behind rather than look for them, and a captured step
    computes what the user's script throws away. XLA would remove most of it, but only after
    it was read in dumps, counted, verified and lowered.

    Needed are writes to parameters and state, operators with an effect or that all devices
    run together, and whatever these read; of a sub-block that is a function, its results too.
    A write that is overwritten before it is read is not needed. Types that are not registered
    count as having an effect. Sub-blocks, temporaries and constants that nothing names any
    longer go as well.

    Before::

        program p
          data  x: f32[b,4]
          param w: f32[4]
          const unused: f32[4] = @c0
          block 0
            forward
              h: f32[b,4] = jax.mul(x, w)
              twice: f32[b,4] = jax.add(h, h)
              dead: f32[b,4] = jax.mul(twice, unused)
            optimize
              step: f32[4] = jax.neg(w)
              w = jax.add(w, step)
              fetch(h)

    After::

        program p
          data  x: f32[b,4]
          param w: f32[4]
          block 0
            forward
              h: f32[b,4] = jax.mul(x, w)
            optimize
              step: f32[4] = jax.neg(w)
              w = jax.add(w, step)
              fetch(h)
    """

    keep: tuple[str, ...] = ()  # variables that are fetched by name, so needed at the end

    def run(self, program: Program) -> Program:
        blocks = _Sweep(program, self.keep).needed_blocks()
        after = _without_unused(program.with_blocks(_renumbered(blocks)), set(self.keep))
        return program if after == program else after


class _Sweep:
    """Goes through each block once, from its end, and keeps what is needed."""

    def __init__(self, program: Program, keep: Iterable[str]) -> None:
        self.effects = Effects()
        self.at_end = {v.name for v in program.variables.values() if v.kind.persistable}
        self.at_end.update(keep)
        self.blocks = list(program.blocks)
        self.outer_reads: dict[int, set[str]] = {}  # what a block reads of those around it
        self.acts: dict[int, bool] = {}  # whether a block has an effect or writes around it
        for block in reversed(program.blocks):  # a sub-block comes after the block that uses it
            self._sweep(block)

    def needed_blocks(self) -> list[Block]:
        """Returns the root, the blocks it leads to, and those around them, in order."""
        found: set[int] = set()
        rest = [0]
        while rest:
            index = rest.pop()
            if index in found or index < 0:
                continue
            found.add(index)
            rest.append(self.blocks[index].parent)
            rest.extend(inner for op in self.blocks[index].ops for inner in op.blocks)
        return [self.blocks[index] for index in sorted(found)]

    def _sweep(self, block: Block) -> None:
        live = self._live_at_end(block)
        runs_once = _runs_once(block)
        kept: list[Operator] = []
        for op in reversed(block.ops):
            if not (self._acts(op, block) or any(name in live for name in op.writes)):
                continue
            kept.append(op)
            if runs_once and not op.blocks:  # a sub-block may leave a variable as it was
                live.difference_update(op.writes)
            live.update(op.reads)
            for index in op.blocks:
                live |= self.outer_reads[index]
        self.acts[block.index] = any(self._acts(op, block) for op in kept)
        self.outer_reads[block.index] = live - block.variables.keys()
        if len(kept) != len(block.ops):
            self.blocks[block.index] = block.with_ops(reversed(kept))

    def _live_at_end(self, block: Block) -> set[str]:
        live = {item for item in block.results if isinstance(item, str)}
        if block.index == 0:
            live |= self.at_end
            # The runtime hands out what a fetched variable holds when the step is over.
            live.update(name for op in block.ops if op.type == "fetch" for name in op.reads)
        if not _runs_once(block):  # what it reads early may be what it wrote late
            live.update(name for op in block.ops for name in op.reads)
        return live

    def _acts(self, op: Operator, block: Block) -> bool:
        """Tells whether an operator is needed whoever reads its outputs."""
        if self.effects.has_effect(op) or self.effects.is_collective(op):
            return True
        if block.index and any(name not in block.variables for name in op.writes):
            return True
        return any(self.acts[index] for index in op.blocks)


def _runs_once(block: Block) -> bool:
    """Tells whether what a block wrote in one run is unknown to the next: the root, functions."""
    return block.index == 0 or bool(block.args or block.results)


def _renumbered(blocks: list[Block]) -> list[Block]:
    """Returns the blocks numbered by place, and every reference to them with its new number."""
    places = {block.index: place for place, block in enumerate(blocks)}
    if all(index == place for index, place in places.items()):
        return blocks
    places[-1] = -1

    def moved(attr: Attr) -> Attr:
        return BlockRef(places[attr.index]) if isinstance(attr, BlockRef) else attr

    def renumber(op: Operator) -> Operator:
        if not op.blocks:
            return op
        attrs = {name: map_attr(value, moved) for name, value in op.attrs.items()}
        return replace(op, attrs=Attrs(attrs))

    return [
        replace(
            block, index=place, parent=places[block.parent], ops=tuple(map(renumber, block.ops))
        )
        for place, block in enumerate(blocks)
    ]


def _without_unused(program: Program, keep: set[str]) -> Program:
    """Returns the program without the temporaries and constants that nothing names."""
    named = [_names(block) | keep for block in program.blocks]
    from_inside = set[str]()  # named in a block that does not declare it
    for block, names in zip(program.blocks, named, strict=True):
        from_inside |= names - block.variables.keys()
    blocks = []
    for block, names in zip(program.blocks, named, strict=True):
        variables = _used(block.variables, names | from_inside)
        same = len(variables) == len(block.variables)
        blocks.append(block if same else replace(block, variables=variables))
    return replace(program, variables=_used(program.variables, from_inside), blocks=tuple(blocks))


def _names(block: Block) -> set[str]:
    names = {*block.args, *(item for item in block.results if isinstance(item, str))}
    for op in block.ops:
        names.update(op.reads, op.writes, *op.role_var)
    return names


def _used(variables: Mapping[str, Variable], names: AbstractSet[str]) -> dict[str, Variable]:
    """Returns the variables less the temporaries and constants that are not among the names."""
    dispensable = {Kind.TEMP, Kind.CONST}
    return {
        name: variable
        for name, variable in variables.items()
        if name in names or variable.kind not in dispensable
    }
