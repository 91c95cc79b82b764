"""Programs of a job whose trainers update parameters: GEO-SGD, federated averaging.

A trainer runs the whole step, followed every `k_steps` by the exchange with servers: all operators
of role `dist` or `rpc`, and those after them. A server adds up deltas, or takes averages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.flow import inner_blocks
from jaxfleet.analysis.placement.sliced_layout import Slice
from jaxfleet.errors import PassError
from jaxfleet.ir import (
    Attr,
    Attrs,
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
from jaxfleet.passes.building_blocks import conversion, update_op
from jaxfleet.passes.pserver.job import (
    Mark,
    PServerJob,
    assembled_server,
    exchange_op,
    listen_and_serv,
    named_trainer,
)

SAMPLES = "@SAMPLES@"  # rows that a trainer trained on since the last exchange
DELTA = ".delta"
OPTI = ".opti"


def local_update_trainer(program: Program, job: PServerJob, trainer_id: int, mark: Mark) -> Program:
    """Returns the program of a trainer that updates parameters itself."""
    return _TrainerWriter(program, job, trainer_id, mark).run()


def delta_name(piece: str) -> str:
    """Returns the name of a slice's delta since the last exchange."""
    return f"{piece}{DELTA}"


def updated_name(piece: str) -> str:
    """Returns the name of a slice as updated by a trainer."""
    return f"{piece}{OPTI}"


@dataclass
class _TrainerWriter:
    program: Program
    job: PServerJob
    trainer_id: int
    mark: Mark
    before: list[Operator] = field(default_factory=list)  # makes the values to send
    splits: list[Operator] = field(default_factory=list)
    sends: list[Operator] = field(default_factory=list)
    receives: list[Operator] = field(default_factory=list)
    joins: list[Operator] = field(default_factory=list)
    after: list[Operator] = field(default_factory=list)
    declared: dict[str, Variable] = field(default_factory=dict)
    top: dict[str, Variable] = field(default_factory=dict)

    @property
    def is_geo(self) -> bool:
        return self.job.mode.communication == "geo"

    def run(self) -> Program:
        for param in dict.fromkeys(cut.param for cut in self.job.slices):
            self._exchange(self.program.variables[param], self.job.of(param))
        if self.job.mode.by_rows:
            self._send_samples()
        if not self.is_geo:
            to, trainer_id = self.job.endpoints, self.trainer_id
            self.sends.append(exchange_op("send_barrier", endpoints=to, trainer_id=trainer_id))
            self.receives.append(exchange_op("fetch_barrier", endpoints=to, trainer_id=trainer_id))
        exchange = [
            *self.before, *self.splits, *self.sends,
            *self.receives, *self.joins, *self.after,
        ]  # fmt: skip
        program, root = self.program, self.program.root
        ops = [*root.ops, *map(self.mark, exchange)]
        made = program.with_block(root.with_ops(ops, declare=self.declared.values()))
        made = replace(made, variables={**program.variables, **self.top})
        return named_trainer(program, made, self.job, self.trainer_id, self.job.mode.facts())

    def _exchange(self, param: Variable, cuts: Sequence[Slice]) -> None:
        names = [cut.name for cut in cuts]
        sent = self._went(param) if self.is_geo else self._updated(param)
        called = [delta_name(n) if self.is_geo else self._own(updated_name(n)) for n in names]
        self._declare_parts(param, called, cuts)
        epmap = self.job.endpoints_of(cuts)
        self.sends.append(exchange_op("send", called, epmap=epmap))
        self._declare_parts(param, [n for n in names if n != param.name], cuts)
        received = exchange_op("recv", (), names, epmap=epmap, trainer_id=self.trainer_id)
        self.receives.append(received)
        if len(cuts) > 1:
            rows = tuple(cut.rows for cut in cuts)
            self.splits.append(exchange_op("split_byref", [sent], called, sections=rows))
            self.joins.append(exchange_op("concat", names, [param.name], axis=0))

    def _went(self, param: Variable) -> str:
        """Computes `(w - old) / T`, and merges the servers' value: `w += servers' - old`."""
        name = param.name
        here, old, moved = (f"{name}@{x}" for x in ("HERE", "OLD", "MOVED"))
        delta = delta_name(name)
        self.top[old] = replace(param, name=old, kind=Kind.STATE)
        part = Literal.of(1.0 / self.job.trainers, param.dtype)
        self.before += [
            self._device(param, "assign", (name,), here),
            self._device(param, "jax.sub", (name, old), moved),
            self._device(param, "jax.mul", (moved, part), delta),
            self._device(param, "jax.add", (old, delta), old),
        ]
        self.after += [
            self._device(param, "jax.sub", (name, old), moved),
            self._device(param, "assign", (name,), old),
            self._device(param, "jax.add", (here, moved), name),
        ]
        return delta

    def _updated(self, param: Variable) -> str:
        """Copies the parameter, weighted by the rows that it was trained on."""
        sent = updated_name(param.name)
        is_whole = any(cut.is_whole for cut in self.job.of(param.name))
        sent = self._own(sent) if is_whole else sent
        if not self.job.mode.by_rows:
            self.before.append(self._device(param, "assign", (param.name,), sent))
            return sent
        weight = self._samples_as(param.dtype)
        self.before.append(self._device(param, "jax.mul", (param.name, weight), sent))
        return sent

    def _samples_as(self, dtype: str) -> str:
        self.top[SAMPLES] = Variable(SAMPLES, "f32", (), Kind.DATA)
        if dtype == "f32":
            return SAMPLES
        name = f"{SAMPLES}.{dtype}"
        if name not in self.declared:
            self.before.append(replace(conversion(SAMPLES, name, dtype), role=Role.DIST))
            self.declared[name] = Variable(name, dtype, ())
        return name

    def _send_samples(self) -> None:
        name = self._own(f"{SAMPLES}.sent")
        self.declared[name] = Variable(name, "f32", ())
        self.before.append(_dist_device("assign", (SAMPLES,), name))
        to = self.job.sharers()
        self.sends.append(exchange_op("send", [name] * len(to), epmap=to))

    def _own(self, name: str) -> str:
        return trainer_name(name, self.trainer_id)

    def _device(
        self, like: Variable, op_type: str, reads: Sequence[str | Literal], made: str
    ) -> Operator:
        if made not in self.top and made != like.name:
            self._declare(made, replace(like, name=made, kind=Kind.TEMP))
        return _dist_device(op_type, reads, made)

    def _declare_parts(self, param: Variable, names: Sequence[str], cuts: Sequence[Slice]) -> None:
        for name, cut in zip(names, cuts, strict=False):
            self._declare(name, replace(param, name=name, shape=cut.shape, kind=Kind.TEMP))

    def _declare(self, name: str, variable: Variable) -> None:
        if name in self.program.variables:
            what = f"'{name}' is a variable of the step, and what is exchanged would be called so"
            raise PassError(what, hint="give that leaf of the state another name")
        self.declared[name] = variable


