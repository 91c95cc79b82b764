"""Fluid's multi_batch_merge_pass: several forward and backward passes, one update by their mean."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    BlockRef,
    Operands,
    Operator,
    Program,
    Role,
    Source,
    Variable,
)
from jaxfleet.ir.attributes import map_attr
from jaxfleet.passes.fluid import ranks
from jaxfleet.pipeline import Pass, made_by, register_pass

_REPEATED = frozenset({Role.FORWARD, Role.FORWARD_LOSS, *ranks.BACKWARD})
_RUN = "Run"  # the slot by which random operators distinguish runs
_APART = 0x9E3779B1  # between the seeds of repeats, for different masks
_SEEDS = 1 << 31
_STATISTICS = ("Mean", "Variance")


@register_pass("multi_batch_merge")
@dataclass(frozen=True)
class MultiBatchMerge(Pass):
    """Runs forward and backward `repeats` times, and updates once by the mean of the gradients.

    Implements fluid's pass of that name, by roles: each repeat reads the same fed data, with its
    own dropout masks, for which sub-blocks with random operators are copied, and its gradients are
    named `w@GRAD.repeat.0` and so on. A batch_norm keeps running statistics of each repeat,
    `mean.repeat.0`, which the startup program must initialize, as in fluid. Fetched values are the
    last repeat's.

    Runs after `minimize`, and before the pass that sums gradients over devices, so that it sums
    them once.

    Before::

        program p
          data  x: f32[b,3]
          param w: f32[3,1]
          state rate: f32[1]
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
              ParamOut=w = sgd(Grad=w@GRAD, LearningRate=rate, Param=w) for (w, w@GRAD)

    After::

        program p
          data  x: f32[b,3]
          param w: f32[3,1]
          state rate: f32[1]
          block 0
            forward
              Out=h: f32[b,1] = mul(X=x, Y=w)
            forward|loss
              Out=loss: f32[1] = mean(X=h)
            backward|loss
              Out=loss@GRAD: f32[1] = fill_constant() {shape=[1], value=1.0}
            backward
              X@GRAD=h@GRAD: f32[b,1] = mean_grad(Out@GRAD=loss@GRAD, X=h)
              Y@GRAD=w@GRAD.repeat.0: f32[3,1] = mul_grad(Out@GRAD=h@GRAD, X=x, Y=w)
            forward
              Out=h = mul(X=x, Y=w)
            forward|loss
              Out=loss = mean(X=h)
            backward|loss
              Out=loss@GRAD = fill_constant() {shape=[1], value=1.0}
            backward
              X@GRAD=h@GRAD = mean_grad(Out@GRAD=loss@GRAD, X=h)
              Y@GRAD=w@GRAD.repeat.1: f32[3,1] = mul_grad(Out@GRAD=h@GRAD, X=x, Y=w)
              Out=w@GRAD: f32[3,1] = sum(X=[w@GRAD.repeat.0, w@GRAD.repeat.1])
              Out=w@GRAD = scale(X=w@GRAD) {scale=0.5} for (w, w@GRAD)
            optimize
              ParamOut=w = sgd(Grad=w@GRAD, LearningRate=rate, Param=w) for (w, w@GRAD)
    """

    repeats: int = 2  # number of gradient computations

    def run(self, program: Program) -> Program:
        if self.repeats < 1:
            raise PassError(f"{self.name}: {self.repeats} repeats", hint="num_repeats is 1 or more")
        ranks.check_finished_in_root(program, self.name)
        ops = [op for op in program.root.ops if op.role in _REPEATED]
        rest = [op for op in program.root.ops if op.role not in _REPEATED]
        written = {name for op in ops for name in op.writes}
        pairs = dict.fromkeys(pair for op in rest for pair in op.role_var)
        gradients = {gradient: param for param, gradient in pairs if gradient in written}
        if not gradients:
            what = f"{self.name}: '{program.name}' updates no parameter"
            raise PassError(what, hint="call minimize before")
        kept = _statistics(ops)
        own = {*gradients, *kept}
        blocks = _DrawingBlocks(program)
        copies = [
            made_by(_of_this_repeat(op, at, own, blocks), self)
            for at in range(self.repeats)
            for op in ops
        ]
        source = ops[-1].source
        for gradient, param in gradients.items():
            copies += [made_by(op, self) for op in self._mean(param, gradient, source)]
        root = program.root.with_ops([*copies, *rest], declare=self._parts(program, gradients))
        state = {v.name: v for name in kept for v in self._of_repeats(program.variables[name])}
        made = program.with_blocks([root, *program.blocks[1:], *blocks.copies])
        return replace(made, variables={**made.variables, **state})

    def _mean(self, param: str, gradient: str, source: Source) -> Iterator[Operator]:
        parts = tuple(_of_repeat(gradient, at) for at in range(self.repeats))
        out = Operands.named(Out=gradient)
        yield Operator("sum", Operands((("X", parts),)), out, role=Role.BACKWARD, source=source)
        yield Operator(
            "scale", Operands.named(X=gradient), out, Attrs({"scale": 1.0 / self.repeats}),
            Role.BACKWARD, ((param, gradient),), source,
        )  # fmt: skip

    def _parts(self, program: Program, gradients: dict[str, str]) -> Iterator[Variable]:
        for gradient in gradients:
            yield from self._of_repeats(program.root.variables[gradient])

    def _of_repeats(self, variable: Variable) -> Iterator[Variable]:
        for at in range(self.repeats):
            yield replace(variable, name=_of_repeat(variable.name, at))


def _of_repeat(name: str, at: int) -> str:
    return f"{name}.repeat.{at}"


def _statistics(ops: list[Operator]) -> list[str]:
    norms = [op for op in ops if op.type == "batch_norm"]
    found = (name for op in norms for slot in _STATISTICS for name in op.inputs.slot(slot))
    return list(dict.fromkeys(map(str, found)))


def _of_this_repeat(op: Operator, at: int, own: set[str], blocks: "_DrawingBlocks") -> Operator:
    names = {name: _of_repeat(name, at) for name in own & {*op.reads, *op.writes}}
    role_var = () if own & {*op.writes} else op.role_var
    op = replace(
        op, inputs=op.inputs.renamed(names), outputs=op.outputs.renamed(names), role_var=role_var
    )
    return blocks.drawing_anew(op, at) if at else op


class _DrawingBlocks:
    """Copies the sub-blocks with random operators for each repeat, with other seeds."""

    def __init__(self, program: Program) -> None:
        self.copies: list[Block] = []
        self._program = program
        self._known: dict[int, bool] = {}

    def drawing_anew(self, op: Operator, at: int, parent: int = 0) -> Operator:
        """Returns an operator of repeat `at`, in block `parent`, with random seeds of its own.

        All sub-blocks of a copied block are copied, since a sub-block follows its parent.
        """
        attrs = op.attrs
        if op.inputs.slot(_RUN):
            attrs = attrs.updated(seed=(int(str(attrs["seed"])) + at * _APART) % _SEEDS)
        if op.blocks and (parent or any(map(self._draws, op.blocks))):
            copied = {index: self._copy(index, at, parent) for index in op.blocks}

            def moved(value: Attr) -> Attr:
                return BlockRef(copied[value.index]) if isinstance(value, BlockRef) else value

            attrs = Attrs({name: map_attr(value, moved) for name, value in attrs.items()})
        return replace(op, attrs=attrs)

    def _copy(self, index: int, at: int, parent: int) -> int:
        place = len(self._program.blocks) + len(self.copies)
        block = replace(self._program.blocks[index], index=place, parent=parent)
        self.copies.append(block)
        ops = [self.drawing_anew(op, at, place) for op in block.ops]
        self.copies[place - len(self._program.blocks)] = block.with_ops(ops)
        return place

    def _draws(self, index: int) -> bool:
        if index not in self._known:
            self._known[index] = any(
                op.inputs.slot(_RUN) or any(map(self._draws, op.blocks))
                for op in self._program.blocks[index].ops
            )
        return self._known[index]
