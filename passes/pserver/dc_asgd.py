"""Delay compensation of late gradients on a server (DC-ASGD).

The corrected gradient is `g + c * g * g * (w - w')`, where `w'` is the sender's last received value
of the parameter `w` (Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay
Compensation", 2017; fluid's `c` is 1). Contains the operators for a captured step, and the pass for
programs in fluid's dialect.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from jaxfleet.analysis.updates import is_fluid_dialect
from jaxfleet.errors import PassError
from jaxfleet.ir import (
    Block,
    Kind,
    Literal,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
    trainer_name,
)
from jaxfleet.pipeline import Pass, made_by, register_pass

TRAINER_ID = "@TRAINER_ID@"  # the trainer whose gradient a block processes
COMPENSATED = ".compensated"


def compensated_name(gradient: str) -> str:
    """Returns the name of the corrected gradient."""
    return f"{gradient}{COMPENSATED}"


def compensation_ops(
    param: str, gradient: Variable, corrected: str, copies: Sequence[str], factor: float
) -> tuple[list[Operator], list[Variable]]:
    """Returns the operators that correct a gradient, and the variables that they make.

    The gradient is as a trainer sends it, and `copies` are the values of the parameter's slice that
    each trainer last received.
    """
    kept, moved, once, twice, scaled = (
        f"{param}.{name}" for name in ("local_bak", "moved", "once", "twice", "scaled")
    )
    times: list[tuple[str, tuple[str | Literal, ...], str]] = [
        ("jax.sub", (param, kept), moved),
        ("jax.mul", (moved, gradient.name), once),
        ("jax.mul", (once, gradient.name), twice),
    ]
    if factor != 1.0:
        by = Literal.of(factor, gradient.dtype)
        times.append(("jax.mul", (twice, by), scaled))
    times.append(("jax.add", (gradient.name, times[-1][2]), corrected))
    backup = Operands.named(TrainerId=(TRAINER_ID,), X=tuple(copies))
    ops = [Operator("ref_by_trainer_id", backup, Operands.named(Out=kept), role=Role.OPTIMIZE)]
    ops += [
        Operator(op_type, Operands.of(*reads), Operands.of(made), role=Role.OPTIMIZE)
        for op_type, reads, made in times
    ]
    made = [replace(gradient, name=op.writes[0], kind=Kind.TEMP) for op in ops]
    return ops, made


@register_pass("dc_asgd")
@dataclass(frozen=True)
class DcAsgd(Pass):
    """Corrects each gradient for the parameter's change since its trainer received it.

    A late gradient was computed from an old parameter `w'`; to first order, with the gradient's
    square for the curvature, the current one is `g + g * g * (w - w')` (Zheng et al., "Asynchronous
    Stochastic Gradient Descent with Delay Compensation", 2017; the factor is 1 as in fluid). A
    server keeps `w'`, the last received value, for every trainer.

    Before::

        program p.pserver0 {dialect="fluid", mode="half_async", role="pserver", trainers=2}
          data  g: f32[4]
          param w: f32[4]
          block 0
            rpc
              listen_and_serv(X=g) {grad_to_block_id=["g:1"], optimize_blocks=[^1]}
          block 1 in 0
            optimize
              ParamOut=w = sgd(Grad=g, Param=w) for (w, g)

    After::

        program p.pserver0 {backups=[["w", "w.trainer_0_bak"], ["w", "w.trainer_1_bak"]], dialect="fluid", mode="half_async", role="pserver", trainers=2}
          data  g: f32[4]
          data  "@TRAINER_ID@": i32[1]
          data  w.trainer_0_bak: f32[4]
          data  w.trainer_1_bak: f32[4]
          param w: f32[4]
          block 0
            rpc
              listen_and_serv(X=g) {dc_asgd=true, grad_to_block_id=["g:1"], optimize_blocks=[^1]}
          block 1 in 0
            optimize
              Out=w.local_bak: f32[4] = ref_by_trainer_id(TrainerId="@TRAINER_ID@", X=[w.trainer_0_bak, w.trainer_1_bak]) for (w, g)
              Out=tmp_dc_output_0: f32[4] = elementwise_sub(X=w, Y=w.local_bak) for (w, g)
              Out=tmp_dc_output_1: f32[4] = elementwise_mul(X=tmp_dc_output_0, Y=g) for (w, g)
              Out=tmp_dc_output_2: f32[4] = elementwise_mul(X=tmp_dc_output_1, Y=g) for (w, g)
              Out=tmp_dc_output_3: f32[4] = elementwise_add(X=g, Y=tmp_dc_output_2) for (w, g)
              ParamOut=w = sgd(Grad=tmp_dc_output_3, Param=w) for (w, g)
    """  # noqa: E501  # a program's attributes are one line

    runs_after = ("insert_send_recv",)

    def run(self, program: Program) -> Program:
        if not is_fluid_dialect(program) or program.attrs.get("role") != "pserver":
            return program
        if program.attrs.get("mode") == "sync":
            what = "dc_asgd: servers that wait for all trainers have no late gradients"
            raise PassError(what, hint="transpile with sync_mode=False")
        return _Rewrite(program, self).run()


@dataclass
class _Rewrite:
    """Rewrites a server's program for the pass `maker`."""

    program: Program
    maker: DcAsgd

    def __post_init__(self) -> None:
        self._numbers = count()
        self._backups: list[tuple[str, str]] = []
        self._fed: dict[str, Variable] = {}

    def run(self) -> Program:
        program = self.program
        self._fed[TRAINER_ID] = Variable(TRAINER_ID, "i32", (1,), Kind.DATA)
        (serve,) = program.root.ops
        root = program.root.with_ops([replace(serve, attrs=serve.attrs.updated(dc_asgd=True))])
        blocks = [root, *(self._block(block) for block in program.blocks[1:])]
        attrs = program.attrs.updated(backups=tuple(self._backups))
        data = {v.name: v for v in program.of_kind(Kind.DATA)}
        variables = {**data, **self._fed, **program.variables}
        return replace(program, blocks=tuple(blocks), variables=variables, attrs=attrs)

    def _block(self, block: Block) -> Block:
        ops: list[Operator] = []
        declared: list[Variable] = []
        for op in block.ops:
            if "Param" in dict(op.inputs.slots):
                (param,), (gradient,) = op.inputs.slot("Param"), op.inputs.slot("Grad")
                made = list(self._corrected(str(param), str(gradient), op, declared))
                ops += made
                ops.append(replace(op, inputs=_with_gradient(op, made[-1].writes[0])))
            else:
                ops.append(op)
        return block.with_ops(ops, declare=declared)

    def _corrected(
        self, param: str, gradient: str, op: Operator, declared: list[Variable]
    ) -> Iterator[Operator]:
        like = self.program.variables[param]
        trainers = self.program.attrs["trainers"]
        assert isinstance(trainers, int)
        copies = [trainer_name(param, t) + "_bak" for t in range(trainers)]
        for copy in copies:
            self._backups.append((param, copy))
            self._fed[copy] = replace(like, name=copy, kind=Kind.DATA)
        names = [f"{param}.local_bak", *(f"tmp_dc_output_{next(self._numbers)}" for _ in range(4))]
        declared += [replace(like, name=name, kind=Kind.TEMP) for name in names]
        kept, moved, once, twice, made = names
        steps: list[tuple[str, dict[str, tuple[str, ...]], str]] = [
            ("ref_by_trainer_id", {"X": tuple(copies), "TrainerId": (TRAINER_ID,)}, kept),
            ("elementwise_sub", {"X": (param,), "Y": (kept,)}, moved),
            ("elementwise_mul", {"X": (moved,), "Y": (gradient,)}, once),
            ("elementwise_mul", {"X": (once,), "Y": (gradient,)}, twice),
            ("elementwise_add", {"X": (gradient,), "Y": (twice,)}, made),
        ]
        for op_type, read, written in steps:
            ins = Operands.named(**{slot: read[slot] for slot in sorted(read)})
            outs = Operands.named(Out=written)
            added = Operator(op_type, ins, outs, role=Role.OPTIMIZE, role_var=op.role_var,
                             source=op.source)  # fmt: skip
            yield made_by(added, self.maker)


def _with_gradient(op: Operator, name: str) -> Operands:
    slots = ((slot, (name,) if slot == "Grad" else names) for slot, names in op.inputs.slots)
    return Operands(slots)
