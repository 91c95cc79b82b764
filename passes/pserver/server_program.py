"""The program of one server: `listen_and_serv`, and the blocks that it runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.analysis.placement.sliced_layout import Slice
from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    Kind,
    Operands,
    Operator,
    Program,
    Role,
    Source,
    Variable,
    trainer_name,
)
from jaxfleet.ir.inline import embed
from jaxfleet.passes.pserver.dc_asgd import (
    COMPENSATED,
    TRAINER_ID,
    compensated_name,
    compensation_ops,
)
from jaxfleet.passes.pserver.job import Mark, PServerJob, assembled_server, listen_and_serv
from jaxfleet.passes.pserver.server_split import ServerSplit


def server_program(bodies: ServerSplit, job: PServerJob, endpoint: str, mark: Mark) -> Program:
    """Returns the program of the server at an endpoint."""
    return _Server(bodies, job, endpoint, mark).run()


@dataclass
class _Server:
    """Writes one server's program, with a block per task."""

    bodies: ServerSplit  # the parts of the step's optimize section
    job: PServerJob
    endpoint: str
    mark: Mark  # marks an operator as made by the pass
    top: dict[str, Variable] = field(default_factory=dict)  # variables of the program
    # variables of block 0, used by several blocks
    shared: dict[str, Variable] = field(default_factory=dict)
    # so far; block 0 is written last
    blocks: list[Block] = field(default_factory=lambda: [Block()])
    # the indices of the blocks that the server runs, in order
    runs: list[int] = field(default_factory=list)
    # the block that merges a slice's gradient, by the gradient's name there
    merges: dict[str, int] = field(default_factory=dict)
    # for each variable of a slice its name, its leaf and its first row, -1 for a copy
    holds: list[Attr] = field(default_factory=list)
    # the indices of the blocks that make values for other servers
    parts: list[int] = field(default_factory=list)
    # for each slice, the variables with the value that each trainer last received
    backups: list[tuple[str, str]] = field(default_factory=list)
    _parent: int = 0

    def run(self) -> Program:
        bodies, here = self.bodies, self.job.held_by(self.endpoint)
        lr = combine = -1
        if here and bodies.lr.root.ops:
            lr = self._parent = self._add(bodies.lr)
        for cut in here:
            if (part := bodies.updates[cut.param].part) is not None:
                self.parts.append(self._add(part, cut))
        if here and bodies.combine is not None:
            exchange = self._exchange()
            fed = bodies.combine.variables
            self.shared |= {n: replace(fed[n], kind=Kind.TEMP) for n in exchange.writes}
            combine = self._add(bodies.combine, before=[exchange])
        for cut in here:
            sizes = {} if cut.is_whole else {"rows": cut.rows}
            body = bodies.cut(cut.param, cut.rows if sizes else None)
            self._add(body, cut, sizes=sizes)
        if not here:
            self.runs.append(1)
            self.blocks.append(Block(1, 0))
        return self._program(lr, combine)

    def _add(
        self,
        body: Program,
        cut: Slice | None = None,
        *,
        before: Sequence[Operator] = (),
        sizes: Mapping[str, int] | None = None,
    ) -> int:
        index = len(self.blocks)
        names = {} if cut is None or cut.is_whole else self._names(cut)
        if cut is not None and names:
            self.holds += self._held(body, names, cut)
        late = self._late(cut, names) if cut is not None else {}
        made = embed(
            body,
            index=index,
            inner_from=index + 1,
            parent=self._parent,
            names={**names, **late},
            sizes=sizes or {},
        )
        kept = {Kind.PARAM, Kind.STATE, Kind.CONST}
        self.top.update((n, v) for n, v in made.variables.items() if v.kind in kept)
        comes = {n: v for n, v in made.variables.items() if n in self.bodies.feeds}
        if cut is not None:
            gradients = self.bodies.groups.group(cut.param).gradients
            called = {**names, **late}
            comes |= {name: made.variables[called.get(name, name)] for name in gradients}
        declared: dict[str, Variable] = {}
        ops = [*before]
        if cut is not None and late:
            ops += self._compensated(cut, comes, late, declared)
            comes = {name: like for name, like in comes.items() if name not in late}
        for name, like in comes.items():
            ops += self._merge(name, like, index, declared)
        block = made.root.with_ops(map(self.mark, ops), declare=declared.values())
        block = block.with_ops([*block.ops, *made.root.ops])
        self.blocks += [block, *made.inner]
        self.runs.append(index)
        return index

    def _names(self, cut: Slice) -> dict[str, str]:
        """Returns the new names in a slice of all that belongs to the parameter."""
        group, exports = self.bodies.groups.group(cut.param), self.job.exports
        own = (cut.param, *group.gradients, *group.state, *exports.get(cut.param, ()))
        return {name: self.job.name(name, cut) for name in own}

    def _held(self, body: Program, names: Mapping[str, str], cut: Slice) -> Iterator[Attr]:
        """Yields the name, leaf and first row of a slice's variables; -1 for those without rows."""
        for variable in body.of_kind(Kind.PARAM, Kind.STATE):
            is_cut = bool(variable.shape) and not isinstance(variable.shape[0], int)
            yield names[variable.name], variable.name, cut.start if is_cut else -1

    def _merge(
        self, gradient: str, like: Variable, index: int, declared: dict[str, Variable]
    ) -> Iterator[Operator]:
        """Yields the operators that merge a gradient, unless an earlier block did."""
        if like.name in self.merges:
            return
        self.merges[like.name] = index
        if not self.job.mode.is_sync:  # each trainer's gradient is applied alone
            self.top[like.name] = replace(like, kind=Kind.DATA)
            return
        declared[like.name] = replace(like, kind=Kind.TEMP)
        buffers = [trainer_name(like.name, t) for t in self.job.senders(gradient)]
        for name in buffers:
            self.top[name] = replace(like, name=name, kind=Kind.DATA)
        yield Operator(
            "sum",
            Operands.named(X=buffers),
            Operands.named(Out=like.name),
            role=Role.OPTIMIZE,
            source=self._source(gradient),
        )

    def _late(self, cut: Slice, names: Mapping[str, str]) -> dict[str, str]:
        """Returns the name of a slice's gradient after delay compensation."""
        if self.job.mode.communication != "dc_asgd":
            return {}
        gradients = self.bodies.groups.group(cut.param).gradients
        return {name: compensated_name(names.get(name, name)) for name in gradients}

    def _compensated(
        self,
        cut: Slice,
        comes: Mapping[str, Variable],
        late: Mapping[str, str],
        declared: dict[str, Variable],
    ) -> Iterator[Operator]:
        for gradient, corrected in late.items():
            like = comes[gradient]
            sent = replace(like, name=like.name.removesuffix(COMPENSATED), kind=Kind.DATA)
            self.top[sent.name] = sent
            self.merges[sent.name] = len(self.blocks)
            copies = [f"{trainer_name(cut.name, t)}_bak" for t in range(self.job.trainers)]
            self.top.update((copy, replace(sent, name=copy)) for copy in copies)
            self.top[TRAINER_ID] = Variable(TRAINER_ID, "i32", (), Kind.DATA)
            self.backups += [(cut.name, copy) for copy in copies]
            ops, made = compensation_ops(
                cut.name, sent, corrected, copies, self.job.mode.compensation
            )
            declared.update((v.name, v) for v in made)
            yield from ops

    def _source(self, gradient: str) -> Source:
        ops = self.bodies.groups.program.root.ops
        found = [op.source for op in ops if gradient in op.writes]
        return found[-1] if found else Operator("sum").source

    def _exchange(self) -> Operator:
        """Returns the operator that sends this server's parts to the others and awaits theirs."""
        here: list[str] = []
        there: dict[str, str] = {}
        for update in self.bodies.updates.values():
            for cut in self.job.of(update.group.name):
                at = self.job.placement[cut.name]
                if at == self.endpoint:
                    here += update.parts
                else:
                    there.update(dict.fromkeys(update.parts, at))
        return Operator(
            "exchange",
            Operands.named(X=here),
            Operands.named(Out=list(there)),
            Attrs({"endpoints": self.job.sharers(), "epmap": tuple(there.values())}),
            Role.RPC,
        )

    def _program(self, lr: int, combine: int) -> Program:
        step, top = self.bodies.groups.program, self.top.values()
        facts = {"backups": tuple(self.backups)} if self.backups else {}
        root = Block(ops=(self.mark(self._serve(lr, combine)),))
        blocks = (root, *self.blocks[1:])
        made = assembled_server(
            step, self.job, self.endpoint, holds=self.holds, variables=top, blocks=blocks, **facts
        )
        return self._hoisted(made)

    def _serve(self, lr: int, combine: int) -> Operator:
        made = listen_and_serv(
            self.job,
            self.endpoint,
            [v.name for v in self.top.values() if v.kind is Kind.DATA],
            runs=self.runs,
            merges=self.merges,
            lr=lr,
            combine=combine,
            parts=self.parts,
        )
        if not self.backups:
            return made
        sent = Operands.named(X=list(self.merges))  # trainers do not send gradients kept by servers
        return replace(made, inputs=sent, attrs=made.attrs.updated(dc_asgd=True))

    def _hoisted(self, program: Program) -> Program:
        """Declares in block 0 the variables that cross blocks, or that trainers read."""
        uses = OuterUses(program)
        wanted = {name for names in self.job.exports.values() for name in names}
        wanted |= {
            self.job.name(name, cut)
            for cut in self.job.held_by(self.endpoint)
            for name in self.job.exports.get(cut.param, ())
        }
        for index in self.runs:
            wanted |= uses.of_block(index).reads
        blocks = list(program.blocks)
        shared = dict(self.shared)
        for index in self.runs:
            block = blocks[index]
            made = {name: v for name, v in block.variables.items() if name in wanted}
            shared.update(made)
            rest = {name: v for name, v in block.variables.items() if name not in shared}
            blocks[index] = replace(block, variables=rest).without_unused()
        blocks[0] = replace(blocks[0], variables=shared)
        return program.with_blocks(blocks)
