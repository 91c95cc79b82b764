"""Give gradient operators that need only a shape a value that lies there anyway."""

from dataclasses import dataclass, replace

from jaxfleet.ir import Block, Operand, Operands, Operator, Program
from jaxfleet.pipeline import Pass, made_by, register_pass

# The gradients of sums and differences read no element of what was added.
_NEED_SHAPES_ALONE = frozenset({"elementwise_add_grad", "elementwise_sub_grad"})
_OUT_GRAD = "Out@GRAD"


@register_pass("shape_reads")
@dataclass(frozen=True)
class ShapeReads(Pass):
    """Makes gradients of sums read the gradient of the sum where they read a value of its shape.

    Fluid's `elementwise_add_grad` names what was added, of which it needs the shape and no
    element. XLA finds that out within one executable; a value that is read in another is held
    until then. With the output's gradient in its place, which has the same type and is read in any
    case, the value is free when forward has read it. No result changes.

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
