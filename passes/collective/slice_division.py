"""Division of slices of the batch among devices, for loops and for unrolled code."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxfleet.analysis.flow import inner_blocks
from jaxfleet.analysis.sharding import mesh_of, propagate, summed_state
from jaxfleet.analysis.sharding.control_flow import accumulators
from jaxfleet.ir import (
    BlockRef,
    Operands,
    Operator,
    Program,
    Size,
    Variable,
)
from jaxfleet.ir.naming import unique
from jaxfleet.passes.building_blocks import op_like
from jaxfleet.passes.collective.slice_analysis import (
    BatchSlices,
    SliceSums,
    is_rowwise,
    unrolled_slices,
)
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("interleave_slices")
@dataclass(frozen=True)
class InterleaveSlices(Pass):
    """Divides a loop that sums over slices of the batch.

    `x.reshape(4, -1, 8)` makes four slices of adjacent rows; since devices also have adjacent rows,
    a device would have whole slices or none. If a loop only sums per-row results, the assignment of
    rows to slices does not matter. So slice `i` becomes rows `i`, `i + 4`, `i + 8`, ..., and each
    device has an equal part of it.

    A loop is left unchanged if a row's position matters (random numbers, positions, normalization
    within a slice), if it returns a value per slice, or if a device would not get an equal part.
    Runs before `grad_allreduce`, on a program with a numeric batch size.

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

    devices: int = 2  # devices that share the batch

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
            turned = op_like(op, "jax.transpose", [name], out, permutation=order)
            ops.append(made_by(turned, self))
        return program.with_block(root.with_ops(ops, declare=declared))

    def _is_exact(self, program: Program, place: int) -> bool:
        """Whether the loop's result is independent of the assignment of rows to slices."""
        scan = program.root.ops[place]
        mesh, cut = mesh_of(program, self.devices)
        plan = propagate(program, mesh, sharded_inputs=cut, held=summed_state(program))
        found = plan.blocks[0].ops[place]
        kept = int(str(scan.attrs["num_consts"])) + int(str(scan.attrs["num_carry"]))
        if any(label.is_sharded for label in found.labels[:kept]):
            return False  # rows outside of slices would be combined with other rows than before
        if found.placing.note or not all(label.is_sum for label in found.placing.outputs):
            return False
        return all(is_rowwise(plan, block) for block in inner_blocks(program, [scan]))


def goes_over_slices(program: Program) -> bool:
    """Whether a program may contain a loop for this pass."""
    return any(_slices(program, op) for op in program.root.ops)


def _slices(program: Program, scan: Operator) -> list[Operator]:
    """Returns the reshapes that a loop scans over, if it only sums."""
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
    """Whether an operator cuts axis 0 of the batch into slices of adjacent rows."""
    if op.type != "jax.reshape" or op.attrs.get("dimensions") is not None:
        return False
    (given,) = op.reads or ("",)
    rows, shape = _shape(program, given), _shape(program, op.writes[0])
    is_batch = bool(rows) and rows[0] == program.attrs.get("batch")
    return is_batch and shape[2:] == rows[1:] and len(shape) == len(rows) + 1


def _shape(program: Program, name: str) -> tuple[Size, ...]:
    return program.lookup(name, program.root).shape


