"""Fluid's LocalSGD: ranks train independently, and average their changes since a snapshot."""

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
from jaxfleet.ir.naming import LOCAL_STEPS, snapshot_name
from jaxfleet.passes.fluid import ranks
from jaxfleet.pipeline import Pass, made_by, register_pass

_EVERY, _OVER, _ZERO, _DUE = (f"@LOCAL_SGD_{word}@" for word in ("EVERY", "OVER", "ZERO", "DUE"))


@register_pass("local_sgd")
@dataclass(frozen=True)
class LocalSGD(Pass):
    """Averages all ranks' parameters after every `every` steps.

    A parameter's snapshot is its common value at the last meeting: each meeting sums the ranks'
    differences from it, and subtracts their mean from the snapshot. With `every` 1, as in fluid,
    ranks meet at each step, which costs as much as summing gradients; otherwise it costs `1/every`
    of that. Optimizer moments stay per rank. Rings are assigned round-robin from the last update to
    the first. With `every` above 1 the meeting is a block that runs when due.

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
    rank: int = 0  # the only difference between the ranks' programs
    every: int = 1  # steps between meetings
    skip: tuple[str, ...] = ()  # parameters of which each rank has rows of its own

    def __post_init__(self) -> None:
        if self.every < 1:
            raise PassError(f"local_sgd: every {self.every} steps", hint="every is at least 1")

    def run(self, program: Program) -> Program:
        ranks.check_rank(program, self.name, rank=self.rank, nranks=self.nranks)
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
        attrs = ranks.rank_attrs(program, rank=self.rank, nranks=self.nranks)
        return replace(rewritten, variables={**rewritten.variables, **made}, attrs=attrs)

    def _updates(self, ops: Sequence[Operator]) -> dict[int, Operator]:
        return {
            place: op
            for place, op in enumerate(ops)
            if op.role in ranks.OPTIMIZE
            and op.inputs.slot("Param")
            and op.inputs.slot("Grad")
            and _param(op) not in self.skip
        }

    def _sum(self, update: Operator, ring: int) -> list[Operator]:
        """Returns the operators that sum the ranks' differences of a parameter."""
        name, source = _param(update), update.source
        return [
            self._way(update),
            made_by(ranks.wait_for_computing(name, Role.OPTIMIZE, source), self),
            made_by(ranks.allreduce(name, ring, Role.OPTIMIZE, source), self),
        ]

    def _ends(self, updates: Sequence[Operator]) -> list[Operator]:
        """Returns the operators that turn the sums into parameters and new snapshots."""
        first = updates[0]
        waits = ranks.wait_for_communication(
            _param(first), self.nrings, Role.OPTIMIZE, first.source
        )
        ops = [made_by(op, self) for op in waits]
        for update in updates:
            name = _param(update)
            part = Attrs({"scale": 1.0 / self.nranks})
            mean = ranks.in_place_op("scale", name, part, Role.OPTIMIZE, update.source)
            kept = self._op("assign", {"X": name}, snapshot_name(name), update)
            ops += [made_by(mean, self), self._way(update), kept]
        return ops

    def _way(self, update: Operator) -> Operator:
        """Returns the operator that subtracts a parameter from its snapshot, in place."""
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
        """Returns the program with its meeting in a block that runs when due."""
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


@register_pass("snapshot_params")
@dataclass(frozen=True)
class SnapshotParams(Pass):
    """Copies every parameter to its snapshot, from which `local_sgd` measures differences.

    Runs after `broadcast_params`, since all ranks' snapshots must be equal.

    Before::

        program startup {nranks=2, rank=0, role="collective"}
          param w: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}

    After::

        program startup {nranks=2, rank=0, role="collective"}
          param w: f32[3]
          state w@SNAPSHOT: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}
              Out=w@SNAPSHOT = assign(X=w)
    """

    every: int = 1  # as in `local_sgd`: above 1 it counts steps, from 0
    skip: tuple[str, ...] = ()  # parameters of which each rank has rows of its own

    runs_after = ("broadcast_params",)

    def run(self, program: Program) -> Program:
        params = ranks.trained_parameters(program, self.skip)
        made = {p.name: replace(p, name=snapshot_name(p.name), kind=Kind.STATE) for p in params}
        ops = [
            Operator("assign", Operands.named(X=name), Operands.named(Out=snapshot.name))
            for name, snapshot in made.items()
        ]
        new = list(made.values())
        if self.every > 1:
            attrs = Attrs({"dtype": "int32", "shape": (1,), "value": 0})
            ops.append(
                Operator("fill_constant", outputs=Operands.named(Out=LOCAL_STEPS), attrs=attrs)
            )
            new.append(Variable(LOCAL_STEPS, "i32", (1,), Kind.STATE))
        variables = {**program.variables, **{v.name: v for v in new}}
        block = program.root.with_ops([*program.root.ops, *(made_by(op, self) for op in ops)])
        return replace(program.with_block(block), variables=variables)
