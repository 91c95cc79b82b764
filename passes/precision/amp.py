"""Automatic mixed precision (AMP): products in half precision, everything else in single."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.flow import Flow, FlowValue, inner_blocks
from jaxfleet.errors import PassError
from jaxfleet.ir import Block, Operands, Operator, Program, Role, Variable, Word
from jaxfleet.ir.naming import unique
from jaxfleet.passes.building_blocks import (
    check_gradients_are_known,
    conversion,
    op_like,
    with_extra_variables,
)
from jaxfleet.passes.precision.skip_nonfinite import SCALE, scale_variable
from jaxfleet.pipeline import Pass, made_by, register_pass

_PRODUCTS = frozenset({"jax.dot_general", "jax.conv_general_dilated"})
_DTYPES = {"bfloat16": "bf16", "float16": "f16"}
_BFLOAT16 = {"exponent_bits": 8, "mantissa_bits": 7}
_COMPUTED = frozenset({Role.FORWARD, Role.FORWARD_LOSS, Role.BACKWARD, Role.BACKWARD_LOSS})


@register_pass("half_precision")
@dataclass(frozen=True)
class HalfPrecision(Pass):
    """Rounds operands of products and convolutions, forward and backward, to half precision.

    These dominate the time, and hardware computes them faster so. Products are accumulated and
    returned in float32, and all state stays float32; the optimizer is unchanged.

    float16 has a small exponent range: operands of backward's products may vanish in it. With
    `loss_scale` above 0 each such value is first multiplied by a scale, and the product divided by
    it: as all of backward is linear, that is the gradient of a scaled loss, scaled back, bit for
    bit if the scale is a power of two. The scale is a state variable (`amp.scale`), adjusted by
    `skip_overflow`, which must come after. In loops, whose blocks cannot read the scale, backward
    stays in float32.

    XLA for CPUs lacks some products of two bfloat16 arrays that accumulate in float32; which ones
    depends on the layouts that it chooses. With `emulate` operands are rounded to bfloat16 and stay
    float32, so that the result is the same; convolutions are not affected.

    Before::

        program p
          data  x: f32[4,3]
          param w: f32[3]
          block 0
            forward
              y: f32[4] = jax.dot_general(x, w) {dimension_numbers=[[[1], [0]], [[], []]], preferred_element_type=f32}
            optimize
              fetch(y)

    After::

        program p
          data  x: f32[4,3]
          param w: f32[3]
          block 0
            forward
              x.half: bf16[4,3] = jax.convert_element_type(x) {new_dtype=bf16, weak_type=false}
              w.half: bf16[3] = jax.convert_element_type(w) {new_dtype=bf16, weak_type=false}
              y: f32[4] = jax.dot_general(x.half, w.half) {dimension_numbers=[[[1], [0]], [[], []]], preferred_element_type=f32}
            optimize
              fetch(y)
    """  # noqa: E501  # an operator stands on one line

    dtype: str = "bfloat16"
    loss_scale: float = 0.0  # the initial scale; 0: backward is not scaled
    emulate: bool = False  # for bfloat16, round operands of products and keep them float32

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            hint = f"it is one of {', '.join(_DTYPES)}"
            raise PassError(f"half_precision: dtype is {self.dtype!r}", hint=hint)

    def emulates(self, product: Operator) -> bool:
        """Whether a product's operands are rounded and stay float32."""
        return self.emulate and self.dtype == "bfloat16" and product.type == "jax.dot_general"

    def run(self, program: Program) -> Program:
        if self.loss_scale > 0:
            check_gradients_are_known(program, self.name)
        computing = [op for op in program.root.ops if op.role in _COMPUTED]
        # Loops of the optimizer stay as they are.
        changed = {0, *(block.index for block in inner_blocks(program, computing))}
        scaled = _cotangents(program) if self.loss_scale > 0 else set[FlowValue]()
        taken = {*program.variables, *(n for block in program.blocks for n in block.variables)}
        blocks = [
            _Rounding(self, program, block, scaled, taken).run()
            if block.index in changed
            else block
            for block in program.blocks
        ]
        made = replace(program, blocks=tuple(blocks))
        return with_extra_variables(made, [(scale_variable(), self.loss_scale)]) if scaled else made


