"""A server's program in fluid's dialect: `listen_and_serv`, and a block for each slice."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.placement.sliced_layout import Slice
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
    block_name,
    trainer_name,
)
from jaxfleet.ir.naming import LR_COUNTER
from jaxfleet.passes.fluid.distributed_table import Table
from jaxfleet.passes.fluid.job import MODES, FluidJob, ServerBlocks
from jaxfleet.passes.pserver.job import Mark

_INDEX = 1  # of the block; its parent is block 0


@dataclass
class ScheduleBlocks:
    """Copies the operators of a learning-rate schedule, with their blocks, for a server."""

    fluid: FluidJob
    # the block, then its sub-blocks; the first has index 1
    blocks: list[Block] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # the variables of block 0 that they use
    # each trainer's count of reported steps, if trainers report them
    counters: list[Variable] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._copy(self.fluid.updates.schedule, 0, ())
        if self.fluid.counts_steps:
            self._count()

    def _copy(self, ops: Sequence[Operator], parent: int, own: Sequence[Variable]) -> int:
        place = len(self.blocks)
        index = place + _INDEX
        self.blocks.append(Block(index, parent))
        inner = {v.name: v for v in own}
        self._name(ops, inner)
        copied = tuple(self._with_blocks(op, index) for op in ops)
        self.blocks[place] = Block(index, parent, inner, ops=copied)
        return index

    def _name(self, ops: Sequence[Operator], inner: dict[str, Variable]) -> None:
        program = self.fluid.updates.program
        for op in ops:
            for name in (*op.reads, *op.writes):
                seen = name in inner or name in self.names
                if not seen and (name in program.variables or name in program.root.variables):
                    self.names.append(name)

    def _with_blocks(self, op: Operator, index: int) -> Operator:
        if not op.blocks:
            return op
        program, attrs = self.fluid.updates.program, dict[str, Attr](op.attrs)
        for name, value in attrs.items():
            if isinstance(value, BlockRef):
                inner = program.blocks[value.index]
                copied = self._copy(inner.ops, index, tuple(inner.variables.values()))
                attrs[name] = BlockRef(copied)
        return replace(op, attrs=Attrs(attrs))

    def _count(self) -> None:
        """Sums the steps that trainers report instead of counting."""
        like = self.fluid.updates.variable(LR_COUNTER)
        names = [trainer_name(LR_COUNTER, trainer) for trainer in range(self.fluid.job.trainers)]
        self.counters = [replace(like, name=name, kind=Kind.STATE) for name in names]
        ops = self.blocks[0].ops
        self.blocks[0] = self.blocks[0].with_ops(self._counted(ops, names))

    def _counted(self, ops: Sequence[Operator], names: Sequence[str]) -> Iterator[Operator]:
        for op in ops:
            if op.type == "increment" and LR_COUNTER in op.writes:
                read, made = Operands.named(X=names), Operands.named(Out=LR_COUNTER)
                yield Operator("sum", read, made, role=op.role, source=op.source)
            else:
                yield op


_RPC_THREADS = 12  # fluid's; unused here
# Fluid cuts optimizer state of the parameter's shape, except for this one, which matters only
# if gradients are centered.
_UNCUT = "MeanGrad"


def fluid_server(fluid: FluidJob, endpoint: str, mark: Mark) -> Program:
    """Returns the program of the server at an endpoint."""
    return _Server(fluid, endpoint, mark).run()


@dataclass
class _Server:
    """Writes one server's program."""

    fluid: FluidJob  # the job
    endpoint: str  # the server's
    mark: Mark  # marks an operator as made by the pass
    server: ServerBlocks = field(init=False)  # its blocks and variables
    # pairs of a gradient of rows and its parameter, as `gradient:parameter`
    sparse: list[str] = field(default_factory=list)
    fed: list[str] = field(default_factory=list)  # the names that trainers send
    lr: int = -1  # the index of the block that computes learning rates; -1 for none
    facts: dict[str, Attr] = field(default_factory=dict)  # more attributes of `listen_and_serv`
    table: Table | None = field(init=False)  # the distributed table, or None

    def __post_init__(self) -> None:
        job, self.table = self.fluid.job, Table.of(self.fluid)
        step, number = self.fluid.updates.program, job.endpoints.index(self.endpoint)
        self.server = ServerBlocks(step, self.endpoint, number, job.trainers)

    def run(self) -> Program:
        here = [cut for cut in self.fluid.job.slices
                if self.fluid.job.placement[cut.name] == self.endpoint]  # fmt: skip
        here.sort(key=lambda cut: self.fluid.updates.places[cut.param])
        self._schedule()
        for cut in here:
            self._update(cut, here)
        if self.table is not None:
            self._hold_rows(self.table)
        return self._program()

    def _schedule(self) -> None:
        if not self.fluid.updates.schedule:
            return
        made = ScheduleBlocks(self.fluid)
        self.lr = 1
        self.server.blocks += made.blocks
        for name in made.names:
            self._declare(name, name, Kind.STATE)
        for variable in made.counters:
            self.server.top[variable.name] = variable
            self.server.holds[variable.name] = (variable.name, variable.name, -1)

    def _hold_rows(self, table: Table) -> None:
        number, first = self.server.number, len(self.server.blocks)
        for variable in table.variables(number):
            self.server.top[variable.name] = variable
        self.server.holds[table.name] = (table.name, table.name, -1)
        self.fed += table.buffers(number)
        made = table.blocks(number, first, max(self.lr, 0), self.mark)
        for name in made[0].ops[-1].inputs.slot("LearningRate"):
            self._declare(str(name), str(name), Kind.STATE)
        self.server.blocks += made
        self.server.updates[first] = table.gradient
        self.facts = table.facts(number, first)

    # --- one slice ---------------------------------------------------------------------------

    def _update(self, cut: Slice, here: list[Slice]) -> None:
        updates = self.fluid.updates
        gradient = dict(updates.pairs)[cut.param]
        names = self._names(cut, gradient, here)
        ops = [*self._merge(gradient, names[gradient], cut)] if self.fluid.merges else []
        for op in updates.of(cut.param):
            ins, outs = op.inputs.renamed(names), op.outputs.renamed(names)
            pair = ((cut.name, names[gradient]),)
            ops.append(replace(op, inputs=ins, outputs=outs, role_var=pair))
        self._declare_all(cut, gradient, names)
        if not self.fluid.merges:
            self.fed.append(names[gradient])
        if gradient in updates.sparse:
            self.sparse.append(f"{names[gradient]}:{cut.name}")
        self.server.add_block(ops, names[gradient], parent=max(self.lr, 0))

    def _names(self, cut: Slice, gradient: str, here: list[Slice]) -> dict[str, str]:
        """Returns the new names in a slice.

        Fluid does not rename state, so a server can hold only one slice of a parameter; here the
        state of a second one gets another name.
        """
        job = self.fluid.job
        names = {cut.param: cut.name, gradient: job.name(gradient, cut)}
        first = next(other for other in here if other.param == cut.param)
        if cut == first:
            return names
        own = {name for op in self.fluid.updates.of(cut.param) for name in (*op.reads, *op.writes)
               if self._is_cut(name, cut)}  # fmt: skip
        own |= self._state(cut.param)
        return {**{name: block_name(name, cut.index) for name in own}, **names}

    def _state(self, param: str) -> set[str]:
        """Returns the state that only a parameter's update writes."""
        updates = self.fluid.updates
        written = {name for op in updates.of(param) for name in op.writes}
        return {name for name in written if updates.variable(name).kind.persistable} - {param}

    def _merge(self, gradient: str, name: str, cut: Slice) -> tuple[Operator, Operator]:
        """Returns the operators that sum a gradient over all trainers and take the mean."""
        trainers = self.fluid.job.trainers
        buffers = [trainer_name(name, trainer) for trainer in range(trainers)]
        for buffer in buffers:
            self.server.top[buffer] = self.fluid.like(gradient, buffer, cut, Kind.DATA)
        self.fed += buffers
        made = Operands.named(Out=name)
        pair = ((cut.name, name),)
        added = Operator("sum", Operands.named(X=buffers), made, role=Role.OPTIMIZE, role_var=pair)
        attrs = Attrs({"scale": 1.0 / trainers})
        read = Operands.named(X=name)
        mean = Operator("scale", read, made, attrs, Role.OPTIMIZE, role_var=pair)
        return self.mark(added), self.mark(mean)

    def _declare_all(self, cut: Slice, gradient: str, names: Mapping[str, str]) -> None:
        self._declare(cut.param, cut.name, Kind.PARAM, cut)
        self._declare(gradient, names[gradient], Kind.STATE, cut)
        for op in self.fluid.updates.of(cut.param):
            for name in (*op.reads, *op.writes):
                part = cut if self._is_cut(name, cut, op) else None
                self._declare(name, names.get(name, name), Kind.STATE, part)

    def _is_cut(self, name: str, cut: Slice, op: Operator | None = None) -> bool:
        """Whether a variable has the rows of the parameter, and is cut with it."""
        updates = self.fluid.updates
        if cut.is_whole or updates.variable(name).shape != updates.variable(cut.param).shape:
            return False
        if op is None or name not in op.inputs.slot(_UNCUT):
            return True
        return bool(op.attrs.get("centered"))

    def _declare(self, name: str, held: str, kind: Kind, cut: Slice | None = None) -> None:
        if held in self.server.top:
            return
        like = self.fluid.updates.variable(name)
        if cut is None or cut.is_whole:
            self.server.top[held] = replace(like, name=held, kind=kind)
            self.server.holds[held] = (held, name, -1)
        else:
            self.server.top[held] = self.fluid.like(name, held, cut, kind)
            self.server.holds[held] = (held, name, cut.start)

    # --- the program -------------------------------------------------------------------------

    def _program(self) -> Program:
        facts: dict[str, Attr] = {
            "distributed_mode": MODES.index(self.fluid.exchange.mode),
            "lr_decay_block_id": self.lr,
            "rpc_get_thread_num": _RPC_THREADS,
            "rpc_prefetch_thread_num": _RPC_THREADS,
            "rpc_send_thread_num": _RPC_THREADS,
            "sparse_grad_to_param": tuple(self.sparse),
            **self.facts,
        }
        return self.server.program(
            "listen_and_serv",
            self.fluid.exchange.mode,
            facts,
            self.mark,
            fed=self.fed,
            first=(self.lr,) if self.lr > 0 else (),
            counts_steps=self.fluid.counts_steps,
            prefetched=tuple(sorted(self.fluid.updates.prefetched)),
        )
