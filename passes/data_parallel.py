"""Sum every parameter's gradient over the devices of one process: fluid's data parallelism."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import Attrs, Kind, Operator, Program, Role
from jaxfleet.passes import _ranks as ranks
from jaxfleet.pipeline import Pass, made_by, register_pass

_SCALES = ("coeff_num_device", "one", "customized")


@register_pass("data_parallel")
@dataclass(frozen=True)
class DataParallel(Pass):
    """Makes each device run the whole program on its rows, and update by the mean gradient.

    As `grad_allreduce_by_role` it believes the roles: the gradient of the loss is divided by the
    number of devices, and a gradient is summed after the last operator that says it finishes it.
    A device is a rank of one process, so there are no streams to wait for. What the rows decide
    without a collective, such as the running statistics of a batch norm, each keeps for itself.

    `scale` is fluid's GradientScaleStrategy: `coeff_num_device` divides, `one` does not,
    `customized` leaves it to the user to feed the gradient of the loss.

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
              ParamOut=w = sgd(Grad=w@GRAD, LearningRate=rate, Param=w)

    After::

        program p {nranks=2, rank=0, role="collective"}
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
              Out=loss@GRAD = scale(X=loss@GRAD) {scale=0.5}
              X@GRAD=h@GRAD: f32[b,1] = mean_grad(Out@GRAD=loss@GRAD, X=h)
              Y@GRAD=w@GRAD: f32[3,1] = mul_grad(Out@GRAD=h@GRAD, X=x, Y=w) for (w, w@GRAD)
              Out=w@GRAD = c_allreduce_sum(X=w@GRAD) {ring_id=0}
            optimize
              ParamOut=w = sgd(Grad=w@GRAD, LearningRate=rate, Param=w)
    """

    devices: int = 2  # how many devices the process has
    trainers: int = 1  # how many processes there are
    scale: str = "coeff_num_device"
    rings: int = 1  # gradients' sums are dealt out to that many, in turn
    sync_batch_norm: bool = False  # take the statistics of a batch norm over all devices

    def run(self, program: Program) -> Program:
        self._check(program)
        ops = tuple(self._operators(program))
        made = program.with_block(program.root.with_ops(ops))
        if self.scale == "customized":
            made = _with_fed_gradient(made)
        return replace(made, attrs=ranks.facts(made, rank=0, nranks=self.devices))

    def _check(self, program: Program) -> None:
        ranks.check(program, self.name, rank=0, nranks=self.devices)
        if self.trainers < 1:
            raise PassError(f"{self.name}: {self.trainers} trainers")
        if self.rings < 1:
            raise PassError(f"{self.name}: {self.rings} rings", hint="rings is at least 1")
        if self.scale not in _SCALES:
            hint = f"it is one of {', '.join(_SCALES)}"
            raise PassError(f"{self.name}: there is no scale {self.scale!r}", hint=hint)
        ranks.finished_in_root(program, self.name)

    def _operators(self, program: Program) -> Iterator[Operator]:
        finished, count = _finished(program), 0
        for place, op in enumerate(program.root.ops):
            is_begun = op.role is Role.BACKWARD_LOSS
            if not (is_begun and self.scale == "customized"):
                yield self._synchronized(op)
            if is_begun and self.scale == "coeff_num_device":
                yield made_by(ranks.divided(op, self.devices * self.trainers), self)
            for gradient in finished.get(place, ()):
                attrs = Attrs({"ring_id": count % self.rings})
                count += 1
                total = ranks.in_place("c_allreduce_sum", gradient, attrs, Role.BACKWARD, op.source)
                yield made_by(total, self)

    def _synchronized(self, op: Operator) -> Operator:
        changed = self.sync_batch_norm and op.type in {"batch_norm", "batch_norm_grad"}
        return made_by(replace(op, type=f"sync_{op.type}"), self) if changed else op


def _finished(program: Program) -> dict[int, list[str]]:
    """Returns the gradients that are whole after an operator, by its place."""
    last: dict[str, int] = {}
    for place, op in enumerate(program.root.ops):
        if op.role in ranks.BACKWARD:
            last.update((gradient, place) for _, gradient in op.role_var)
    found: dict[int, list[str]] = {}
    for gradient, place in last.items():
        found.setdefault(place, []).append(gradient)
    return found


def _with_fed_gradient(program: Program) -> Program:
    """Makes data of the gradients with which backward begins, which nothing writes any more."""
    written = {name for block in program.blocks for op in block.ops for name in op.writes}
    read = {name for op in program.root.ops for name in op.reads}
    fed = [v for n, v in program.root.variables.items() if n in read - written]
    root = replace(
        program.root,
        variables={n: v for n, v in program.root.variables.items() if v not in fed},
    )
    data = {v.name: replace(v, kind=Kind.DATA) for v in fed}
    made = program.with_block(root)
    return replace(made, variables={**program.variables, **data})
