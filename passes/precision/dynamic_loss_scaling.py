"""Dynamic loss scaling: skips steps whose gradients overflow, and lowers the scale."""

from dataclasses import dataclass

from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operator, Program, Variable
from jaxfleet.passes.precision.skip_nonfinite import DeferredState, finite_test
from jaxfleet.passes.shared.conditional_update import (
    check_gradients_are_known,
    literal,
    update_op,
    with_extra_variables,
)
from jaxfleet.pipeline import Pass, made_by, register_pass

SCALE = "amp.scale"  # the factor on operands of backward's products
_GOOD = "amp.good"  # steps since the scale changed
_MOST = 2.0**24


def scale_variable() -> Variable:
    """Returns the state variable that holds the scale."""
    return Variable(SCALE, "f32", (), Kind.STATE)


@register_pass("skip_overflow")
@dataclass(frozen=True)
class SkipOverflow(Pass):
    """Makes a step with a non-finite gradient change only the loss scale.

    Every new value of the state gets another name (`w@NEXT`), and is selected if all gradients are
    finite. Otherwise the scale is halved; after `every` consecutive finite steps it is doubled
    (Micikevicius et al. 2018, section 3.2). It stays between 1 and 2^24. The test is one sum: a
    number times zero is zero, unless it is infinite or NaN.

    Runs after `half_precision`, which creates the scale, and before the pass for devices.

    Before::

        program p {beside=[["amp.scale", 8.0]]}
          param w: f32[4]
          data  x: f32[4]
          state amp.scale: f32[]
          block 0
            backward
              w@GRAD: f32[4] = jax.neg(x) for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)

    After::

        program p {beside=[["amp.scale", 8.0], ["amp.good", 0]]}
          param w: f32[4]
          data  x: f32[4]
          state amp.scale: f32[]
          state amp.good: i32[]
          block 0
            backward
              w@GRAD: f32[4] = jax.neg(x) for (w, w@GRAD)
            optimize
              w@NEXT: f32[4] = jax.sub(w, w@GRAD)
              w@GRAD@ZEROS: f32[4] = jax.mul(w@GRAD, 0.0:f32)
              w@GRAD@NONE: f32[] = jax.reduce_sum(w@GRAD@ZEROS) {axes=[0]}
              w@GRAD@NONES: f32[] = jax.add(0.0:f32, w@GRAD@NONE)
              amp.finite: bool[] = jax.eq(w@GRAD@NONES, 0.0:f32)
              w = jax.select_n(amp.finite, w, w@NEXT)
              amp.half: f32[] = jax.mul(amp.scale, 0.5:f32)
              amp.less: f32[] = jax.max(amp.half, 1.0:f32)
              amp.twice: f32[] = jax.mul(amp.scale, 2.0:f32)
              amp.most: f32[] = jax.min(amp.twice, 16777216.0:f32)
              amp.more: i32[] = jax.add(amp.good, 1:i32)
              amp.long: bool[] = jax.ge(amp.more, 2000:i32)
              amp.kept: f32[] = jax.select_n(amp.long, amp.scale, amp.most)
              amp.scale = jax.select_n(amp.finite, amp.less, amp.kept)
              amp.count: i32[] = jax.select_n(amp.long, amp.more, 0:i32)
              amp.good = jax.select_n(amp.finite, 0:i32, amp.count)
    """

    every: int = 2000  # finite steps before the scale is doubled
    forward: bool = True  # also defer writes of forward, such as running statistics

    runs_after = ("half_precision",)

    def run(self, program: Program) -> Program:
        if SCALE not in program.variables:
            what = f"{self.name}: no scale in '{program.name}'"
            raise PassError(what, hint="run half_precision with a loss_scale before")
        check_gradients_are_known(program, self.name)
        gradients = [name for x in program.root.ops for _, name in x.role_var]
        held = with_extra_variables(program, [(Variable(_GOOD, "i32", (), Kind.STATE), 0)])
        hint = "leave amp='float16' out"
        for name in gradients:
            if (dtype := program.lookup(name).dtype) != "f32":
                what = f"{self.name}: the gradient '{name}' is {dtype}"
                raise PassError(what, hint="amp='float16' is for parameters in float32")
        renaming = DeferredState(held, forward=self.forward, by=self.name, hint=hint)
        ops = [*renaming.ops()]
        fetches = [x for x in ops if x.type == "fetch"]
        testing, declared = finite_test(program, gradients)
        new = [*testing, *renaming.choices(), *_scaling(self.every)]
        declared += [*renaming.declared, *_temporaries()]
        others = [x for x in ops if x.type != "fetch"]
        all_ops = [*others, *(made_by(x, self) for x in new), *fetches]
        return held.with_block(held.root.with_ops(all_ops, declare=declared))


def _scaling(every: int) -> list[Operator]:
    return [
        update_op("jax.mul", (SCALE, literal(0.5)), ("amp.half",)),
        update_op("jax.max", ("amp.half", literal(1)), ("amp.less",)),
        update_op("jax.mul", (SCALE, literal(2)), ("amp.twice",)),
        update_op("jax.min", ("amp.twice", literal(_MOST)), ("amp.most",)),
        update_op("jax.add", (_GOOD, literal(1, "i32")), ("amp.more",)),
        update_op("jax.ge", ("amp.more", literal(every, "i32")), ("amp.long",)),
        update_op("jax.select_n", ("amp.long", SCALE, "amp.most"), ("amp.kept",)),
        update_op("jax.select_n", ("amp.finite", "amp.less", "amp.kept"), (SCALE,)),
        update_op("jax.select_n", ("amp.long", "amp.more", literal(0, "i32")), ("amp.count",)),
        update_op("jax.select_n", ("amp.finite", literal(0, "i32"), "amp.count"), (_GOOD,)),
    ]


def _temporaries() -> list[Variable]:
    floats = [Variable(f"amp.{x}", "f32", ()) for x in ("half", "less", "twice", "most", "kept")]
    counts = [Variable(f"amp.{x}", "i32", ()) for x in ("more", "count")]
    return [*floats, *counts, *(Variable(f"amp.{x}", "bool", ()) for x in ("finite", "long"))]
