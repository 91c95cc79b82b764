"""Peephole rewrites: transposed products, and operands of which only the shape is needed."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.ir import Attrs, Block, Kind, Operand, Operands, Operator, Program
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("turn_products")
@dataclass(frozen=True)
class TurnProducts(Pass):
    """Swaps the operands of products that are transposed afterwards.

    jax's gradient of a weight matrix is a product of the wrong orientation, and a transpose. Under
    `jit`, XLA's partitioner puts the all-reduce between the two. Here it follows the transpose,
    which XLA then merges with the product; the merged product reads both operands against their
    layout, and XLA:CPU has no fast kernel for it. Half of a transformer's products were affected,
    and its step took 1.13 of the processor time under `jit`. With its operands swapped the product
    needs no transpose. Runs before `grad_allreduce`.

    The order of additions may change, so the last bits of a product may differ.

    Before::

        program p {batch=<b>}
          data  x: f32[b,3]
          data  y: f32[b,4]
          param w: f32[3,4]
          block 0
            backward
              turned: f32[4,3] = jax.dot_general(y, x) {dimension_numbers=[[[0], [0]], [[], []]]}
              w@GRAD: f32[3,4] = jax.transpose(turned) {permutation=[1, 0]} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)

    After::

        program p {batch=<b>}
          data  x: f32[b,3]
          data  y: f32[b,4]
          param w: f32[3,4]
          block 0
            backward
              w@GRAD: f32[3,4] = jax.dot_general(x, y) {dimension_numbers=[[[0], [0]], [[], []]]} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)
    """  # noqa: E501  # an operator stands on one line

    def run(self, program: Program) -> Program:
        uses = OuterUses(program)
        after = program.with_blocks(self._turned(program, b, uses) for b in program.blocks)
        return program if after == program else after

    def _turned(self, program: Program, block: Block, uses: OuterUses) -> Block:
        reads = Counter(name for op in block.ops for name in uses.of(op).reads)
        reads.update(item for item in block.results if isinstance(item, str))
        writes = Counter(name for op in block.ops for name in uses.of(op).writes)

        def is_own(name: str, readers: int | None = None) -> bool:
            """Whether a value is made once, in this block, and read only by `readers` operators."""
            variable = block.variables.get(name)
            is_temp = variable is not None and variable.kind is Kind.TEMP
            return is_temp and writes[name] == 1 and readers in {None, reads[name]}

        ops: dict[int, Operator] = {}
        made_at: dict[str, int] = {}  # product -> its index
        for place, op in enumerate(block.ops):
            at = made_at.get(op.reads[0]) if op.type == "jax.transpose" and op.reads else None
            if at is not None and is_own(op.reads[0], 1) and is_own(op.writes[0]):
                turned = _with_operands_swapped(program, block, ops[at], op)
                if turned is not None:
                    # There the operands are certainly those that the product reads.
                    ops[at], made_at[op.writes[0]] = made_by(turned, self), at
                    continue
            ops[place] = op
            if op.type == "jax.dot_general":
                made_at[op.writes[0]] = place
        if len(ops) == len(block.ops):
            return block
        kept = {name for op in ops.values() for name in uses.of(op).writes}
        gone = {name for op in block.ops for name in op.writes} - kept
        variables = {name: v for name, v in block.variables.items() if name not in gone}
        return replace(block, ops=tuple(ops.values()), variables=variables)


def _with_operands_swapped(
    program: Program, block: Block, product: Operator, transpose: Operator
) -> Operator | None:
    """Returns the product that replaces product and transpose, or None if there is none."""
    numbers: Any = product.attrs["dimension_numbers"]
    (contract, batch), precision = numbers, product.attrs.get("precision")
    if product.role != transpose.role or isinstance(precision, tuple):  # one for each operand
        return None
    free = []
    for operand in product.inputs:
        if not isinstance(operand, str):
            return None
        rank = len(program.lookup(operand, block).shape or ())
        free.append(rank - len(contract[0]) - len(batch[0]))
    count, left = len(batch[0]), free[0]
    axes = range(sum(free) + count)
    wanted = (*axes[:count], *axes[count + left :], *axes[count : count + left])
    if transpose.attrs["permutation"] != wanted:
        return None
    numbers = (contract[::-1], batch[::-1])
    return replace(
        product,
        inputs=product.inputs.replaced(product.inputs[::-1]),
        outputs=transpose.outputs,
        attrs=Attrs({**product.attrs, "dimension_numbers": numbers}),
        role_var=transpose.role_var or product.role_var,
    )


# The gradients of sums and differences read no element of the summands.
_NEED_SHAPES_ALONE = frozenset({"elementwise_add_grad", "elementwise_sub_grad"})
_OUT_GRAD = "Out@GRAD"


@register_pass("shape_reads")
@dataclass(frozen=True)
class ShapeReads(Pass):
    """Makes gradients of sums read the output's gradient instead of a summand of the same shape.

    Fluid's `elementwise_add_grad` names the summands, of which it needs only the shape. XLA removes
    the read within one executable; a value that another executable reads is held until then. With
    the output's gradient in its place, which has the same type and is read in any case, the value
    is freed after its last read in forward. Results are unchanged.

    Before::

        program p
          data  x: f32[b,4]
          param w: f32[4]
          block 0
            forward
              a: f32[b,4] = jax.sin(x)
              Out=sum: f32[b,4] = elementwise_add(X=a, Y=w)
              g: f32[b,4] = jax.cos(sum)
            backward
              X@GRAD=a@GRAD: f32[b,4], Y@GRAD=w@GRAD: f32[4] = elementwise_add_grad(Out@GRAD=g, X=a, Y=w)

    After::

        program p
          data  x: f32[b,4]
          param w: f32[4]
          block 0
            forward
              a: f32[b,4] = jax.sin(x)
              Out=sum: f32[b,4] = elementwise_add(X=a, Y=w)
              g: f32[b,4] = jax.cos(sum)
            backward
              X@GRAD=a@GRAD: f32[b,4], Y@GRAD=w@GRAD: f32[4] = elementwise_add_grad(Out@GRAD=g, X=g, Y=w)
    """  # noqa: E501  # an operator is one line

    def run(self, program: Program) -> Program:
        made = program.with_blocks(
            block.with_ops(self._lighter(program, block, op) for op in block.ops)
            for block in program.blocks
        )
        return program if made == program else made

    def _lighter(self, program: Program, block: Block, op: Operator) -> Operator:
        grads = op.inputs.slot(_OUT_GRAD)
        if op.type not in _NEED_SHAPES_ALONE or len(grads) != 1:
            return op
        (grad,) = grads
        like = program.lookup(str(grad), block)

        def read(name: Operand) -> Operand:
            variable = program.lookup(str(name), block)
            is_alike = (variable.dtype, variable.shape) == (like.dtype, like.shape)
            return grad if is_alike else name

        slots = [
            (slot, names if slot == _OUT_GRAD else tuple(map(read, names)))
            for slot, names in op.inputs.slots
        ]
        inputs = Operands(slots)
        return op if inputs == op.inputs else made_by(replace(op, inputs=inputs), self)
