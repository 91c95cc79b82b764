"""Sums every parameter's gradient over ranks, or over the devices of one process, by roles.

Fluid's GradAllReduce and its data parallelism. This is not a strategy of `grad_allreduce`, since
the two write different programs. `grad_allreduce` takes one device's program for a whole batch,
derives the sharding of each value, and completes whatever must be complete: gradients, losses,
metrics, statistics. This pass takes one rank's program for its own rows, and trusts it: an
operator's `for (w, w@GRAD)` marks where a gradient is finished, a role where the loss's begins.
Nothing else changes, so a loss is the rank's own, and the mean is right because the loss is a mean.
Fluid programs are compared by the resulting text.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import Attrs, Kind, Operator, Program, Role
from jaxfleet.passes.fluid import ranks
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("grad_allreduce_by_role")
@dataclass(frozen=True)
class GradAllreduceByRole(Pass):
    """Sums every gradient over ranks, and divides the loss's gradient by the number of ranks.

    So each rank updates by the mean of all ranks' gradients, and parameters stay equal. Dividing at
    the loss costs one scalar operation; dividing the sums would cost a pass over each. Clipping and
    regularization come after, and see the mean. Rings are assigned round-robin from the last
    gradient to the first. An operator that finishes several gradients is waited for once.

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
              Out=w@GRAD = c_sync_calc_stream(X=w@GRAD)
              Out=w@GRAD = c_allreduce_sum(X=w@GRAD) {ring_id=0, use_calc_stream=false}
              Out=w@GRAD = c_sync_comm_stream(X=w@GRAD) {ring_id=0}
            optimize
              ParamOut=w = sgd(Grad=w@GRAD, LearningRate=rate, Param=w)
    """

    nranks: int = 2
    nrings: int = 1
    rank: int = 0  # the only difference between the ranks' programs
    skip: tuple[str, ...] = ()  # parameters of which each rank has rows of its own

    def run(self, program: Program) -> Program:
        ranks.check_rank(program, self.name, rank=self.rank, nranks=self.nranks)
        ranks.check_finished_in_root(program, self.name)
        block = program.root
        sums = self._sums(block.ops)
        if not sums:
            what = f"{self.name}: no operator is marked as finishing a parameter's gradient"
            raise PassError(what, hint="call minimize before the program is transpiled")
        first = sums[min(sums)][0].writes[0]
        ops = [op for found in self._rewritten(block.ops, sums, first) for op in found]
        attrs = ranks.rank_attrs(program, rank=self.rank, nranks=self.nranks)
        return replace(program.with_block(block.with_ops(ops)), attrs=attrs)

    def _rewritten(
        self, ops: tuple[Operator, ...], sums: dict[int, list[Operator]], first: str
    ) -> Iterator[tuple[Operator, ...]]:
        """Yields each operator with the operators inserted before and after it."""
        is_waited_for = False
        for place, op in enumerate(ops):
            if op.role in ranks.OPTIMIZE and not is_waited_for:
                is_waited_for = True
                waits = ranks.wait_for_communication(first, self.nrings, Role.BACKWARD, op.source)
                yield self._made(*waits)
            yield (op,)
            if op.role is Role.BACKWARD_LOSS:
                yield self._made(ranks.division_op(op, self.nranks))
            yield tuple(sums.get(place, ()))

    def _sums(self, ops: tuple[Operator, ...]) -> dict[int, list[Operator]]:
        """Returns the operators inserted after those that finish gradients, by index."""
        rings, found = ranks.rings(self.nrings, self.name), {}
        done: set[str] = set()
        for place in reversed(range(len(ops))):
            op = ops[place]
            pairs = op.role_var if op.role in ranks.BACKWARD else ()
            grads = [g for param, g in pairs if param not in self.skip and g not in done]
            done.update(grads)
            if grads:
                sums = [ranks.allreduce(g, next(rings), Role.BACKWARD, op.source) for g in grads]
                wait = ranks.wait_for_computing(grads[0], Role.BACKWARD, op.source)
                found[place] = list(self._made(wait, *reversed(sums)))
        return found

    def _made(self, *ops: Operator) -> tuple[Operator, ...]:
        return tuple(made_by(op, self) for op in ops)


_SCALES = ("coeff_num_device", "one", "customized")


@register_pass("data_parallel")
@dataclass(frozen=True)
class DataParallel(Pass):
    """Makes each device run the whole program on its rows, and update by the mean gradient.

    Like `grad_allreduce_by_role` it trusts the roles: the gradient of the loss is divided by the
    number of devices, and a gradient is summed after the last operator marked as finishing it. A
    device is a rank of one process, so there are no streams to wait for. Results of the rows
    without a collective, such as the running statistics of a batch norm, stay per device.

    `scale` is fluid's GradientScaleStrategy: `coeff_num_device` divides, `one` does not,
    `customized` expects the user to feed the gradient of the loss.

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

    devices: int = 2  # devices of the process
    trainers: int = 1  # number of processes
    scale: str = "coeff_num_device"
    rings: int = 1  # number of rings for sums of gradients, round-robin
    sync_batch_norm: bool = False  # compute the statistics of a batch norm over all devices

    def run(self, program: Program) -> Program:
        self._check(program)
        ops = tuple(self._operators(program))
        made = program.with_block(program.root.with_ops(ops))
        if self.scale == "customized":
            made = _with_fed_gradient(made)
        return replace(made, attrs=ranks.rank_attrs(made, rank=0, nranks=self.devices))

    def _check(self, program: Program) -> None:
        ranks.check_rank(program, self.name, rank=0, nranks=self.devices)
        if self.trainers < 1:
            raise PassError(f"{self.name}: {self.trainers} trainers")
        if self.rings < 1:
            raise PassError(f"{self.name}: {self.rings} rings", hint="rings is at least 1")
        if self.scale not in _SCALES:
            hint = f"it is one of {', '.join(_SCALES)}"
            raise PassError(f"{self.name}: there is no scale {self.scale!r}", hint=hint)
        ranks.check_finished_in_root(program, self.name)

    def _operators(self, program: Program) -> Iterator[Operator]:
        finished, count = _finished(program), 0
        for place, op in enumerate(program.root.ops):
            is_begun = op.role is Role.BACKWARD_LOSS
            if not (is_begun and self.scale == "customized"):
                yield self._synchronized(op)
            if is_begun and self.scale == "coeff_num_device":
                yield made_by(ranks.division_op(op, self.devices * self.trainers), self)
            for gradient in finished.get(place, ()):
                attrs = Attrs({"ring_id": count % self.rings})
                count += 1
                total = ranks.in_place_op(
                    "c_allreduce_sum", gradient, attrs, Role.BACKWARD, op.source
                )
                yield made_by(total, self)

    def _synchronized(self, op: Operator) -> Operator:
        changed = self.sync_batch_norm and op.type in {"batch_norm", "batch_norm_grad"}
        return made_by(replace(op, type=f"sync_{op.type}"), self) if changed else op


def _finished(program: Program) -> dict[int, list[str]]:
    """Returns the gradients that an operator finishes, by its index."""
    last: dict[str, int] = {}
    for place, op in enumerate(program.root.ops):
        if op.role in ranks.BACKWARD:
            last.update((gradient, place) for _, gradient in op.role_var)
    found: dict[int, list[str]] = {}
    for gradient, place in last.items():
        found.setdefault(place, []).append(gradient)
    return found


def _with_fed_gradient(program: Program) -> Program:
    """Declares the initial gradients of backward, which are no longer written, as data."""
    written = {name for block in program.blocks for op in block.ops for name in op.writes}
    read = {name for op in program.root.ops for name in op.reads}
    fed = [v for n, v in program.root.variables.items() if n in read - written]
    root = replace(
        program.root, variables={n: v for n, v in program.root.variables.items() if v not in fed}
    )
    data = {v.name: replace(v, kind=Kind.DATA) for v in fed}
    made = program.with_block(root)
    return replace(made, variables={**program.variables, **data})
