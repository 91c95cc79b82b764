"""Let the update of a parameter or of state reuse its buffer."""

from dataclasses import dataclass, replace

from jaxfleet.analysis.uses import OuterUses
from jaxfleet.ir import Kind, Program
from jaxfleet.pipeline import Pass, register_pass


@register_pass("donate")
@dataclass(frozen=True)
class Donate(Pass):
    """Records which parameters and state may give their buffers to their updates.

    A step that keeps what it was given holds each parameter twice, old and new, and each of
    the optimizer's moments too: for Adam that is three extra copies of the model. Where the
    step writes the variable, the old value is dead at its end, so XLA may write the new one
    in its place. What a step only reads (a frozen layer, a learning rate) it does not write
    back, and giving that away would leave the next step without it.

    The names stand in the program's attribute `donate`, as declared; `lower` hands them to
    jit. Runs last: a pass that adds or removes a write changes the answer.

    Before::

        program p
          data  g: f32[4]
          param w: f32[4]
          param frozen: f32[4]
          state m: f32[4]
          block 0
            optimize
              m = jax.add(m, g)
              d: f32[4] = jax.mul(m, frozen)
              w = jax.sub(w, d)

    After::

        program p {donate=["w", "m"]}
          data  g: f32[4]
          param w: f32[4]
          param frozen: f32[4]
          state m: f32[4]
          block 0
            optimize
              m = jax.add(m, g)
              d: f32[4] = jax.mul(m, frozen)
              w = jax.sub(w, d)
    """

    def run(self, program: Program) -> Program:
        uses = OuterUses(program)
        written = {name for op in program.root.ops for name in uses.of(op).writes}
        persistable = program.of_kind(Kind.PARAM, Kind.STATE)
        donated = tuple(v.name for v in persistable if v.name in written)
        attrs = program.attrs.without("donate")
        if donated:
            attrs = attrs.updated(donate=donated)
        return program if attrs == program.attrs else replace(program, attrs=attrs)
