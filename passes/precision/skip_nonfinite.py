"""Skips steps with a non-finite gradient: the state is unchanged."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Kind, Operand, Operator, Program, Role, Variable, Word
from jaxfleet.ir.naming import GRADIENTS_FINITE, next_name
from jaxfleet.passes.shared.conditional_update import check_gradients_are_known, literal, update_op
from jaxfleet.pipeline import Pass, made_by, register_pass

_FORWARD = (Role.FORWARD, Role.FORWARD_LOSS)


@dataclass
class DeferredState:
    """Makes the state keep its value until the end of the step.

    Attributes:
        program: the step.
        forward: also defer writes of forward.
        by: the pass that uses it.
        hint: the hint of the error if that is impossible.
        finite: the variable that decides.
        names: the new values' names.
        declared: their variables.
    """

    program: Program
    forward: bool
    by: str
    hint: str
    finite: str = "amp.finite"
    names: dict[str, str] = field(default_factory=dict)
    declared: list[Variable] = field(default_factory=list)

    def ops(self) -> Iterator[Operator]:
        """Yields the operators, with the new state renamed."""
        states = {v.name for v in self.program.of_kind(Kind.PARAM, Kind.STATE)}
        uses = OuterUses(self.program)
        for x in self.program.root.ops:
            inner = (uses.of(x).reads - set(x.reads)) & self.names.keys()
            if inner:
                what = f"{self.by}: a block reads '{min(inner)}' past its arguments"
                raise PassError(what, op=x, hint=self.hint)
            reads = x.inputs if x.type == "fetch" else x.inputs.renamed(self.names)
            if self.forward or x.role not in _FORWARD:
                # In operator order: the order of a set differs between processes.
                for name in [n for n in x.writes if n in states and n not in self.names]:
                    new = replace(self.program.variables[name], name=next_name(name))
                    self.declared.append(replace(new, kind=Kind.TEMP))
                    self.names[name] = new.name
            yield replace(x, inputs=reads, outputs=x.outputs.renamed(self.names))

    def choices(self) -> Iterator[Operator]:
        """Yields the operators that select the new state if all gradients are finite."""
        for name, new in self.names.items():
            yield update_op("jax.select_n", (self.finite, name, new), (name,))


def finite_test(
    program: Program, gradients: Sequence[str], finite: str = "amp.finite"
) -> tuple[list[Operator], list[Variable]]:
    """Returns operators and temporaries that test whether all gradients are finite.

    The test is one sum: a number times zero is zero, unless it is infinite or NaN. The caller
    declares `finite`, the result.
    """
    ops: list[Operator] = []
    declared: list[Variable] = []
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
            cast: dict[str, Attr] = {"new_dtype": Word("f32"), "weak_type": False}
            ops.append(update_op("jax.convert_element_type", (part,), (single,), **cast))
            declared.append(Variable(single, "f32", ()))
            part = single
        ops.append(update_op("jax.add", (total, part), (more,)))
        declared.append(Variable(more, "f32", ()))
        total = more
    ops.append(update_op("jax.eq", (total, literal(0)), (finite,)))
    return ops, declared


_HINT = "leave on_nonfinite='skip' out"


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
        ops = program.root.ops
        gradients = [name for x in ops for _, name in x.role_var]
        if not gradients:
            return program
        held = DeferredState(program, self.forward, self.name, _HINT, GRADIENTS_FINITE)
        renamed = [*held.ops()]
        testing, declared = finite_test(program, gradients, GRADIENTS_FINITE)
        declared += [*held.declared, Variable(GRADIENTS_FINITE, "bool", ())]
        new = [made_by(x, self) for x in (*testing, *held.choices())]
        fetches = [x for x in renamed if x.type == "fetch"]
        others = [x for x in renamed if x.type != "fetch"]
        return program.with_block(
            program.root.with_ops([*others, *new, *fetches], declare=declared)
        )