def _cotangents(program: Program) -> set[FlowValue]:
    """Returns the values that backward computes from the loss's gradient, also in loops."""
    flow, starts = Flow.of(program), set[FlowValue]()
    for place, op in enumerate(program.root.ops):
        if op.role in {Role.BACKWARD, Role.BACKWARD_LOSS}:
            starts.update(FlowValue(0, place, n) for n in range(len(op.writes)))
    return starts | flow.reached(starts, lambda _: True)


@dataclass
class _Rounding:
    made: HalfPrecision
    program: Program
    block: Block
    scaled: set[FlowValue]
    taken: set[str]
    ops: list[Operator] = field(default_factory=list)
    declared: list[Variable] = field(default_factory=list)
    halves: dict[tuple[str, bool, bool], str] = field(default_factory=dict)
    cotangents: set[str] = field(default_factory=set)

    def run(self) -> Block:
        self._note(self.block.args, -1)
        for place, op in enumerate(self.block.ops):
            if op.type in _PRODUCTS and self._is_wide(op) and op.role in _COMPUTED:
                self._product(op)
            else:
                self.ops.append(op)
            for key in [key for key in self.halves if key[0] in op.writes]:
                del self.halves[key]
            self._note(op.writes, place)
        return self.block.with_ops(self.ops, declare=self.declared)

    def _note(self, names: Iterable[str], place: int) -> None:
        for count, name in enumerate(names):
            value = FlowValue(self.block.index, place if place >= 0 else -1, count)
            (self.cotangents.add if value in self.scaled else self.cotangents.discard)(name)

    def _is_wide(self, op: Operator) -> bool:
        names = [x for x in (*op.inputs, *op.writes) if isinstance(x, str)]
        dtypes = {self.program.lookup(name, self.block).dtype for name in names}
        return dtypes == {"f32"} and len(op.reads) == len(op.inputs)

    def _product(self, op: Operator) -> None:
        scaled = next((n for n, x in enumerate(op.reads) if x in self.cotangents), None)
        if scaled is not None and self.block.index:
            self.ops.append(op)  # a function's block does not see the scale
            return
        rounded = self.made.emulates(op)
        halves = [
            self._half(x, op, scaled=n == scaled, rounded=rounded) for n, x in enumerate(op.reads)
        ]
        attrs = op.attrs.updated(preferred_element_type=Word("f32"))
        product = replace(op, inputs=op.inputs.replaced(halves), attrs=attrs)
        if scaled is None:
            self._add(product)
            return
        (out,) = op.writes
        wide = self._new(out, "f32", "scaled")
        self._add(replace(product, outputs=Operands.of(wide), role_var=()))
        self._add(replace(op_like(op, "jax.div", (wide, SCALE), out), role_var=op.role_var))

    def _half(self, name: str, op: Operator, *, scaled: bool, rounded: bool) -> str:
        """Returns the name of a value in half precision, multiplied by the loss scale if `scaled`.

        With `rounded` it stays float32.
        """
        if (name, scaled, rounded) not in self.halves:
            wide = name
            if scaled:
                wide = self._new(name, "f32", "scaled")
                self._add(op_like(op, "jax.mul", (name, SCALE), wide))
            dtype = "f32" if rounded else _DTYPES[self.made.dtype]
            half = self._new(name, dtype, "half")
            if rounded:
                made = op_like(op, "jax.reduce_precision", (wide,), half, **_BFLOAT16)
            else:
                made = replace(conversion(wide, half, dtype), role=op.role, source=op.source)
            self._add(made)
            self.halves[name, scaled, rounded] = half
        return self.halves[name, scaled, rounded]

    def _new(self, name: str, dtype: str, suffix: str) -> str:
        new = unique(f"{name}.{suffix}", self.taken)
        self.taken.add(new)
        shape = self.program.lookup(name, self.block).shape
        self.declared.append(Variable(new, dtype, shape))
        return new

    def _add(self, op: Operator) -> None:
        self.ops.append(made_by(op, self.made))
