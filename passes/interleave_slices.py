"""Give every device a part of each slice of the batch that a loop goes over."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxfleet.analysis.labels import infer, mesh_of, summed
from jaxfleet.analysis.labels.accumulate import accumulators
from jaxfleet.ir import (
    Block,
    BlockRef,
    Operands,
    Operator,
    Program,
    Size,
    Variable,
)
from jaxfleet.ir.names import unique
from jaxfleet.passes._rows_alike import keeps_rows
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("interleave_slices")
@dataclass(frozen=True)
class InterleaveSlices(Pass):
    """Divides a loop that adds up over slices of the batch.

    `x.reshape(4, -1, 8)` makes four slices of neighbouring rows; on devices that each have
    neighbouring rows too, a device would have whole slices or none. Where a loop only adds up what
    it makes of each row, it does not matter which slice a row is in. So slice `i` is made of rows
    `i`, `i + 4`, `i + 8`, ..., and each device has an equal part of it.

    A loop is left as it is where a row's place matters (random numbers, positions, normalization
    within a slice), where it returns something for each slice, or where a device would not get an
    equal part. Runs before `grad_allreduce`, on a program whose batch is a number.

    Before::

        program p {batch=12}
          data  x: f32[12,3]
          param w: f32[3]
          block 0
            forward
              slices: f32[3,4,3] = jax.reshape(x) {new_sizes=[3, 4, 3]}
              total: f32[] = jax.scan(w, 0.0:f32, slices) {body=^1, length=3, num_carry=1, num_consts=1, reverse=false, unroll=1}
              fetch(total)
          block 1 (a: f32[3], c: f32[], s: f32[4,3]) -> (d)
            forward
              y: f32[4] = jax.dot_general(s, a) {dimension_numbers=[[[1], [0]], [[], []]]}
              z: f32[] = jax.reduce_sum(y) {axes=[0]}
              d: f32[] = jax.add(c, z)

    After::

        program p {batch=12}
          data  x: f32[12,3]
          param w: f32[3]
          block 0
            forward
              slices.rows: f32[4,3,3] = jax.reshape(x) {new_sizes=[4, 3, 3]}
              slices: f32[3,4,3] = jax.transpose(slices.rows) {permutation=[1, 0, 2]}
              total: f32[] = jax.scan(w, 0.0:f32, slices) {body=^1, length=3, num_carry=1, num_consts=1, reverse=false, unroll=1}
              fetch(total)
          block 1 (a: f32[3], c: f32[], s: f32[4,3]) -> (d)
            forward
              y: f32[4] = jax.dot_general(s, a) {dimension_numbers=[[[1], [0]], [[], []]]}
              z: f32[] = jax.reduce_sum(y) {axes=[0]}
              d: f32[] = jax.add(c, z)
    """  # noqa: E501  # an operator stands on one line

    devices: int = 2  # how many devices share the batch

    def run(self, program: Program) -> Program:
        for place, scan in enumerate(program.root.ops):
            reshapes = _slices(program, scan)
            if not reshapes or not self._divides(program, reshapes):
                continue
            candidate = self._interleaved(program, reshapes)
            if self._is_exact(candidate, place + len(reshapes)):
                return self.run(candidate)
        return program

    def _divides(self, program: Program, reshapes: Sequence[Operator]) -> bool:
        """Whether each device gets an equal part of every slice, and has no whole slices."""
        for op in reshapes:
            count, rows = _shape(program, op.writes[0])[:2]
            if not isinstance(rows, int) or not isinstance(count, int):
                return False
            if rows % self.devices or count % self.devices == 0:
                return False
        return True

    def _interleaved(self, program: Program, reshapes: Sequence[Operator]) -> Program:
        root, taken = program.root, {*program.variables, *program.root.variables}
        ops: list[Operator] = []
        declared: list[Variable] = []
        for op in root.ops:
            if op not in reshapes:
                ops.append(op)
                continue
            (out,) = op.writes
            count, rows, *rest = _shape(program, out)
            name = unique(f"{out}.rows", taken)
            taken.add(name)
            sizes = (rows, count, *rest)
            declared.append(replace(root.variables[out], name=name, shape=sizes))
            attrs = op.attrs.updated(new_sizes=sizes)
            ops.append(made_by(replace(op, outputs=Operands.of(name), attrs=attrs), self))
            order = (1, 0, *range(2, len(sizes)))
            turned = Operator(
                "jax.transpose", Operands.of(name), Operands.of(out), role=op.role, source=op.source
            )
            attrs = turned.attrs.updated(permutation=order)
            ops.append(made_by(replace(turned, attrs=attrs), self))
        return program.with_block(root.with_ops(ops, declare=declared))

    def _is_exact(self, program: Program, place: int) -> bool:
        """Whether a loop over slices means the same whichever slice a row is in."""
        scan = program.root.ops[place]
        mesh, cut = mesh_of(program, self.devices)
        plan = infer(program, mesh, sharded_inputs=cut, held=summed(program))
        found = plan.blocks[0].ops[place]
        kept = int(str(scan.attrs["num_consts"])) + int(str(scan.attrs["num_carry"]))
        if any(label.is_sharded for label in found.labels[:kept]):
            return False  # rows that are no slice's would meet others than before
        if found.placing.note or not all(label.is_sum for label in found.placing.outputs):
            return False
        return all(keeps_rows(plan, block) for block in _inside(program, scan))


def goes_over_slices(program: Program) -> bool:
    """Whether a program may have a loop for this pass."""
    return any(_slices(program, op) for op in program.root.ops)


def _slices(program: Program, scan: Operator) -> list[Operator]:
    """Returns the reshapes that make what a loop goes over, where it only adds up."""
    if scan.type != "jax.scan":
        return []
    num_consts, num_carry = (int(str(scan.attrs[x])) for x in ("num_consts", "num_carry"))
    first, last = num_consts, num_consts + num_carry
    ref = scan.attrs["body"]
    assert isinstance(ref, BlockRef)
    body, arrays = program.blocks[ref.index], tuple(scan.inputs)[last:]
    if len(scan.writes) != num_carry or not arrays or not accumulators(body, first, last):
        return []
    uses = [x for op in program.root.ops for x in op.reads]
    makers = {name: op for op in program.root.ops for name in op.writes}
    found = [makers.get(name) for name in arrays if isinstance(name, str)]
    reshapes = [op for op in found if op is not None and _cuts_rows(program, op)]
    alone = all(uses.count(op.writes[0]) == 1 for op in reshapes)
    return reshapes if alone and len(reshapes) == len(arrays) else []


def _cuts_rows(program: Program, op: Operator) -> bool:
    """Whether an operator cuts axis 0 of the batch into slices of neighbouring rows."""
    if op.type != "jax.reshape" or op.attrs.get("dimensions") is not None:
        return False
    (given,) = op.reads or ("",)
    rows, shape = _shape(program, given), _shape(program, op.writes[0])
    is_batch = bool(rows) and rows[0] == program.attrs.get("batch")
    return is_batch and shape[2:] == rows[1:] and len(shape) == len(rows) + 1


def _inside(program: Program, op: Operator) -> Iterator[Block]:
    for index in op.blocks:
        yield program.blocks[index]
        for inner in program.blocks[index].ops:
            yield from _inside(program, inner)


def _shape(program: Program, name: str) -> tuple[Size, ...]:
    return program.lookup(name, program.root).shape
