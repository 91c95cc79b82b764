"""Give every device a part of each slice of the batch that is written out one by one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxfleet.analysis.labels import infer, mesh_of, summed
from jaxfleet.ir import Block, Operands, Operator, Program, Size, Variable
from jaxfleet.ir.names import unique
from jaxfleet.passes._rows_alike import keeps_rows
from jaxfleet.passes._slice_sums import Slices, SliceSums, slices_written_out
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("stride_slices")
@dataclass(frozen=True)
class StrideSlices(Pass):
    """Divides sums over slices of the batch that a loop of Python's wrote out.

    `x[0:4]`, `x[4:8]` and `x[8:12]` are neighbouring rows, of which a device has all or none. Where
    the same is computed of each slice and the results are only added up, it does not matter which
    slice a row is in. So slice `i` becomes rows `i`, `i + 3`, `i + 6`, ..., and each device has an
    equal part of it.

    A program is left as it is where slices are treated differently or meet in anything but a sum
    of all, where something of one slice is returned, or where a row's place matters (random
    numbers, positions, normalization within a slice). Runs before `grad_allreduce`, on a program
    whose batch is a number.

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

    devices: int = 2  # how many devices share the batch

    def run(self, program: Program) -> Program:
        cuts = slices_written_out(program)
        if cuts is None or cuts.rows % self.devices:
            return program
        sums = SliceSums(program, cuts)
        if not sums.holds():
            return program
        candidate = self._strided(program, cuts)
        return candidate if self._is_exact(candidate, sums) else program

    def _strided(self, program: Program, cuts: Slices) -> Program:
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
            op = Operator(
                kind, Operands.of(given), Operands.of(out), role=like.role, source=like.source
            )
            ops.append(made_by(replace(op, attrs=op.attrs.updated(**attrs)), self))

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
        """Whether what is computed of a slice is a sum over its rows, wherever they stand."""
        mesh, cut = mesh_of(program, self.devices)
        plan = infer(program, mesh, sharded_inputs=cut, held=summed(program))
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
        for place in of_slices:  # rows from elsewhere would meet others than before
            read = zip(program.root.ops[place].inputs, planned[place].labels, strict=True)
            made = {*sums.parts, *_strided_of(program)}
            if any(label.is_sharded and name not in made for name, label in read):
                return False
        inner = [block for place in of_slices for block in _inside(program, place)]
        whole = all(keeps_rows(plan, block) for block in inner)
        return whole and keeps_rows(plan, program.root, of_slices)


def _strided_of(program: Program) -> set[str]:
    """Returns what the pass made of slices, before their axis is taken out."""
    ops = (op for op in program.root.ops if op.source.made_by == StrideSlices.name)
    return {name for op in ops for name in op.writes}


def _inside(program: Program, place: int) -> Iterator[Block]:
    """Yields the blocks of an operator of block 0, at any depth."""
    waiting = list(program.root.ops[place].blocks)
    while waiting:
        block = program.blocks[waiting.pop()]
        waiting += [index for op in block.ops for index in op.blocks]
        yield block
