"""Leave out a step with a gradient that is not finite: it changes nothing."""

from dataclasses import dataclass

from jaxfleet.ir import Program, Variable
from jaxfleet.ir.names import GRADIENTS_FINITE
from jaxfleet.passes._finite_gradients import HeldBack, finite_test
from jaxfleet.passes._known_gradients import check_gradients_are_known
from jaxfleet.pipeline import Pass, made_by, register_pass

_HINT = "leave on_nonfinite='skip' out"


@register_pass("skip_nonfinite")
@dataclass(frozen=True)
class SkipNonfinite(Pass):
    """Makes a step with a gradient that is not finite change nothing of the state.

    One bad batch then costs its step, where it would cost the run: what is infinite or no number
    stays in a parameter, and in the optimizer's moments, for good. Every new value of the state
    goes by another name (`w@NEXT`), and is taken where all gradients are finite, which costs a sum
    over each of them. `skip_overflow` does the same where a loss is scaled, and changes the scale.

    Runs before the pass for devices, so gradients are complete where they are looked at.

    Before::

        program p
          param w: f32[4]
          data  x: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = jax.neg(x) for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)

    After::

        program p
          param w: f32[4]
          data  x: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = jax.neg(x) for (w, w@GRAD)
            optimize
              w@NEXT: f32[4] = jax.sub(w, w@GRAD)
              w@GRAD@ZEROS: f32[4] = jax.mul(w@GRAD, 0.0:f32)
              w@GRAD@NONE: f32[] = jax.reduce_sum(w@GRAD@ZEROS) {axes=[0]}
              w@GRAD@NONES: f32[] = jax.add(0.0:f32, w@GRAD@NONE)
              gradients.finite: bool[] = jax.eq(w@GRAD@NONES, 0.0:f32)
              w = jax.select_n(gradients.finite, w, w@NEXT)
    """

    forward: bool = True  # hold back what forward writes too, as running statistics

    def run(self, program: Program) -> Program:
        check_gradients_are_known(program, self.name)
        ops = program.root.ops
        gradients = [name for x in ops for _, name in x.role_var]
        if not gradients:
            return program
        held = HeldBack(program, self.forward, self.name, _HINT, GRADIENTS_FINITE)
        renamed = [*held.ops()]
        testing, declared = finite_test(program, gradients, GRADIENTS_FINITE)
        declared += [*held.declared, Variable(GRADIENTS_FINITE, "bool", ())]
        new = [made_by(x, self) for x in (*testing, *held.choices())]
        fetches = [x for x in renamed if x.type == "fetch"]
        others = [x for x in renamed if x.type != "fetch"]
        return program.with_block(
            program.root.with_ops([*others, *new, *fetches], declare=declared)
        )
