"""Add the gradients of several calls up, and update once: gradient merge."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operator, Program, Role, Variable
from jaxfleet.passes._beside import with_beside
from jaxfleet.passes._known_gradients import check_gradients_are_known
from jaxfleet.passes._update_branch import UpdateBranch
from jaxfleet.passes._when_due import branch, due_every, number, op
from jaxfleet.pipeline import Pass, made_by, register_pass

_UPDATE = frozenset({Role.OPTIMIZE, Role.OPTIMIZE_LR_SCHED, Role.LR_SCHED})
_NAME = "merge"
_CALLS = f"{_NAME}.calls"  # since the last update


@register_pass("merge_gradients")
@dataclass(frozen=True)
class MergeGradients(Pass):
    """Makes the update wait for `every` calls, and take the mean of their gradients.

    What a call computes forward and backward is as it was; its gradients are added to sums, which
    the step keeps from call to call. The update is a branch that runs at every `every`-th call, on
    the sums divided by `every`: as `optax.MultiSteps`, and for a mean loss as one call with all the
    rows. Metrics that the update computes are those of the last update, zeros before the first.

    On several devices a sum stays a device's own (`sums`), so gradients are reduced once an update.
    Runs before `grad_allreduce`, which sees to that.

    Before::

        program p {batch=<b>}
          data  x: f32[b,4]
          param w: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = jax.reduce_sum(x) {axes=[0]} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)

    After::

        program p {batch=<b>, beside=[["merge.calls", 0], ["w@GRAD@MERGED", 0.0]], sums=["w@GRAD@MERGED"]}
          data  x: f32[b,4]
          param w: f32[4]
          state merge.calls: i32[]
          state w@GRAD@MERGED: f32[4]
          block 0
            backward
              w@GRAD@CALL: f32[4] = jax.reduce_sum(x) {axes=[0]}
            optimize
              w@GRAD@MERGED = jax.add(w@GRAD@MERGED, w@GRAD@CALL)
              merge.more: i32[] = jax.add(merge.calls, 1:i32)
              merge.due: bool[] = jax.ge(merge.more, 4:i32)
              merge.index: i32[] = jax.convert_element_type(merge.due) {new_dtype=i32, weak_type=false}
              merge.calls = jax.select_n(merge.due, merge.more, 0:i32)
              w@GRAD@MERGED, w = jax.cond(merge.index, w@GRAD@MERGED, w) {branches=[^1, ^2]}
          block 1 (w@GRAD@MERGED@KEPT: f32[4], w@KEPT: f32[4]) -> (w@GRAD@MERGED@KEPT, w@KEPT)
          block 2 (w@GRAD@MERGED@GIVEN: f32[4], w@GIVEN: f32[4]) -> (w@GRAD@MERGED@ZERO, w@WHOLE)
            optimize
              w@GRAD: f32[4] = jax.div(w@GRAD@MERGED@GIVEN, 4.0:f32) for (w, w@GRAD)
              w@NEW: f32[4] = jax.sub(w@GIVEN, w@GRAD)
              w@WHOLE: f32[4] = c_complete(w@NEW)
              w@GRAD@MERGED@ZERO: f32[4] = jax.broadcast_in_dim(0.0:f32) {broadcast_dimensions=[], shape=[4]}
    """  # noqa: E501  # attributes stand on one line

    every: int = 4  # calls to one update

    def __post_init__(self) -> None:
        if self.every < 1:
            raise PassError(f"{_NAME}: every {self.every} calls", hint="every is at least 1")

    def run(self, program: Program) -> Program:
        check_gradients_are_known(program, self.name)
        gradients = [name for x in program.root.ops for _, name in x.role_var]
        if not gradients:
            what = f"{self.name}: no operator of block 0 makes a gradient"
            raise PassError(what, hint="wrap the optimizer in jaxfleet.distributed_optimizer")
        update, _, fetches = _parts(program)
        self._check_shapes(program)
        self._check_order(program)
        sums = {x: _state(program.lookup(x), f"{x}@MERGED") for x in gradients}
        late = {x: _state(program.lookup(x), f"{x}@LAST") for x in _late(program, update, fetches)}
        made = UpdateBranch(program, sums, late, self.every).run(update)
        _, rest, fetches = _parts(made.program)  # whose blocks have their new numbers
        calls = Variable(_CALLS, "i32", (), Kind.STATE)
        zeros = [(v, 0.0) for v in (*sums.values(), *late.values())]
        added = tuple(v.name for v in sums.values())
        held = with_beside(made.program, [(calls, 0), *zeros], sums=added)
        counting, declared, index = due_every(_CALLS, number(self.every, "i32"), _NAME)
        names = {x: f"{x}@CALL" for x in gradients}
        adding = [op("jax.add", (v.name, names[x]), (v.name,)) for x, v in sums.items()]
        new = [*adding, *counting, branch(index, made.names, made.blocks)]
        new += [op("assign", (v.name,), (x,)) for x, v in late.items()]
        ops = [*_renamed(rest, names), *(made_by(x, self) for x in new), *_renamed(fetches, names)]
        declared += [replace(program.lookup(x), name=name) for x, name in names.items()]
        return held.with_block(held.root.with_ops(ops, declare=declared).without_unused())

    def _check_shapes(self, program: Program) -> None:
        """Refuses gradients of each example: those of two calls are no sum, but more examples."""
        for x in program.root.ops:
            for param, gradient in x.role_var:
                like = program.lookup(gradient)
                if like.shape != program.variables[param].shape:
                    what = f"{self.name}: '{gradient}' has a gradient for each example"
                    raise PassError(what, op=x, hint="leave merge out, and train on larger batches")

    def _check_order(self, program: Program) -> None:
        """Refuses a program whose update cannot wait: something else comes between its parts.

        Where one optimizer updates before another's gradients are computed, as in a GAN, its update
        is a part of what computes them.
        """
        changed, read = set[str](), set[str]()
        trained = {param for x in program.root.ops for param, _ in x.role_var}
        for x in program.root.ops:
            if x.role not in _UPDATE and (early := sorted(trained & {*x.writes})):
                what = f"{self.name}: '{early[0]}' is updated before all gradients are there"
                raise PassError(what, op=x, hint="leave merge out, or make two steps of the one")
            if x.role in _UPDATE and x.type != "fetch":
                changed.update(x.writes)
                read.update(x.reads)
            elif x.type != "fetch" and (found := sorted(changed & {*x.reads} | read & {*x.writes})):
                what = f"{self.name}: '{found[0]}' is of the update, and used by what is not"
                raise PassError(what, op=x, hint="leave merge out")


def _parts(program: Program) -> tuple[list[Operator], list[Operator], list[Operator]]:
    """Returns the update, what comes before it, and what is fetched."""
    ops = program.root.ops
    fetches = [x for x in ops if x.type == "fetch"]
    update = [x for x in ops if x.role in _UPDATE and x.type != "fetch"]
    return update, [x for x in ops if x.role not in _UPDATE and x.type != "fetch"], fetches


def _late(
    program: Program, update: Sequence[Operator], fetches: Sequence[Operator]
) -> Iterator[str]:
    """Yields what is fetched of the update."""
    made = {name for x in update for name in x.writes}
    for x in fetches:
        for name in dict.fromkeys(x.reads):
            if name in made and name in program.root.variables:
                if not all(isinstance(size, int) for size in program.lookup(name).shape):
                    what = f"merge: the update makes '{name}' of the rows of one call"
                    raise PassError(what, op=x, hint="leave it out of the metrics, or merge out")
                yield name


def _state(like: Variable, name: str) -> Variable:
    return replace(like, name=name, kind=Kind.STATE)


def _renamed(ops: Sequence[Operator], names: Mapping[str, str]) -> Iterator[Operator]:
    """Yields operators that make and read a call's gradients, which are none to be reduced."""
    for x in ops:
        pairs = tuple(pair for pair in x.role_var if pair[1] not in names)
        outs, ins = x.outputs.renamed(names), x.inputs.renamed(names)
        yield replace(x, inputs=ins, outputs=outs, role_var=pairs)