def _dist_device(op_type: str, reads: Sequence[str | Literal], made: str) -> Operator:
    return Operator(op_type, Operands.of(*reads), Operands.of(made), role=Role.DIST)


def local_update_server(program: Program, job: PServerJob, endpoint: str, mark: Mark) -> Program:
    """Returns the program of the server at an endpoint, which has no optimizer."""
    return _ServerWriter(program, job, endpoint, mark).run()


@dataclass
class _ServerWriter:
    program: Program
    job: PServerJob
    endpoint: str
    mark: Mark
    top: dict[str, Variable] = field(default_factory=dict)
    shared: dict[str, Variable] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=lambda: [Block()])
    holds: list[Attr] = field(default_factory=list)
    merges: dict[str, int] = field(default_factory=dict)

    def run(self) -> Program:
        mode = self.job.mode
        here = self.job.held_by(self.endpoint)
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
        like, merged = self.top[cut.name], updated_name(cut.name)
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
                ops.append(conversion(SAMPLES, weight, like.dtype))
            ops.append(update_op("jax.div", (merged, weight), (cut.name,)))
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
        job, top = self.job, self.top.values()
        sent = [v.name for v in top if v.kind is Kind.DATA]
        runs = [block.index for block in self.blocks[1:]]
        serve = listen_and_serv(job, self.endpoint, sent, runs=runs, merges=self.merges, lr=lr)
        root = Block(variables=self.shared, ops=(self.mark(serve),))
        blocks = (root, *self.blocks[1:])
        return assembled_server(
            self.program, job, self.endpoint, holds=self.holds, variables=top, blocks=blocks
        )


def _op(op_type: str, reads: Sequence[str], made: str, attrs: Attrs | None = None) -> Operator:
    ins, outs = Operands.named(X=reads), Operands.named(Out=made)
    return Operator(op_type, ins, outs, attrs or Attrs(), Role.OPTIMIZE)


# The look-ups of a step, and the gradients of their rows, as the host runs them.
_TABLE_OPS = frozenset({"distributed_lookup_table", "send_rows"})


def step_program(program: Program) -> Program:
    """Returns the part that runs every step: all operators before the exchange."""
    ops, cut = program.root.ops, _cut(program)
    return _only(program, [*ops[:cut], *filter(_is_of_tables, ops[cut:])])


def exchange_program(program: Program) -> Program:
    """Returns the part that runs every `k_steps`, with the params and state that it uses."""
    after = program.root.ops[_cut(program) :]
    made = _only(program, [op for op in after if not _is_of_tables(op)])
    return replace(made, name=f"{program.name}.exchange")


def _cut(program: Program) -> int:
    """Returns where the exchange begins; table rows are looked up and sent in every step."""
    ops, servers = program.root.ops, {Role.DIST, Role.RPC}
    found = (at for at, o in enumerate(ops) if o.role in servers and not _is_of_tables(o))
    return next(found, len(ops))


def _is_of_tables(op: Operator) -> bool:
    return op.type in _TABLE_OPS


def _only(program: Program, ops: Sequence[Operator]) -> Program:
    inner = {block.index: block for block in inner_blocks(program, ops)}
    all_ops = [*ops, *(op for block in inner.values() for op in block.ops)]
    used = {name for op in all_ops for name in (*op.reads, *op.writes)}
    blocks = [inner.get(block.index, replace(block, ops=())) for block in program.blocks]
    blocks[0] = program.root.with_ops(ops).without_unused()
    variables = {
        name: variable
        for name, variable in program.variables.items()
        if name in used or variable.kind is Kind.CONST
    }
    return replace(program, variables=variables, blocks=tuple(blocks))