@register_pass("stride_slices")
@dataclass(frozen=True)
class StrideSlices(Pass):
    """Divides sums over slices of the batch that an unrolled Python loop wrote out.

    `x[0:4]`, `x[4:8]` and `x[8:12]` are adjacent rows, of which a device has all or none. If each
    slice undergoes the same computation and the results are only summed, the assignment of rows to
    slices does not matter. So slice `i` becomes rows `i`, `i + 3`, `i + 6`, ..., and each device
    has an equal part of it.

    A program is left unchanged if slices are treated differently or meet in anything but a sum over
    all, if a value of one slice is returned, or if a row's position matters (random numbers,
    positions, normalization within a slice). Runs before `grad_allreduce`, on a program with a
    numeric batch size.

    Before::

        program p {batch=4}
          data  x: f32[4,3]
          block 0
            forward
              first: f32[2,3] = jax.slice(x) {limit_indices=[2, 3], start_indices=[0, 0]}
              one: f32[] = jax.reduce_sum(first) {axes=[0, 1]}
              second: f32[2,3] = jax.slice(x) {limit_indices=[4, 3], start_indices=[2, 0]}
              two: f32[] = jax.reduce_sum(second) {axes=[0, 1]}
              total: f32[] = jax.add(one, two)
              fetch(total)

    After::

        program p {batch=4}
          data  x: f32[4,3]
          block 0
            forward
              x.rows: f32[2,2,3] = jax.reshape(x) {new_sizes=[2, 2, 3]}
              first.strided: f32[2,1,3] = jax.slice(x.rows) {limit_indices=[2, 1, 3], start_indices=[0, 0, 0]}
              first: f32[2,3] = jax.squeeze(first.strided) {dimensions=[1]}
              one: f32[] = jax.reduce_sum(first) {axes=[0, 1]}
              second.strided: f32[2,1,3] = jax.slice(x.rows) {limit_indices=[2, 2, 3], start_indices=[0, 1, 0]}
              second: f32[2,3] = jax.squeeze(second.strided) {dimensions=[1]}
              two: f32[] = jax.reduce_sum(second) {axes=[0, 1]}
              total: f32[] = jax.add(one, two)
              fetch(total)
    """  # noqa: E501  # an operator stands on one line

    devices: int = 2  # devices that share the batch

    def run(self, program: Program) -> Program:
        cuts = unrolled_slices(program)
        if cuts is None or cuts.rows % self.devices:
            return program
        sums = SliceSums(program, cuts)
        if not sums.holds():
            return program
        candidate = self._strided(program, cuts)
        return candidate if self._is_exact(candidate, sums) else program

    def _strided(self, program: Program, cuts: BatchSlices) -> Program:
        root, taken = program.root, {*program.variables, *program.root.variables}
        ops: list[Operator] = []
        declared: list[Variable] = []
        grouped: dict[str, str] = {}

        def named(hint: str, like: str, shape: tuple[Size, ...]) -> str:
            name = unique(hint, taken)
            taken.add(name)
            declared.append(Variable(name, program.lookup(like, root).dtype, shape))
            return name

        def add(kind: str, given: str, out: str, like: Operator, **attrs: tuple[Size, ...]) -> None:
            ops.append(made_by(op_like(like, kind, [given], out, **attrs), self))

        for place, op in enumerate(root.ops):
            if place not in cuts.at:
                ops.append(op)
                continue
            (given,), (out,), index = op.reads, op.writes, cuts.at[place]
            rest = program.lookup(out, root).shape[1:]
            if given not in grouped:
                sizes = (cuts.rows, cuts.count, *rest)
                grouped[given] = named(f"{given}.rows", given, sizes)
                add("jax.reshape", given, grouped[given], op, new_sizes=sizes)
            strided = named(f"{out}.strided", given, (cuts.rows, 1, *rest))
            first, last = (0, index, *(0 for _ in rest)), (cuts.rows, index + 1, *rest)
            add("jax.slice", grouped[given], strided, op, limit_indices=last, start_indices=first)
            add("jax.squeeze", strided, out, op, dimensions=(1,))
        return program.with_block(root.with_ops(ops, declare=declared))

    def _is_exact(self, program: Program, sums: SliceSums) -> bool:
        """Whether the results of a slice are sums over its rows, regardless of their position."""
        mesh, cut = mesh_of(program, self.devices)
        plan = propagate(program, mesh, sharded_inputs=cut, held=summed_state(program))
        of_slices = {
            place
            for place, op in enumerate(program.root.ops)
            if not sums.parts.isdisjoint(op.writes)
        }
        planned = plan.blocks[0].ops
        labels = {
            name: label
            for place in of_slices
            for name, label in zip(
                program.root.ops[place].writes, planned[place].outputs, strict=True
            )
        }
        if not all(labels[name].is_sum for name in sums.terms):
            return False
        for place in of_slices:  # other rows would be combined with different ones than before
            read = zip(program.root.ops[place].inputs, planned[place].labels, strict=True)
            made = {*sums.parts, *_strided_of(program)}
            if any(label.is_sharded and name not in made for name, label in read):
                return False
        inner = inner_blocks(program, [program.root.ops[place] for place in of_slices])
        whole = all(is_rowwise(plan, block) for block in inner)
        return whole and is_rowwise(plan, program.root, of_slices)


def _strided_of(program: Program) -> set[str]:
    """Returns the slices that the pass made, before their axis is removed."""
    ops = (op for op in program.root.ops if op.source.made_by == StrideSlices.name)
    return {name for op in ops for name in op.writes}
