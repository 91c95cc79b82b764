"""A trainer's program in fluid's dialect, with fluid's operators in fluid's order."""

from dataclasses import dataclass, field, replace

from jaxfleet.analysis.placement.sliced_layout import Slice
from jaxfleet.ir import Attr, Kind, Operator, Program, Variable, trainer_name
from jaxfleet.ir.inline import embed
from jaxfleet.ir.naming import LR_COUNTER
from jaxfleet.passes.fluid.distributed_table import Table
from jaxfleet.passes.fluid.job import FluidJob, Messages
from jaxfleet.passes.pserver.job import Mark


def fluid_trainer(fluid: FluidJob, trainer_id: int, mark: Mark) -> Program:
    """Returns the program of a trainer."""
    return _Trainer(fluid, trainer_id, mark).run()


@dataclass
class _Trainer:
    fluid: FluidJob
    trainer_id: int
    mark: Mark
    messages: Messages = field(init=False)
    ops: list[Operator] = field(init=False)
    made: list[Operator] = field(default_factory=list)
    table: Table | None = field(init=False)
    names: dict[str, str] = field(default_factory=dict)
    sent: dict[str, str] = field(default_factory=dict)
    counter: Variable | None = None

    def __post_init__(self) -> None:
        self.messages = Messages(self.mark)
        self.table = Table.of(self.fluid)
        self.ops = list(self.fluid.updates.program.root.ops)

    def run(self) -> Program:
        updates = self.fluid.updates
        if self.table is not None:
            self.ops = self.table.asks(self.ops, self.messages)
        sent = self._sends()
        on_servers = {*updates.ops, *updates.schedule}
        for place, op in enumerate(self.ops):
            kept = [] if op in on_servers else [op]
            self.made += [self._renamed(each) for each in (*kept, *sent.get(place, ()))]
        self._wait()
        self._receive()
        return self._program()

    # --- sending -----------------------------------------------------------------------------

    def _sends(self) -> dict[int, list[Operator]]:
        """Returns the operators that send each gradient, by the index of its last writer."""
        last = {name: place for place, op in enumerate(self.ops) for name in op.writes}
        found: dict[int, list[Operator]] = {}
        for param, gradient in self.fluid.updates.pairs:
            place, cuts = last[gradient], self.fluid.job.of(param)
            source = self.ops[place].source
            ops = self._sending(param, gradient, cuts)
            made = [self.mark(replace(op, source=source)) for op in ops]
            found[place] = [*made, *found.get(place, ())]
        if self.table is not None:
            control = self._control(self.table.gradient)
            made = self.table.sends(self.trainer_id, control, self.messages)
            found.setdefault(last[self.table.gradient], []).extend(made)
        return found

    def _sending(self, param: str, gradient: str, cuts: tuple[Slice, ...]) -> list[Operator]:
        if self.fluid.exchange.runtime_split:
            return [self._send_whole(param, gradient, cuts)]
        names = self.fluid.names(gradient, cuts, self.trainer_id)
        ops = []
        if len(cuts) > 1:
            ops.append(self._split(gradient, names, cuts))
        elif names[0] != gradient:
            self.names[gradient] = names[0]
        pair = ((param, self.names.get(gradient, gradient)),)
        attrs = self._attrs(cuts)
        ops.append(self.messages.rpc("send", names, [self._control(gradient)], attrs, pair))
        return ops

    def _split(self, gradient: str, names: list[str], cuts: tuple[Slice, ...]) -> Operator:
        for name, cut in zip(names, cuts, strict=True):
            self.messages.declared[name] = self.fluid.like(gradient, name, cut)
        rows = tuple(cut.rows for cut in cuts)
        if gradient in self.fluid.updates.sparse:
            attrs = {"height_sections": rows}
            return self.messages.cut_or_join("split_selected_rows", [gradient], names, attrs)
        return self.messages.cut_or_join("split_byref", [gradient], names, {"sections": rows})

    def _send_whole(self, param: str, gradient: str, cuts: tuple[Slice, ...]) -> Operator:
        attrs = self._attrs(cuts)
        attrs["sections"] = tuple(cut.rows for cut in cuts)
        attrs["send_varnames"] = tuple(self.fluid.names(gradient, cuts, self.trainer_id))
        pair = ((param, gradient),)
        return self.messages.rpc("send", [gradient], [self._control(gradient)], attrs, pair)

    def _attrs(self, cuts: tuple[Slice, ...]) -> dict[str, Attr]:
        return {"epmap": self.fluid.endpoints(cuts), "trainer_id": self.trainer_id}

    def _control(self, gradient: str) -> str:
        self.sent[gradient] = self.messages.control()
        return self.sent[gradient]

    def _wait(self) -> None:
        exchange = self.fluid.exchange
        if exchange.has_barriers or exchange.local_barrier:
            self.sent["*"] = barrier = self.messages.control()
            read = [name for gradient, name in self.sent.items() if gradient != "*"]
            attrs = {**self._to_all(), "half_async": exchange.local_barrier}
            self.made.append(self.messages.rpc("send_barrier", read, [barrier], attrs))
        if self.fluid.counts_steps:
            self.made.append(self._count())

    def _count(self) -> Operator:
        """Returns the operator that reports another step of this trainer to all servers."""
        name = trainer_name(LR_COUNTER, self.trainer_id)
        like = self.fluid.updates.variable(LR_COUNTER)
        self.counter = replace(like, name=name, kind=Kind.STATE)
        attrs: dict[str, Attr] = {
            "epmap": self.fluid.job.endpoints,
            "merge_add": True,
            "trainer_id": self.trainer_id,
            "use_send_handler": False,
        }
        return self.messages.rpc("send", [name], [self.messages.control()], attrs)

    # --- receiving ---------------------------------------------------------------------------

    def _receive(self) -> None:
        received: list[str] = []
        joins: list[Operator] = []
        for param, gradient in self.fluid.updates.pairs:
            if param in self.fluid.updates.prefetched:
                continue
            cuts = self.fluid.job.of(param)
            names = [cut.name for cut in cuts]
            after = [self.sent["*" if self.fluid.exchange.has_barriers else gradient]]
            pair = ((param, self.names.get(gradient, gradient)),)
            attrs = self._attrs(cuts)
            if self.fluid.exchange.runtime_split:
                attrs["recv_varnames"], names = tuple(names), [param]
            received += names
            self.made.append(self.messages.rpc("recv", after, names, attrs, pair))
            if len(names) > 1:
                self.messages.declared.update(
                    (name, self.fluid.like(param, name, cut))
                    for name, cut in zip(names, cuts, strict=True)
                )
                joins.append(self.messages.cut_or_join("concat", names, [param], {"axis": 0}))
        if self.fluid.exchange.has_barriers:
            waited = [self.sent["*"]]
            self.made.append(self.messages.rpc("fetch_barrier", waited, received, self._to_all()))
        self.made += joins

    def _to_all(self) -> dict[str, Attr]:
        return {"endpoints": self.fluid.job.endpoints, "trainer_id": self.trainer_id}

    # --- the program -------------------------------------------------------------------------

    def _renamed(self, op: Operator) -> Operator:
        if self.names.keys().isdisjoint((*op.reads, *op.writes)):
            return op
        ins, outs = op.inputs.renamed(self.names), op.outputs.renamed(self.names)
        return replace(op, inputs=ins, outputs=outs)

    def _program(self) -> Program:
        updates = self.fluid.updates
        program = updates.program
        dropped = unread_by_trainers(self.fluid)
        variables = {n: v for n, v in program.variables.items() if n not in dropped}
        if self.counter is not None:
            variables[self.counter.name] = self.counter
        unmade = self._unmade()
        variables |= unmade
        block = program.root
        renamed = [
            replace(block.variables[old], name=new)
            for old, new in self.names.items()
            if old in block.variables and new not in unmade
        ]
        declared = [*renamed, *self.messages.declared.values()]
        block = block.with_ops(self.made, declare=[v for v in declared if v.name not in unmade])
        own = {name: v for name, v in block.variables.items() if name not in unmade}
        block = replace(block, variables=own)
        facts = program.attrs.updated(
            counts_steps=self.fluid.counts_steps,
            mode=self.fluid.exchange.mode,
            on_servers=tuple(sorted(dropped)),
            prefetched=tuple(sorted({*updates.prefetched, *updates.tables})),
            role="trainer",
            trainer_id=self.trainer_id,
            trainers=self.fluid.job.trainers,
        )
        made = replace(program, variables=variables, attrs=facts)
        made = without_lost_blocks(made.with_block(block.without_unused()))
        return replace(made, name=f"{program.name}.trainer{self.trainer_id}")

    def _unmade(self) -> dict[str, Variable]:
        """Returns variables that are sent but never made, as data that is not fed.

        Clipping of all gradients by their common norm, if among the updates, goes to servers, as in
        fluid; the runtime reports it for such a program.
        """
        made = {name for op in self.made for name in op.writes}
        sent = {name for op in self.made if op.type == "send" for name in op.reads}
        back = {new: old for old, new in self.names.items()}
        like = self.fluid.updates.variable
        lost = sent - made - ({self.counter.name} if self.counter is not None else set())
        return {
            name: replace(like(back.get(name, name)), name=name, kind=Kind.DATA)
            for name in sorted(lost)
        }


def without_lost_blocks(program: Program) -> Program:
    """Returns the program without unreferenced blocks."""
    made = embed(program, index=0, inner_from=1, parent=-1, names={}, sizes={})
    return program.with_blocks((made.root, *made.inner))


def unread_by_trainers(fluid: FluidJob) -> frozenset[str]:
    """Returns the variables that only updates read: learning rates and optimizer state."""
    updates = fluid.updates
    on_servers = {*updates.ops, *updates.schedule}
    mine = [op for op in updates.program.root.ops if op not in on_servers]
    kept = {name for op in mine for name in (*op.reads, *op.writes)}
    kept |= {param for param, _ in updates.all_pairs}
    read = {name for op in updates.ops for name in op.reads}
    return frozenset(name for name in read - kept if name in updates.program.variables)
