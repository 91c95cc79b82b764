"""Skips steps with a non-finite gradient: the state is unchanged, and a loss scale is lowered."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operand, Operator, Program, Role, Variable
from jaxfleet.ir.naming import GRADIENTS_FINITE, next_name
from jaxfleet.passes.building_blocks import (
    check_gradients_are_known,
    conversion,
    literal,
    update_op,
    with_extra_variables,
)
from jaxfleet.pipeline import Pass, made_by, register_pass

_FORWARD = (Role.FORWARD, Role.FORWARD_LOSS)


def _guarded(
    program: Program,
    gradients: Sequence[str],
    by: Pass,
    *,
    forward: bool,
    finite: str,
    hint: str,
    then: Sequence[Operator] = (),
    declare: Sequence[Variable] = (),
) -> Program:
    """Returns a program whose state keeps its value unless all gradients are finite.

    Every new value of the state gets another name, those of forward only if `forward`, and is
    selected at the end, before `then`, which makes the temporaries `declare`.
    """
    states = {v.name for v in program.of_kind(Kind.PARAM, Kind.STATE)}
    uses, names = OuterUses(program), dict[str, str]()
    ops, fetches, deferred = list[Operator](), list[Operator](), list[Variable]()
    for x in program.root.ops:
        inner = (uses.of(x).reads - set(x.reads)) & names.keys()
        if inner:
            what = f"{by.name}: a block reads '{min(inner)}' past its arguments"
            raise PassError(what, op=x, hint=hint)
        reads = x.inputs if x.type == "fetch" else x.inputs.renamed(names)
        if forward or x.role not in _FORWARD:
            # In operator order: the order of a set differs between processes.
            for name in [n for n in x.writes if n in states and n not in names]:
                new = replace(program.variables[name], name=next_name(name), kind=Kind.TEMP)
                deferred.append(new)
                names[name] = new.name
        kept = fetches if x.type == "fetch" else ops
        kept.append(replace(x, inputs=reads, outputs=x.outputs.renamed(names)))
    testing, temporaries = _finite_test(program, gradients, finite)
    choices = [update_op("jax.select_n", (finite, old, new), (old,)) for old, new in names.items()]
    added = [made_by(x, by) for x in (*testing, *choices, *then)]
    declared = [*temporaries, *deferred, *declare]
    return program.with_block(program.root.with_ops([*ops, *added, *fetches], declare=declared))


def _finite_test(
    program: Program, gradients: Sequence[str], finite: str
) -> tuple[list[Operator], list[Variable]]:
    """Returns operators and temporaries, `finite` among them, that test all gradients.

    The test is one sum: a number times zero is zero, unless it is infinite or NaN.
    """
    ops: list[Operator] = []
    declared = [Variable(finite, "bool", ())]
    total: Operand = literal(0)
    for name in gradients:
        like = program.lookup(name)
        zeros, part, more = (f"{name}@{x}" for x in ("ZEROS", "NONE", "NONES"))
        declared += [replace(like, name=zeros), Variable(part, like.dtype, ())]
        ops.append(update_op("jax.mul", (name, literal(0, like.dtype)), (zeros,)))
        axes = tuple(range(len(like.shape)))
        ops.append(update_op("jax.reduce_sum", (zeros,), (part,), axes=axes))
        if like.dtype != "f32":
            single = f"{part}.f32"
            ops.append(conversion(part, single, "f32"))
            declared.append(Variable(single, "f32", ()))
            part = single
        ops.append(update_op("jax.add", (total, part), (more,)))
        declared.append(Variable(more, "f32", ()))
        total = more
    ops.append(update_op("jax.eq", (total, literal(0)), (finite,)))
    return ops, declared


@register_pass("skip_nonfinite")
@dataclass(frozen=True)
class SkipNonfinite(Pass):
    """Makes a step with a non-finite gradient leave the state unchanged.

    One bad batch then costs its step instead of the run: an infinity or NaN stays in a parameter,
    and in the optimizer's moments, for good. Every new value of the state gets another name
    (`w@NEXT`), and is selected if all gradients are finite, at the cost of a sum over each of them.
    `skip_overflow` does the same for a scaled loss, and also adjusts the scale.

    Runs before the pass for devices, so gradients are complete when tested.

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

    forward: bool = True  # also defer writes of forward, such as running statistics

    def run(self, program: Program) -> Program:
        check_gradients_are_known(program, self.name)
        gradients = [name for x in program.root.ops for _, name in x.role_var]
        if not gradients:
            return program
        return _guarded(
            program,
            gradients,
            self,
            forward=self.forward,
            finite=GRADIENTS_FINITE,
            hint="leave on_nonfinite='skip' out",
        )


SCALE = "amp.scale"  # the factor on operands of backward's products
_GOOD = "amp.good"  # steps since the scale changed
_FINITE = "amp.finite"
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
        for name in gradients:
            if (dtype := program.lookup(name).dtype) != "f32":
                what = f"{self.name}: the gradient '{name}' is {dtype}"
                raise PassError(what, hint="amp='float16' is for parameters in float32")
        scaling, temporaries = _scaling(self.every)
        return _guarded(
            held,
            gradients,
            self,
            forward=self.forward,
            finite=_FINITE,
            hint="leave amp='float16' out",
            then=scaling,
            declare=temporaries,
        )


def _scaling(every: int) -> tuple[list[Operator], list[Variable]]:
    """Returns the operators that adjust the scale, and their temporaries."""
    declared, zero = list[Variable](), literal(0, "i32")

    def new(name: str, dtype: str = "f32") -> str:
        declared.append(Variable(f"amp.{name}", dtype, ()))
        return declared[-1].name

    ops = [
        update_op("jax.mul", (SCALE, literal(0.5)), (half := new("half"),)),
        update_op("jax.max", (half, literal(1)), (less := new("less"),)),
        update_op("jax.mul", (SCALE, literal(2)), (twice := new("twice"),)),
        update_op("jax.min", (twice, literal(_MOST)), (most := new("most"),)),
        update_op("jax.add", (_GOOD, literal(1, "i32")), (more := new("more", "i32"),)),
        update_op("jax.ge", (more, literal(every, "i32")), (is_due := new("long", "bool"),)),
        update_op("jax.select_n", (is_due, SCALE, most), (kept := new("kept"),)),
        update_op("jax.select_n", (_FINITE, less, kept), (SCALE,)),
        update_op("jax.select_n", (is_due, more, zero), (count := new("count", "i32"),)),
        update_op("jax.select_n", (_FINITE, zero, count), (_GOOD,)),
    ]
    return ops, declared
