"""Fluid's automatic mixed precision: products in half precision, and a scaled loss, by roles.

Unlike `half_precision`, it relies on roles that mark the beginning of backward and the operators
that finish gradients. One product scales all of backward, and one operator removes the scale. The
inserted operators are fluid's own, so the result converts back to fluid's program.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Attrs, Operands, Operator, Program, Role, Size, Variable
from jaxfleet.ir.naming import unique
from jaxfleet.passes.fluid import ranks
from jaxfleet.pipeline import Pass, made_by, register_pass

_DTYPES = {"float16": "f16", "bfloat16": "bf16"}
_SHORT = {"float16": "fp16", "bfloat16": "bf16"}  # suffixes of names, as in fluid
Slots: TypeAlias = Mapping[str, tuple[str, ...]]


@register_pass("amp_by_role")
@dataclass(frozen=True)
class AmpByRole(Pass):
    """Casts operands and results of products and convolutions to half precision; scales the loss.

    Products dominate the time, and hardware computes them faster in half precision. Everything
    else, above all state, stays float32. As small gradients vanish in float16, the gradient of the
    loss is multiplied by `scale` where backward begins. Before any operator reads the gradients of
    parameters they are divided by it; if one is not finite, all become zeros. The scale is doubled
    after `incr_every_n_steps` consecutive finite steps, and multiplied by 0.8 after
    `decr_every_n_nan_or_inf` non-finite ones. A scale that is not dynamic is constant, and
    gradients are divided by it, finite or not.

    Runs after `minimize`, and before the pass that sums gradients over ranks: sums are of scaled
    gradients in float32, so that all ranks see the same infinities.

    Before::

        program p
          data  x: f32[b,3]
          param w: f32[3,1]
          state rate: f32[1]
          state loss_scaling: f32[1]
          state num_good_steps: i32[1]
          state num_bad_steps: i32[1]
          block 0
            forward
              Out=h: f32[b,1] = mul(X=x, Y=w)
            forward|loss
              Out=loss: f32[1] = mean(X=h)
            backward|loss
              Out=loss@GRAD: f32[1] = fill_constant() {shape=[1], value=1.0}
            backward
              X@GRAD=h@GRAD: f32[b,1] = mean_grad(Out@GRAD=loss@GRAD, X=h)
              Y@GRAD=w@GRAD: f32[3,1] = mul_grad(Out@GRAD=h@GRAD, X=x, Y=w) for (w, w@GRAD)
            optimize
              ParamOut=w = sgd(Grad=w@GRAD, LearningRate=rate, Param=w)

    After::

        program p
          data  x: f32[b,3]
          param w: f32[3,1]
          state rate: f32[1]
          state loss_scaling: f32[1]
          state num_good_steps: i32[1]
          state num_bad_steps: i32[1]
          block 0
            forward
              Out=x.cast_fp16: f16[b,3] = cast(X=x) {out_dtype="float16"}
              Out=w.cast_fp16: f16[3,1] = cast(X=w) {out_dtype="float16"}
              Out=h.cast_fp16: f16[b,1] = mul(X=x.cast_fp16, Y=w.cast_fp16)
              Out=h: f32[b,1] = cast(X=h.cast_fp16) {in_dtype="float16"}
            forward|loss
              Out=loss: f32[1] = mean(X=h)
            backward|loss
              Out=loss@GRAD: f32[1] = fill_constant() {shape=[1], value=1.0}
            backward
              Out=loss@GRAD.scaled: f32[1] = elementwise_mul(X=loss@GRAD, Y=loss_scaling)
              X@GRAD=h@GRAD: f32[b,1] = mean_grad(Out@GRAD=loss@GRAD.scaled, X=h)
              Out=h@GRAD.cast_fp16: f16[b,1] = cast(X=h@GRAD) {out_dtype="float16"}
              Y@GRAD=w@GRAD.cast_fp16: f16[3,1] = mul_grad(Out@GRAD=h@GRAD.cast_fp16, X=x.cast_fp16, Y=w.cast_fp16)
              Out=w@GRAD: f32[3,1] = cast(X=w@GRAD.cast_fp16) {in_dtype="float16"} for (w, w@GRAD)
            optimize
              FoundInfinite=found_infinite: bool[1], Out=w@GRAD = unscale_or_zero(Scale=loss_scaling, X=w@GRAD)
              LossScaling=loss_scaling, OutBadSteps=num_bad_steps, OutGoodSteps=num_good_steps = update_loss_scaling(FoundInfinite=found_infinite, InBadSteps=num_bad_steps, InGoodSteps=num_good_steps, PrevLossScaling=loss_scaling)
              ParamOut=w = sgd(Grad=w@GRAD, LearningRate=rate, Param=w)
    """  # noqa: E501  # an operator stands on one line

    scale: str = "loss_scaling"  # state, f32[1], initialized by the caller
    good: str = "num_good_steps"  # state, i32[1]
    bad: str = "num_bad_steps"  # state, i32[1]
    dtype: str = "float16"
    incr_every_n_steps: int = 1000
    decr_every_n_nan_or_inf: int = 2
    incr_ratio: float = 2.0
    decr_ratio: float = 0.8
    is_dynamic: bool = True
    products: tuple[str, ...] = ("conv2d", "matmul", "mul")  # computed in half precision
    float32_variables: tuple[str, ...] = ()  # operators that use one of them are not

    def run(self, program: Program) -> Program:
        self._check(program)
        return _Rewriting(self, program).run()

    def _check(self, program: Program) -> None:
        if self.dtype not in _DTYPES:
            hint = f"it is one of {', '.join(_DTYPES)}"
            raise PassError(f"{self.name}: dtype is {self.dtype!r}", hint=hint)
        for name in (self.scale, self.good, self.bad):
            if name not in program.variables:
                what = f"{self.name}: '{program.name}' has no '{name}'"
                raise PassError(what, hint="declare it, as state of one number")
        ranks.check_finished_in_root(program, self.name)
        if any(map(self._takes_scale_out, program.root.ops)):
            what = f"{self.name}: the program scales its loss already"
            raise PassError(what, hint="ask for mixed precision once")
        if not any(op.role in ranks.BACKWARD and op.role_var for op in program.root.ops):
            what = f"{self.name}: no operator is marked as finishing a parameter's gradient"
            raise PassError(what, hint="call minimize before")

    def _takes_scale_out(self, op: Operator) -> bool:
        divides = op.type == "elementwise_div" and self.scale in op.reads
        return divides or op.type == "update_loss_scaling"


@dataclass
class _Rewriting:
    """Rewrites block 0; other blocks stay in float32."""

    made: AmpByRole
    program: Program
    ops: list[Operator] = field(default_factory=list)
    declared: list[Variable] = field(default_factory=list)
    halves: dict[str, str] = field(default_factory=dict)
    scaled: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        variables = (block.variables for block in self.program.blocks)
        products = self.made.products
        self.cast = {*products, *(f"{name}_grad" for name in products)}
        self.taken = {*self.program.variables, *(name for found in variables for name in found)}

    def run(self) -> Program:
        root = self.program.root
        finish = [n for n, op in enumerate(root.ops) if op.role in ranks.BACKWARD and op.role_var]
        for place, op in enumerate(root.ops):
            is_later = op.role in ranks.BACKWARD
            self._operator(replace(op, inputs=op.inputs.renamed(self.scaled)) if is_later else op)
            if op.role is Role.BACKWARD_LOSS:
                self._scale(op)
            if place == finish[-1]:
                self._unscale(op, [g for n in finish for _, g in root.ops[n].role_var])
        return self.program.with_block(root.with_ops(self.ops, declare=self.declared))

    def _operator(self, op: Operator) -> None:
        if op.type in self.cast and self._is_wide(op):
            self._product(op)
            return
        self.ops.append(op)
        for name in op.writes:
            self.halves.pop(name, None)

    def _is_wide(self, op: Operator) -> bool:
        names = {*op.reads, *op.writes}
        dtypes = {self.program.lookup(name).dtype for name in names}
        return dtypes == {"f32"} and names.isdisjoint(self.made.float32_variables)

    def _product(self, op: Operator) -> None:
        reads = {name: self._half(name, op) for name in op.reads}
        writes = {name: self._new_half(name) for name in op.writes}
        inputs, outputs = op.inputs.renamed(reads), op.outputs.renamed(writes)
        self._add(replace(op, inputs=inputs, outputs=outputs, role_var=()))
        for name, half in writes.items():
            pairs = tuple(pair for pair in op.role_var if pair[1] == name)
            back = self._cast(half, name, op, in_dtype=self.made.dtype)
            self._add(replace(back, role_var=pairs))
            self.halves[name] = half

    def _half(self, name: str, op: Operator) -> str:
        """Returns the name of a value in half precision; casts it on first use."""
        if name not in self.halves:
            self.halves[name] = self._new_half(name)
            self._add(self._cast(name, self.halves[name], op, out_dtype=self.made.dtype))
        return self.halves[name]

    def _cast(self, name: str, out: str, op: Operator, **attrs: str) -> Operator:
        role = Role.FORWARD if op.role.is_forward else Role.BACKWARD
        return _operator("cast", {"X": (name,)}, {"Out": (out,)}, role, op, **attrs)

    def _scale(self, begins: Operator) -> None:
        """Scales the initial gradient of backward into a new variable; the original may be fed."""
        (loss,) = begins.writes
        self.scaled[loss] = self._new(f"{loss}.scaled", "f32", like=loss)
        reads, writes = {"X": (loss,), "Y": (self.made.scale,)}, {"Out": (self.scaled[loss],)}
        self._add(_operator("elementwise_mul", reads, writes, Role.BACKWARD, begins))

    def _unscale(self, like: Operator, gradients: Iterable[str]) -> None:
        """Divides gradients by the scale, and updates the scale."""
        made, names = self.made, tuple(dict.fromkeys(gradients))
        for name in names:
            if (dtype := self.program.lookup(name).dtype) != "f32":
                what = f"{made.name}: the gradient '{name}' is {dtype}"
                raise PassError(what, hint="mixed precision is for parameters in float32")
        if not made.is_dynamic:
            for name in names:
                divided: Slots = {"X": (name,), "Y": (made.scale,)}
                out = {"Out": (name,)}
                self._add(_operator("elementwise_div", divided, out, Role.OPTIMIZE, like))
            return
        found = self._new("found_infinite", "bool", shape=(1,))
        reads: Slots = {"Scale": (made.scale,), "X": names}
        writes: Slots = {"FoundInfinite": (found,), "Out": names}
        self._add(_operator("unscale_or_zero", reads, writes, Role.OPTIMIZE, like))
        reads = {
            "FoundInfinite": (found,),
            "InBadSteps": (made.bad,),
            "InGoodSteps": (made.good,),
            "PrevLossScaling": (made.scale,),
        }
        writes = {
            "LossScaling": (made.scale,),
            "OutBadSteps": (made.bad,),
            "OutGoodSteps": (made.good,),
        }
        options = ("incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio")
        values = {name: getattr(made, name) for name in options}
        changed = {name: x for name, x in values.items() if x != getattr(AmpByRole, name)}
        self._add(_operator("update_loss_scaling", reads, writes, Role.OPTIMIZE, like, **changed))

    def _new_half(self, name: str) -> str:
        dtype = self.made.dtype
        return self._new(f"{name}.cast_{_SHORT[dtype]}", _DTYPES[dtype], like=name)

    def _new(self, wanted: str, dtype: str, *, like: str = "", shape: tuple[Size, ...] = ()) -> str:
        name = unique(wanted, self.taken)
        self.taken.add(name)
        shape = self.program.lookup(like).shape if like else shape
        self.declared.append(Variable(name, dtype, shape))
        return name

    def _add(self, op: Operator) -> None:
        self.ops.append(made_by(op, self.made))


def _operator(
    op_type: str, reads: Slots, writes: Slots, role: Role, like: Operator, **attrs: Attr
) -> Operator:
    inputs, outputs = Operands(reads.items()), Operands(writes.items())
    return Operator(op_type, inputs, outputs, Attrs(attrs), role, source=like.source)
