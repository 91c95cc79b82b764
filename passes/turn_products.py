"""Have a product come out as its reader wants it, instead of transposing it afterwards."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from jaxfleet.analysis.uses import OuterUses
from jaxfleet.ir import Attrs, Block, Kind, Operator, Program
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("turn_products")
@dataclass(frozen=True)
class TurnProducts(Pass):
    """Swaps the operands of products that are transposed afterwards.

    jax's gradient of a weight matrix is a product of the wrong orientation, and a transpose. Under
    `jit`, XLA's partitioner puts the all-reduce between the two. Here it stands behind the
    transpose, which XLA then merges with the product, once that is a plain product of matrices: the
    result reads both operands against their grain, and XLA:CPU has no fast kernel for it. Half of
    a transformer's products were so, and its step took 1.13 of the processor time under `jit`.
    With its operands swapped the product is right as it comes, and nothing is transposed. Runs
    before `grad_allreduce`.

    A product may add up in another order then, so its last bits may differ.

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
            """Whether a value is made once, here, and read by so many alone."""
            variable = block.variables.get(name)
            is_temp = variable is not None and variable.kind is Kind.TEMP
            return is_temp and writes[name] == 1 and readers in {None, reads[name]}

        ops: dict[int, Operator] = {}
        made_at: dict[str, int] = {}  # a product -> its place
        for place, op in enumerate(block.ops):
            at = made_at.get(op.reads[0]) if op.type == "jax.transpose" and op.reads else None
            if at is not None and is_own(op.reads[0], 1) and is_own(op.writes[0]):
                turned = _with_operands_swapped(program, block, ops[at], op)
                if turned is not None:
                    # There the operands surely are what the product reads.
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
    """Returns the product that makes what the transpose does, or None where none does."""
    (contract, batch), precision = _numbers(product), product.attrs.get("precision")
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


def _numbers(product: Operator) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the axes that are contracted, and those that are paired, of both operands."""
    numbers: Any = product.attrs["dimension_numbers"]
    contract, batch = numbers
    return contract, batch
