"""Dead code elimination."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from jaxfleet.analysis.flow import Effects
from jaxfleet.ir import Block, Kind, Operator, Program, Variable
from jaxfleet.ir.inline import with_block_numbers
from jaxfleet.pipeline import Pass, register_pass


@register_pass("dce")
@dataclass(frozen=True)
class DeadCodeElimination(Pass):
    """Removes operators whose results are unused.

    Other passes leave such operators behind instead of searching for them, and a captured step
    computes values that the user's script discards. XLA would remove most of them, but only after
    dumps, counts, verification and lowering.

    Needed are writes to parameters and state, operators with an effect, collectives, and
    everything these read; for a sub-block that is a function, also its results. A
    write that is overwritten before it is read is not needed. Unregistered types count as having an
    effect. Unreferenced sub-blocks, temporaries and constants are removed as well.

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

    Examples:
        >>> from jaxfleet.ir import parse
        >>> from jaxfleet.passes import DeadCodeElimination
        >>> from jaxfleet.testing import docstring_programs
        >>> program = parse(docstring_programs(DeadCodeElimination)[0][0])
        >>> kept = DeadCodeElimination(keep=("twice",)).run(program)
        >>> [name for op in kept.root.ops for name in op.writes]
        ['h', 'twice', 'step', 'w']
    """

    keep: tuple[str, ...] = ()  # variables fetched by name, so needed at the end

    def run(self, program: Program) -> Program:
        blocks = _Sweep(program, self.keep).needed_blocks()
        after = _without_unused(program.with_blocks(_renumbered(blocks)), set(self.keep))
        return program if after == program else after


class _Sweep:
    def __init__(self, program: Program, keep: Iterable[str]) -> None:
        self.effects = Effects()
        self.at_end = {v.name for v in program.variables.values() if v.kind.persistable}
        self.at_end.update(keep)
        self.blocks = list(program.blocks)
        self.outer_reads: dict[int, set[str]] = {}  # a block's reads of outer variables
        self.acts: dict[int, bool] = {}  # whether a block has an effect or writes outer variables
        for block in reversed(program.blocks):  # a sub-block comes after the block that uses it
            self._sweep(block)

    def needed_blocks(self) -> list[Block]:
        """Returns the root, the blocks reachable from it, and their parents, in order."""
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
            if runs_once and not op.blocks:  # a sub-block may leave a variable unwritten
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
            # The runtime returns the value of a fetched variable at the end of the step.
            live.update(name for op in block.ops if op.type == "fetch" for name in op.reads)
        if not _runs_once(block):  # a late write may reach an early read of the next run
            live.update(name for op in block.ops for name in op.reads)
        return live

    def _acts(self, op: Operator, block: Block) -> bool:
        """Whether an operator is needed even if its outputs are not read."""
        if self.effects.runs_once(op):
            return True
        if block.index and any(name not in block.variables for name in op.writes):
            return True
        return any(self.acts[index] for index in op.blocks)


def _runs_once(block: Block) -> bool:
    """Whether a block's writes cannot reach its own next run: the root and functions."""
    return block.index == 0 or bool(block.args or block.results)


def _renumbered(blocks: list[Block]) -> list[Block]:
    places = {block.index: place for place, block in enumerate(blocks)}
    if all(index == place for index, place in places.items()):
        return blocks
    places[-1] = -1

    return [
        replace(block, index=place, parent=places[block.parent]).with_ops(
            with_block_numbers(op, places.__getitem__) for op in block.ops
        )
        for place, block in enumerate(blocks)
    ]


def _without_unused(program: Program, keep: set[str]) -> Program:
    """Returns the program without unreferenced temporaries and constants."""
    named = [_names(block) | keep for block in program.blocks]
    from_inside = set[str]()  # referenced in a block that does not declare them
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
    dispensable = {Kind.TEMP, Kind.CONST}
    return {
        name: variable
        for name, variable in variables.items()
        if name in names or variable.kind not in dispensable
    }
