"""What passes share that leave out a step whose gradients are not finite."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.uses import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Kind, Operand, Operator, Program, Role, Variable, Word
from jaxfleet.ir.names import next_name
from jaxfleet.passes._when_due import number, op

_FORWARD = (Role.FORWARD, Role.FORWARD_LOSS)


@dataclass
class HeldBack:
    """Has the state keep its value until the step's end.

    Attributes:
        program: the step.
        forward: hold back what forward writes, too.
        by: the pass that asks for it.
        hint: what to do where it cannot be done.
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
        """Yields the operators, which write and read the new state by other names."""
        states = {v.name for v in self.program.of_kind(Kind.PARAM, Kind.STATE)}
        uses = OuterUses(self.program)
        for x in self.program.root.ops:
            inner = (uses.of(x).reads - set(x.reads)) & self.names.keys()
            if inner:
                what = f"{self.by}: a block reads '{min(inner)}' past its arguments"
                raise PassError(what, op=x, hint=self.hint)
            reads = x.inputs if x.type == "fetch" else x.inputs.renamed(self.names)
            if self.forward or x.role not in _FORWARD:
                # In the order of the operator: that of a set is another in each process.
                for name in [n for n in x.writes if n in states and n not in self.names]:
                    new = replace(self.program.variables[name], name=next_name(name))
                    self.declared.append(replace(new, kind=Kind.TEMP))
                    self.names[name] = new.name
            yield replace(x, inputs=reads, outputs=x.outputs.renamed(self.names))

    def choices(self) -> Iterator[Operator]:
        """Yields what gives the state its new value where all gradients are finite."""
        for name, new in self.names.items():
            yield op("jax.select_n", (self.finite, name, new), (name,))


def finite_test(
    program: Program, gradients: Sequence[str], finite: str = "amp.finite"
) -> tuple[list[Operator], list[Variable]]:
    """Returns what finds whether all gradients are finite.

    It is one sum: a number times zero is zero, unless it is infinite or none.

    Args:
        program: the step.
        gradients: their names.
        finite: the variable that says so; the caller declares it.
    """
    ops: list[Operator] = []
    declared: list[Variable] = []
    total: Operand = number(0)
    for name in gradients:
        like = program.lookup(name)
        zeros, part, more = (f"{name}@{x}" for x in ("ZEROS", "NONE", "NONES"))
        declared += [replace(like, name=zeros), Variable(part, like.dtype, ())]
        ops.append(op("jax.mul", (name, number(0, like.dtype)), (zeros,)))
        axes = tuple(range(len(like.shape)))
        ops.append(op("jax.reduce_sum", (zeros,), (part,), axes=axes))
        if like.dtype != "f32":
            single = f"{part}.f32"
            cast: dict[str, Attr] = {"new_dtype": Word("f32"), "weak_type": False}
            ops.append(op("jax.convert_element_type", (part,), (single,), **cast))
            declared.append(Variable(single, "f32", ()))
            part = single
        ops.append(op("jax.add", (total, part), (more,)))
        declared.append(Variable(more, "f32", ()))
        total = more
    ops.append(op("jax.eq", (total, number(0)), (finite,)))
    return ops, declared
