"""Say where variables are read for the last time, as fluid's `release_memory` did."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxfleet.analysis.uses import OuterUses
from jaxfleet.ir import Kind, Operands, Operator, Program, Variable
from jaxfleet.passes._reuse import is_array
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("release_memory")
@dataclass(frozen=True)
class ReleaseMemory(Pass):
    """Writes a `delete_var` behind every operator that reads something for the last time.

    Released are temporaries and data with axes; parameters, state, what is skipped and what
    nothing reads are not, and neither is what a `fetch` names: that is read when the step is over.
    What a sub-block reads is read by its operator; what is a sub-block's own goes as it ends.

    What runs drops by itself what nothing reads any more: XLA within an executable, the runtime
    between two of them. So this says what is let go, for whoever reads, checks or counts a program.
    With `at_cuts`, it says it where the runtime does so: one `delete_var` before each `cut`, of the
    temporaries that the executable which ends there was the last to read.

    After what `release_memory` of fluid did up to 1.5.

    Before::

        program p
          data  x: f32[4]
          param w: f32[4]
          block 0
            forward
              a: f32[4] = jax.sin(x)
              b: f32[4] = jax.mul(a, w)
              c: f32[4] = jax.cos(b)
              fetch(c)

    After::

        program p
          data  x: f32[4]
          param w: f32[4]
          block 0
            forward
              a: f32[4] = jax.sin(x)
              delete_var(X=x)
              b: f32[4] = jax.mul(a, w)
              delete_var(X=a)
              c: f32[4] = jax.cos(b)
              delete_var(X=b)
              fetch(c)
    """

    skip: tuple[str, ...] = ()  # variables that are not released
    at_cuts: bool = False  # only temporaries, and only before the `cut` behind their last reader

    runs_after = (
        *("insert_send_recv", "grad_allreduce", "grad_allreduce_by_role"),
        *("recompute", "memory_optimize", "offload"),
    )

    def run(self, program: Program) -> Program:
        ops = [op for op in program.root.ops if op.type != "delete_var"]
        uses = OuterUses(program)
        dead = self._dead_behind(program, ops, uses)
        written: list[Operator] = []
        waiting: list[str] = []
        for place, op in enumerate(ops):
            if self.at_cuts and op.type == "cut":
                written += self._release(waiting, op)
                waiting = []
            written.append(op)
            if self.at_cuts:  # a name that is written again before the cut holds another value
                waiting = [name for name in waiting if name not in uses.of(op).writes]
                waiting += dead[place]
            else:
                written += self._release(dead[place], op)
        made = program.with_block(program.root.with_ops(written))
        return program if made == program else made

    def _release(self, names: Sequence[str], of: Operator) -> Iterator[Operator]:
        if names:
            inputs = Operands.named(X=sorted(names))
            yield made_by(Operator("delete_var", inputs, role=of.role, source=of.source), self)

    def _dead_behind(
        self, program: Program, ops: Sequence[Operator], uses: OuterUses
    ) -> list[list[str]]:
        """Returns what is read for the last time by each operator, and not written again."""
        found = list[list[str]]()
        kept = {name for op in ops if op.type == "fetch" for name in op.reads}
        live = kept | set(self.skip)  # what somebody reads behind the operator that is looked at
        for op in reversed(ops):
            used = uses.of(op)
            inside = {name for index in op.blocks for name in uses.of_block(index).writes}
            reads = used.reads | inside
            dead = [name for name in reads - live if self._is_released(program, name)]
            found.append(dead)
            live = (live - ({*op.writes} - inside - kept - {*self.skip})) | reads
        return found[::-1]

    def _is_released(self, program: Program, name: str) -> bool:
        variable: Variable = program.lookup(name)
        if variable.kind is Kind.DATA and not self.at_cuts:
            return is_array(replace(variable, kind=Kind.TEMP))
        return is_array(variable)
