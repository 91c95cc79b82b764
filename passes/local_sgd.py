"""Let every rank train by itself, and take the mean of all ranks' parameters: fluid's LocalSGD."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    BlockRef,
    Kind,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
)
from jaxfleet.ir.names import LOCAL_STEPS, snapshot_name
from jaxfleet.passes import _ranks as ranks
from jaxfleet.pipeline import Pass, made_by, register_pass

_EVERY, _OVER, _ZERO, _DUE = (f"@LOCAL_SGD_{word}@" for word in ("EVERY", "OVER", "ZERO", "DUE"))


@register_pass("local_sgd")
@dataclass(frozen=True)
class LocalSGD(Pass):
    """Takes the mean of all ranks' parameters after every `every` steps.

    A parameter's snapshot is what all ranks had when they last met: each sums how far the ranks
    went from it, and goes on from the snapshot less the mean. With `every` 1, as in fluid, ranks
    meet at each step, which costs what summing gradients does; with more, `1/every` of that. What
    optimizers keep (moments) stays each rank's own. Rings are dealt out from the last update to
    the first. With `every` above 1 the meeting is a block that runs when its step has come.

    Before::

        program p
          param w: f32[3]
          state rate: f32[1]
          data  w@GRAD: f32[3]
          block 0
            optimize
              ParamOut=w = sgd(Grad=w@GRAD, LearningRate=rate, Param=w)

    After::

        program p {nranks=2, rank=0, role="collective"}
          param w: f32[3]
          state rate: f32[1]
          data  w@GRAD: f32[3]
          state w@SNAPSHOT: f32[3]
          block 0
            optimize
              ParamOut=w = sgd(Grad=w@GRAD, LearningRate=rate, Param=w)
              Out=w = elementwise_sub(X=w@SNAPSHOT, Y=w)
              Out=w = c_sync_calc_stream(X=w)
              Out=w = c_allreduce_sum(X=w) {ring_id=0, use_calc_stream=false}
              Out=w = c_sync_comm_stream(X=w) {ring_id=0}
              Out=w = scale(X=w) {scale=0.5}
              Out=w = elementwise_sub(X=w@SNAPSHOT, Y=w)
              Out=w@SNAPSHOT = assign(X=w)
    """

    nranks: int = 2
    nrings: int = 1
    rank: int = 0  # whose program; all ranks' are the same but for this fact
    every: int = 1  # steps from one meeting to the next
    skip: tuple[str, ...] = ()  # parameters of which each rank has rows of its own

    def __post_init__(self) -> None:
        if self.every < 1:
            raise PassError(f"local_sgd: every {self.every} steps", hint="every is at least 1")

    def run(self, program: Program) -> Program:
        ranks.check(program, self.name, rank=self.rank, nranks=self.nranks)
        updates = self._updates(program.root.ops)
        if not updates:
            what = f"{self.name}: no operator updates a parameter"
            raise PassError(what, hint="call minimize before the program is transpiled")
        rings = ranks.rings(self.nrings, self.name)
        sums = {p: self._sum(updates[p], next(rings)) for p in sorted(updates, reverse=True)}
        ends = self._ends([updates[place] for place in sorted(updates)])
        if self.every == 1:
            rewritten = self._each_step(program, sums, ends)
        else:
            meeting = [op for place in sorted(sums) for op in sums[place]]
            rewritten = self._some_steps(program, [*meeting, *ends])
        kept = {snapshot_name(p): program.variables[p] for p in map(_param, updates.values())}
        made = {n: Variable(n, p.dtype, p.shape, Kind.STATE) for n, p in kept.items()}
        attrs = ranks.facts(program, rank=self.rank, nranks=self.nranks)
        return replace(rewritten, variables={**rewritten.variables, **made}, attrs=attrs)

    def _updates(self, ops: Sequence[Operator]) -> dict[int, Operator]:
        """Returns the operators that update parameters, by their places."""
        return {
            place: op
            for place, op in enumerate(ops)
            if op.role in ranks.OPTIMIZE
            and op.inputs.slot("Param")
            and op.inputs.slot("Grad")
            and _param(op) not in self.skip
        }

    def _sum(self, update: Operator, ring: int) -> list[Operator]:
        """Returns what sums how far the ranks went with a parameter."""
        name, source = _param(update), update.source
        return [
            self._way(update),
            made_by(ranks.wait_for_computing(name, Role.OPTIMIZE, source), self),
            made_by(ranks.allreduce(name, ring, Role.OPTIMIZE, source), self),
        ]

    def _ends(self, updates: Sequence[Operator]) -> list[Operator]:
        """Returns what makes parameters of the sums, and new snapshots of the parameters."""
        first = updates[0]
        waits = ranks.wait_for_communication(
            _param(first), self.nrings, Role.OPTIMIZE, first.source
        )
        ops = [made_by(op, self) for op in waits]
        for update in updates:
            name = _param(update)
            part = Attrs({"scale": 1.0 / self.nranks})
            mean = ranks.in_place("scale", name, part, Role.OPTIMIZE, update.source)
            kept = self._op("assign", {"X": name}, snapshot_name(name), update)
            ops += [made_by(mean, self), self._way(update), kept]
        return ops

    def _way(self, update: Operator) -> Operator:
        """Returns the operator that takes a parameter from its snapshot, in place."""
        name = _param(update)
        return self._op("elementwise_sub", {"X": snapshot_name(name), "Y": name}, name, update)

    def _op(
        self, op_type: str, inputs: dict[str, str], out: str, like: Operator, **attrs: Attr
    ) -> Operator:
        read = Operands((slot, (name,)) for slot, name in inputs.items())
        made = Operator(op_type, read, Operands.named(Out=out), Attrs(attrs), Role.OPTIMIZE)
        return made_by(replace(made, source=like.source), self)

    def _each_step(
        self, program: Program, sums: dict[int, list[Operator]], ends: list[Operator]
    ) -> Program:
        ops = []
        for place, op in enumerate(program.root.ops):
            ops += [op, *sums.get(place, ())]
        return program.with_block(program.root.with_ops([*ops, *ends]))

    def _some_steps(self, program: Program, meeting: list[Operator]) -> Program:
        """Returns the program with its meeting in a block of its own, that runs when it is due."""
        root, last = program.root, program.root.ops[-1]
        number: dict[str, Attr] = {"shape": (1,), "dtype": "int32"}
        reads = tuple(dict.fromkeys(name for op in meeting for name in op.reads))
        writes = tuple(dict.fromkeys(name for op in meeting for name in op.writes))
        ops = [
            self._op("increment", {"X": LOCAL_STEPS}, LOCAL_STEPS, last, step=1),
            self._op("fill_constant", {}, _EVERY, last, value=self.every, **number),
            self._op("elementwise_mod", {"X": LOCAL_STEPS, "Y": _EVERY}, _OVER, last),
            self._op("fill_constant", {}, _ZERO, last, value=0, **number),
            self._op("equal", {"X": _OVER, "Y": _ZERO}, _DUE, last),
            made_by(_conditional(_DUE, reads, writes, len(program.blocks), last), self),
        ]
        declared = [Variable(name, "i32", (1,)) for name in (_EVERY, _OVER, _ZERO)]
        declared.append(Variable(_DUE, "bool", (1,)))
        blocks = [*program.blocks, Block(len(program.blocks), 0, ops=tuple(meeting))]
        blocks[0] = root.with_ops([*root.ops, *ops], declare=declared)
        counts = Variable(LOCAL_STEPS, "i32", (1,), Kind.STATE)
        variables = {**program.variables, LOCAL_STEPS: counts}
        return replace(program, variables=variables, blocks=tuple(blocks))


def _conditional(
    condition: str, reads: tuple[str, ...], writes: tuple[str, ...], block: int, like: Operator
) -> Operator:
    """Returns the operator that runs a block where a condition holds."""
    return Operator(
        "conditional_block",
        Operands((("Cond", (condition,)), ("Input", reads))),
        Operands.named(Out=writes),
        Attrs({"is_scalar_condition": True, "sub_block": BlockRef(block)}),
        Role.OPTIMIZE,
        source=like.source,
    )


def _param(update: Operator) -> str:
    return str(update.inputs.slot("Param")[0])
