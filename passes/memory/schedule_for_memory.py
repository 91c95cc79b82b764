"""Schedules a step for a lower memory peak: reorders it, and splits it into executables."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from jaxfleet.analysis.memory import ExecutableCuts, MemoryProfile, memory_profile
from jaxfleet.analysis.memory.costs import equal_sizes
from jaxfleet.errors import PassError
from jaxfleet.ir import Operator, Program
from jaxfleet.passes.memory.list_scheduling import (
    OrderingConstraints,
    depth_first,
    from_the_back,
    from_the_front,
)
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("order_for_memory")
@dataclass(frozen=True)
class OrderForMemory(Pass):
    """Reorders the operators of block 0 for a lower memory peak.

    A captured step computes all gradients and then updates, layer by layer; each gradient occupies
    memory until its update. Here operators that free memory run as early as possible, so an update
    follows its gradient, and those that only take memory run as late as possible. Results are
    unchanged: dependencies and side effects keep their order, and no operator passes a `cut`.

    Several orders are made by list scheduling: from the front and from the back, starting from the
    program's order and from a depth-first one that makes the inputs of one result before those of
    another. The one with the lowest predicted peak is taken (`analysis.memory.memory_profile`); if
    none is lower than the program's own, the program is unchanged. A compiler reorders within an
    executable, so the order matters between executables (`cut_apart`).

    Before::

        program p
          data  x: f32[4]
          param v: f32[4,4]
          param w: f32[4,4]
          block 0
            forward
              h: f32[4] = jax.dot(v, x)
              y: f32[4] = jax.dot(w, h)
            backward
              w@GRAD: f32[4,4] = jax.outer(y, h) for (w, w@GRAD)
              h@GRAD: f32[4] = jax.dot(w, y)
              v@GRAD: f32[4,4] = jax.outer(h@GRAD, x) for (v, v@GRAD)
            optimize
              v = sgd(v, v@GRAD)
              w = sgd(w, w@GRAD)

    After::

        program p
          data  x: f32[4]
          param v: f32[4,4]
          param w: f32[4,4]
          block 0
            forward
              h: f32[4] = jax.dot(v, x)
              y: f32[4] = jax.dot(w, h)
            backward
              w@GRAD: f32[4,4] = jax.outer(y, h) for (w, w@GRAD)
              h@GRAD: f32[4] = jax.dot(w, y)
            optimize
              w = sgd(w, w@GRAD)
            backward
              v@GRAD: f32[4,4] = jax.outer(h@GRAD, x) for (v, v@GRAD)
            optimize
              v = sgd(v, v@GRAD)
    """

    rows: int = 256  # assumed batch size
    keep: tuple[str, ...] = ()  # variables fetched by name, so returned

    def run(self, program: Program) -> Program:
        best, curve = program, self._curve(program)
        ops = program.root.ops
        for order in _orders(program, curve, self._light(program, curve)):
            made = program.with_block(program.root.with_ops(ops[place] for place in order))
            found = self._curve(made)
            if found.peak < curve.peak:
                best, curve = made, found
        return best

    def _curve(self, program: Program, *, merges: bool = True) -> MemoryProfile:
        sizes = equal_sizes(program, self.rows)
        return memory_profile(program, sizes, keep=self.keep, merges=merges)

    def _light(self, program: Program, curve: MemoryProfile) -> set[int]:
        """Returns the indices of operators that are computed inside their readers."""
        alone = self._curve(program, merges=False).values
        both = zip(alone, curve.values, strict=True)
        return {value.made for value, merged in both if value.bytes and not merged.bytes}


def _orders(
    program: Program, curve: MemoryProfile, light: AbstractSet[int]
) -> Iterator[Sequence[int]]:
    """Yields orders of a program's operators.

    Operators that a compiler fuses into their readers hold nothing, and run right before them.
    """
    must, values = OrderingConstraints.of(program), curve.values
    heavy, others = must.without(light), [n for n in range(len(curve.bytes)) if n not in light]
    for base in (others, depth_first(others, heavy)):
        front = from_the_front(values, base, heavy)
        back = from_the_back(values, base, heavy)
        more = from_the_back(values, front, heavy), from_the_front(values, back, heavy)
        for order in (front, back, *more):
            yield must.with_light(order, light)


_NEAR = 1.1  # of the least: below that, there may be as many executables as operators


@register_pass("cut_apart")
@dataclass(frozen=True)
class CutApart(Pass):
    """Cuts a step into executables, without recomputation.

    A compiler runs independent operators side by side if it can, and holds all of their values at
    once: XLA:CPU takes four times the memory for four microbatches. A `cut` makes them sequential.
    A value that crosses a cut is written to memory, so cuts are made where few bytes cross: run
    `order_for_memory` first, which creates such places.

    Cuts are given, or chosen by `analysis.memory.ExecutableCuts`: the fewest whose estimated peak
    is little more than the minimum.

    Before::

        program p
          data  x: f32[1000]
          data  y: f32[1000]
          param w: f32[1000]
          block 0
            forward
              a: f32[1000] = jax.sort(x)
              b: f32[1000] = jax.cumsum(a)
              s: f32[] = jax.dot(b, w)
              c: f32[1000] = jax.sort(y)
              d: f32[1000] = jax.cumsum(c)
              t: f32[] = jax.dot(d, w)
              sum: f32[] = jax.add(s, t)
              fetch(sum)

    After::

        program p
          data  x: f32[1000]
          data  y: f32[1000]
          param w: f32[1000]
          block 0
            forward
              a: f32[1000] = jax.sort(x)
              b: f32[1000] = jax.cumsum(a)
              s: f32[] = jax.dot(b, w)
              cut()
              c: f32[1000] = jax.sort(y)
              d: f32[1000] = jax.cumsum(c)
              t: f32[] = jax.dot(d, w)
              sum: f32[] = jax.add(s, t)
              fetch(sum)
    """

    cuts: tuple[int, ...] | None = None  # first operators of executables except the first
    rows: int = 256  # assumed batch size, if cuts are chosen
    keep: tuple[str, ...] = ()  # variables fetched by name, so returned

    def run(self, program: Program) -> Program:
        cut = next((op for op in program.root.ops if op.type == "cut"), None)
        if cut is not None:
            raise PassError("cut_apart: the program is cut already", op=cut)
        cuts = self._chosen(program) if self.cuts is None else self.cuts
        if list(cuts) != sorted(set(cuts)):
            raise PassError(f"cut_apart: the cuts {list(cuts)} are not in order")
        if outside := [cut for cut in cuts if not 0 < cut < len(program.root.ops)]:
            raise PassError(f"cut_apart: there is no operator {outside[0]} to cut before")
        if not cuts:
            return program
        ops: list[Operator] = []
        for place, op in enumerate(program.root.ops):
            if place in cuts:
                ops.append(made_by(Operator("cut", role=op.role), self))
            ops.append(op)
        return program.with_block(program.root.with_ops(ops))

    def _chosen(self, program: Program) -> tuple[int, ...]:
        apart = ExecutableCuts.of(program, equal_sizes(program, self.rows), keep=self.keep)
        return apart.cuts(round(_NEAR * apart.least())) or ()
