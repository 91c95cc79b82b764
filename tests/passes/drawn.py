"""Draws straight-line programs, and determines their results symbolically."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from jaxfleet.ir import Operands, Operator, Program, Role, Variable, parse

HEAD = """
program drawn
  data  x: f32[4]
  data  y: f32[8]
  param p: f32[4]
  state s: f32[8]
  block 0
    backward
"""
TEMPS = [f"t{number}" for number in range(6)]
OUTER = ["x", "y", "p", "s"]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draws a valid program of `jax.add`, `c_allreduce_sum` and `fetch`, with updates in place."""
    program = parse(HEAD)
    known = list(OUTER)  # readable variables
    ops = []
    for _ in range(draw(st.integers(0, 30))):
        reads = draw(st.lists(st.sampled_from(known), min_size=1, max_size=2, unique=True))
        op_type = draw(st.sampled_from(["jax.add", "c_allreduce_sum", "c_allreduce_sum", "fetch"]))
        writes: tuple[str, ...] = ()
        if op_type != "fetch":
            writes = (draw(st.sampled_from([*TEMPS, "p", "s"])),)
            reads = reads[:1] if op_type == "c_allreduce_sum" else reads
            known += [name for name in writes if name not in known]
        role = draw(st.sampled_from([Role.BACKWARD, Role.BACKWARD, Role.OPTIMIZE]))
        ops.append(Operator(op_type, Operands.of(*reads), Operands.of(*writes), role=role))
    declared = [Variable(name, "f32", (4,)) for name in known if name in TEMPS]
    return program.with_block(program.root.with_ops(ops, declare=declared))


@dataclass
class Meaning:
    """Numbers each value by its origin, so that two runs can be compared.

    Two values have one number exactly if the same operators made them from the same values.
    """

    numbers: dict[object, int] = field(default_factory=dict)

    def of(self, program: Program) -> tuple[dict[str, int], list[int]]:
        """Returns the final value of each variable, and the fetches, in order."""
        values = {name: self._number(name) for name in program.variables}
        fetched: list[int] = []
        for op in program.root.ops:
            read = [values[name] for name in op.reads]
            if op.type == "fetch":
                fetched += read
            elif op.type == "c_allreduce_sum":
                summed = [self._number(("sum", value)) for value in read]
                values.update(zip(op.writes, summed, strict=True))
            else:
                values[op.writes[0]] = self._number((op.type, *read))
        return values, fetched

    def _number(self, key: object) -> int:
        return self.numbers.setdefault(key, len(self.numbers))
