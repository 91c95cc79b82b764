"""Sum every parameter's gradient over ranks, going by roles: fluid's GradAllReduce.

Not `grad_allreduce` with another strategy inside, since the two write different programs.
`grad_allreduce` is given what one device does with a whole batch, infers how each value lies on
the devices, and completes whatever must be complete: gradients, losses, metrics, statistics. This
one is given what one rank does with its own rows, and believes the program: an operator's
`for (w, w@GRAD)` says where a gradient is finished, a role where the loss's begins. It touches
nothing else, so a loss is the rank's own, and the mean is right because the loss is a mean. Fluid
programs are compared by the text that this gives.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import Operator, Program, Role
from jaxfleet.passes import _ranks as ranks
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("grad_allreduce_by_role")
@dataclass(frozen=True)
class GradAllreduceByRole(Pass):
    """Sums every gradient over ranks, and divides the loss's gradient by how many there are.

    So each rank updates by the mean of all ranks' gradients, and ends with the same parameters.
    Dividing at the loss costs one number; dividing the sums would cost a pass over each. Clipping
    and regularization come after, and see the mean. Rings are dealt out from the last gradient
    to the first. An operator that finishes several gradients is waited for once.

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
    rank: int = 0  # whose program; all ranks' are the same but for this fact
    skip: tuple[str, ...] = ()  # parameters of which each rank has rows of its own

    def run(self, program: Program) -> Program:
        ranks.check(program, self.name, rank=self.rank, nranks=self.nranks)
        ranks.finished_in_root(program, self.name)
        block = program.root
        sums = self._sums(block.ops)
        if not sums:
            what = f"{self.name}: no operator says that it finishes a parameter's gradient"
            raise PassError(what, hint="call minimize before the program is transpiled")
        first = sums[min(sums)][0].writes[0]
        ops = [op for found in self._rewritten(block.ops, sums, first) for op in found]
        attrs = ranks.facts(program, rank=self.rank, nranks=self.nranks)
        return replace(program.with_block(block.with_ops(ops)), attrs=attrs)

    def _rewritten(
        self, ops: tuple[Operator, ...], sums: dict[int, list[Operator]], first: str
    ) -> Iterator[tuple[Operator, ...]]:
        """Yields the operators with what is inserted before and after each."""
        is_waited_for = False
        for place, op in enumerate(ops):
            if op.role in ranks.OPTIMIZE and not is_waited_for:
                is_waited_for = True
                waits = ranks.wait_for_communication(first, self.nrings, Role.BACKWARD, op.source)
                yield self._made(*waits)
            yield (op,)
            if op.role is Role.BACKWARD_LOSS:
                yield self._made(ranks.divided(op, self.nranks))
            yield tuple(sums.get(place, ()))

    def _sums(self, ops: tuple[Operator, ...]) -> dict[int, list[Operator]]:
        """Returns what is inserted after operators that finish gradients, by their places."""
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
