"""Writes the program of a server whose trainers update: it adds up deltas, or takes averages."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.slices import Slice
from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    Kind,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
    trainer_name,
)
from jaxfleet.passes._job import Job, Mark
from jaxfleet.passes._local_trainer import SAMPLES, converted, delta_name, opti_name
from jaxfleet.passes._serving import facts_of, listen_and_serv


def averaging_server(program: Program, job: Job, endpoint: str, mark: Mark) -> Program:
    """Returns the program of the server at an endpoint, which has no optimizer."""
    return _Writer(program, job, endpoint, mark).run()


@dataclass
class _Writer:
    program: Program
    job: Job
    endpoint: str
    mark: Mark
    top: dict[str, Variable] = field(default_factory=dict)
    shared: dict[str, Variable] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=lambda: [Block()])
    holds: list[Attr] = field(default_factory=list)
    merges: dict[str, int] = field(default_factory=dict)

    def run(self) -> Program:
        mode = self.job.mode
        here = [cut for cut in self.job.slices if self.job.placement[cut.name] == self.endpoint]
        weighs = bool(here) and mode.by_rows
        if weighs:
            self._count_samples()
        for cut in here:
            self._hold(cut)
            if mode.communication == "geo":
                self._add_deltas(cut)
            else:
                self._average(cut, parent=int(weighs))
        if not here:
            self.blocks.append(Block(1, 0))
        return self._program(1 if weighs else -1)

    def _hold(self, cut: Slice) -> None:
        like = self.program.variables[cut.param]
        self.top[cut.name] = replace(like, name=cut.name, shape=cut.shape, kind=Kind.PARAM)
        if not cut.is_whole:
            self.holds.append((cut.name, cut.param, cut.start))

    def _add_deltas(self, cut: Slice) -> None:
        delta = delta_name(cut.name)
        self.top[delta] = replace(self.top[cut.name], name=delta, kind=Kind.DATA)
        self.merges[delta] = len(self.blocks)
        self._block([_op("sum", [cut.name, delta], cut.name)], {}, 0)

    def _average(self, cut: Slice, parent: int) -> None:
        """Adds up what all trainers have made of a slice, and divides it."""
        like, merged = self.top[cut.name], opti_name(cut.name)
        made = {merged: replace(like, name=merged, kind=Kind.TEMP)}
        ops = [self._merge(merged, like)]
        if not self.job.mode.by_rows:
            part = Attrs({"scale": 1.0 / self.job.trainers})
            ops.append(_op("scale", [merged], cut.name, part))
        else:
            weight = SAMPLES
            if like.dtype != "f32":
                weight = f"{cut.name}.samples"
                made[weight] = Variable(weight, like.dtype, ())
                ops.append(converted(SAMPLES, weight, like.dtype, Role.OPTIMIZE))
            ins, outs = Operands.of(merged, weight), Operands.of(cut.name)
            ops.append(Operator("jax.div", ins, outs, role=Role.OPTIMIZE))
        self._block(ops, made, parent)

    def _count_samples(self) -> None:
        """Writes the block that counts the rows of all trainers, which runs first."""
        sent = Variable(f"{SAMPLES}.sent", "f32", ())
        self.shared[SAMPLES] = Variable(SAMPLES, "f32", ())
        total = Operator("assign", Operands.of(sent.name), Operands.of(SAMPLES), role=Role.LR_SCHED)
        self._block([self._merge(sent.name, sent), total], {sent.name: sent}, 0)

    def _merge(self, name: str, like: Variable) -> Operator:
        buffers = [trainer_name(name, trainer) for trainer in range(self.job.trainers)]
        for buffer in buffers:
            self.top[buffer] = replace(like, name=buffer, kind=Kind.DATA)
        self.merges[name] = len(self.blocks)
        return _op("sum", buffers, name)

    def _block(self, ops: Sequence[Operator], declared: dict[str, Variable], parent: int) -> None:
        self.blocks.append(
            Block(len(self.blocks), parent, declared, ops=tuple(map(self.mark, ops)))
        )

    def _program(self, lr: int) -> Program:
        facts = facts_of(self.program, self.job, self.endpoint, self.holds)
        kinds = [Kind.DATA, Kind.PARAM]
        top = sorted(self.top.values(), key=lambda v: kinds.index(v.kind))
        sent = [v.name for v in top if v.kind is Kind.DATA]
        runs = [block.index for block in self.blocks[1:]]
        serve = listen_and_serv(self.job, self.endpoint, sent, runs=runs, merges=self.merges, lr=lr)
        root = Block(variables=self.shared, ops=(self.mark(serve),))
        name = f"{self.program.name}.pserver{facts['pserver_id']}"
        blocks = (root, *self.blocks[1:])
        return Program(name, {v.name: v for v in top}, blocks, Attrs(facts))


def _op(op_type: str, reads: Sequence[str], made: str, attrs: Attrs | None = None) -> Operator:
    ins, outs = Operands.named(X=reads), Operands.named(Out=made)
    return Operator(op_type, ins, outs, attrs or Attrs(), Role.OPTIMIZE)
