"""Let parts of a step run one after another, in executables of their own."""

from dataclasses import dataclass

from jaxfleet.analysis.memory import Apart
from jaxfleet.errors import PassError
from jaxfleet.ir import Operator, Program
from jaxfleet.passes._letters import sizes_of_letters
from jaxfleet.pipeline import Pass, made_by, register_pass

_NEAR = 1.1  # of the least: for less, there may be as many executables as operators


@register_pass("cut_apart")
@dataclass(frozen=True)
class CutApart(Pass):
    """Cuts a step into executables, none of which computes anything again.

    What does not depend on each other a compiler runs side by side where it can, and holds all of
    it at once: XLA:CPU takes four times the memory for four microbatches. A `cut` makes it one
    after the other. What crosses a cut is written to memory, so cuts stand where little crosses:
    `order_for_memory` before makes such places.

    Cuts are given, or chosen by `analysis.memory.Apart`: the fewest that hold little more than the
    least that any do, as it counts.

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

    cuts: tuple[int, ...] | None = None  # first operators of executables, the first left out
    rows: int = 256  # what a letter counts for, where cuts are chosen
    keep: tuple[str, ...] = ()  # variables that are fetched by name, so returned

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
        apart = Apart.of(program, sizes_of_letters(program, self.rows), keep=self.keep)
        return apart.cuts(round(_NEAR * apart.least())) or ()
