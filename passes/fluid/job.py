"""A job in fluid's dialect: the facts that its programs share, its messages and startup programs.

Each side initializes its own variables: servers with the operators of the step's startup program.
Trainers initialize everything too, and then receive the servers' values, so that all agree.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from jaxfleet.analysis.placement.sliced_layout import (
    Slice,
    known_shape,
    placement_of,
    server_variables,
    slices_of,
)
from jaxfleet.analysis.updates import Updates
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
    trainer_name,
)
from jaxfleet.ir.naming import LR_COUNTER
from jaxfleet.passes.pserver.job import Mark, PServerJob

_CONTROL = "__control_var@"  # fluid's marker that orders one operator after another


@dataclass
class Messages:
    """Creates the operators that communicate with servers, and declares the variables they need."""

    mark: Mark
    declared: dict[str, Variable] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def control(self) -> str:
        name = f"{_CONTROL}{next(self._numbers)}"
        self.declared[name] = Variable(name, "raw", ())
        return name

    def rpc(
        self,
        op_type: str,
        read: Sequence[str],
        written: Sequence[str],
        attrs: Mapping[str, Attr],
        pair: tuple[tuple[str, str], ...] = (),
    ) -> Operator:
        ins, outs = Operands.named(X=read), Operands.named(Out=written)
        return self.mark(Operator(op_type, ins, outs, Attrs(attrs), Role.RPC, pair))

    def cut_or_join(
        self, op_type: str, read: Sequence[str], written: Sequence[str], attrs: Mapping[str, Attr]
    ) -> Operator:
        ins, outs = Operands.named(X=read), Operands.named(Out=written)
        return self.mark(Operator(op_type, ins, outs, Attrs(attrs), Role.DIST))


GEO = "geo"  # the mode in which trainers update, and exchange deltas
MODES = ("sync", "async", "half_async")  # the index is fluid's number of the mode


@dataclass(frozen=True)
class ExchangeMode:
    """How gradients and parameters travel."""

    # `sync`: servers wait for the gradients of all trainers, and take their mean. `async`: they
    # apply each on arrival. `half_async`: on arrival, in blocks that trainers cut
    mode: str = "sync"
    runtime_split: bool = False  # the sender and the receiver split and join, without operators
    local_barrier: bool = False  # a trainer waits until its sends have completed

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            what = f"insert_send_recv: mode is '{self.mode}'"
            raise PassError(what, hint=f"choose one of {', '.join(MODES)}")

    @property
    def is_plain(self) -> bool:
        return self == ExchangeMode()

    @property
    def has_barriers(self) -> bool:
        """Whether all trainers wait for each other in a step."""
        return self.mode == "sync" and not self.runtime_split


@dataclass(frozen=True)
class FluidJob:
    """A job of a program with roles that mark the updates."""

    updates: Updates
    job: PServerJob
    exchange: ExchangeMode

    @property
    def merges(self) -> bool:
        """Whether a server sums received gradients; not needed for a single trainer."""
        alone = self.exchange.runtime_split and self.job.trainers == 1
        return self.exchange.mode == "sync" and not alone

    @property
    def counts_steps(self) -> bool:
        """Whether trainers report steps to servers, which cannot see them, for learning rates."""
        made = {name for op in self.updates.schedule for name in op.writes}
        return self.exchange.mode != "sync" and LR_COUNTER in made

    def names(self, gradient: str, cuts: tuple[Slice, ...], trainer_id: int) -> list[str]:
        """Returns a trainer's names of the slices of a gradient that it sends."""
        own = self.exchange.mode == "sync" and self.job.trainers > 1
        names = [self.job.name(gradient, cut) for cut in cuts]
        return [trainer_name(name, trainer_id) for name in names] if own else names

    def endpoints(self, cuts: tuple[Slice, ...]) -> tuple[str, ...]:
        return tuple(self.job.placement[cut.name] for cut in cuts)

    def like(self, variable: str, name: str, cut: Slice, kind: Kind = Kind.TEMP) -> Variable:
        """Returns a slice of a variable, under another name."""
        whole = self.updates.variable(variable)
        shape = whole.shape if cut.is_whole else (cut.rows, *whole.shape[1:])
        return replace(whole, name=name, shape=shape, kind=kind)


_KINDS = (Kind.DATA, Kind.PARAM, Kind.STATE)


@dataclass
class ServerBlocks:
    """The blocks of one server, and the variables that they need."""

    step: Program  # the step's program
    endpoint: str  # the server's
    number: int  # the server's index
    trainers: int  # the number of trainers
    top: dict[str, Variable] = field(default_factory=dict)  # the variables of the program
    # block 0, which is written last, and one for each update
    blocks: list[Block] = field(default_factory=lambda: [Block()])
    # the indices of the blocks, each with its input
    updates: dict[int, str] = field(default_factory=dict)
    # for each variable its name, the whole variable, and its first row there, or -1
    holds: dict[str, Attr] = field(default_factory=dict)

    def declare(self, param: str, name: str, kind: Kind, cut: Slice | None = None) -> None:
        """Declares a part of a parameter, or a variable like it."""
        like = self.step.lookup(param)
        is_cut = cut is not None and not cut.is_whole
        shape = (cut.rows, *like.shape[1:]) if cut is not None and is_cut else like.shape
        self.top[name] = replace(like, name=name, shape=shape, kind=kind)
        if kind is Kind.PARAM:
            self.holds[name] = (name, param, cut.start if cut is not None and is_cut else -1)

    def add_block(self, ops: Sequence[Operator], takes: str, parent: int = 0) -> None:
        index = len(self.blocks)
        self.blocks.append(Block(index, parent, ops=tuple(ops)))
        self.updates[index] = takes

    def program(
        self,
        serves: str,
        mode: str,
        facts: Mapping[str, Attr],
        mark: Mark,
        *,
        fed: Sequence[str] | None = None,
        first: Sequence[int] = (),
        **about: Attr,
    ) -> Program:
        """Returns the complete program, with more attributes `about` it.

        The operator `serves` of block 0 reads what is `fed`, runs the blocks `first` before the
        updates, and also gets the `facts`. `mark` marks it as made by the pass.
        """
        if not self.updates:
            self.add_block((), "")
        attrs: dict[str, Attr] = {
            "Fanin": self.trainers,
            "endpoint": self.endpoint,
            "grad_to_block_id": tuple(f"{name}:{n}" for n, name in self.updates.items() if name),
            "optimize_blocks": tuple(BlockRef(index) for index in (*first, *self.updates)),
            "pserver_id": self.number,
            **facts,
        }
        read = Operands() if fed is None else Operands.named(X=fed)
        serve = mark(Operator(serves, read, attrs=Attrs(attrs), role=Role.RPC))
        root = replace(self.blocks[0], ops=(serve,))
        said = self.step.attrs.updated(
            endpoint=self.endpoint,
            holds=tuple(self.holds.values()),
            mode=mode,
            pserver_id=self.number,
            role="pserver",
            trainers=self.trainers,
            **about,
        )
        top = sorted(self.top.values(), key=lambda v: _KINDS.index(v.kind))
        name = f"{self.step.name}.pserver{self.number}"
        return Program(name, {v.name: v for v in top}, (root, *self.blocks[1:]), said)


_BEGUN = "param_init"  # fluid's, without a value: marks the base of deltas
# Their attribute `shape` is that of their output: the rows that a server holds.
_SHAPED = ("fill_constant", "gaussian_random", "truncated_gaussian_random", "uniform_random")


def fluid_trainer_startup(program: Program, mark: Mark) -> Program:
    """Returns a trainer's startup program.

    `program` is the step's startup program, with the attributes of the trainer's program. A table
    on servers must be initialized by exactly one operator.
    """
    return _TrainerStartup(with_counters(program), mark).run()


def fluid_server_startup(program: Program, mark: Mark) -> Program:
    """Returns a server's startup program.

    `program` is the step's startup program, with the attributes and variables of the server's.
    """
    program = with_counters(program)
    ops = [mark(made) for op in program.root.ops for made in _begun(program, op)]
    ops += map(mark, _backups(program))
    begun = {name for op in ops for name in op.writes}
    variables = {name: v for name, v in program.variables.items() if name in begun}
    for param, copy in _pairs(program):
        variables[copy] = replace(variables[param], name=copy, kind=Kind.STATE)
    block = program.root.with_ops(ops).without_unused()
    number = program.attrs["pserver_id"]
    made = replace(program, variables=variables, name=f"{program.name}.pserver{number}")
    return made.with_block(block)


def with_counters(program: Program) -> Program:
    """Returns a startup program that initializes each trainer's count of steps, if any.

    The schedule's counter starts such that the first step of all trainers together is its first.
    """
    if not program.attrs.get("counts_steps"):
        return program
    trainers = program.attrs["trainers"]
    assert isinstance(trainers, int)
    like = program.variables[LR_COUNTER]
    ops, variables = list(program.root.ops), dict(program.variables)
    for place, op in enumerate(ops):
        if LR_COUNTER in op.writes:
            ops[place] = replace(op, attrs=op.attrs.updated(value=float(-trainers)))
            begin = op
    for trainer in range(trainers):
        name = trainer_name(LR_COUNTER, trainer)
        variables[name] = replace(like, name=name)
        outputs = begin.outputs.renamed({LR_COUNTER: name})
        ops.insert(0, replace(begin, outputs=outputs, attrs=begin.attrs.updated(value=1.0)))
    return replace(program, variables=variables).with_block(program.root.with_ops(ops))


@dataclass
class _TrainerStartup:
    program: Program
    mark: Mark
    messages: Messages = field(init=False)

    def __post_init__(self) -> None:
        self.messages = Messages(self.mark)

    def run(self) -> Program:
        program, facts = self.program, self.program.attrs
        dropped, tables = _names(facts, "on_servers"), _names(facts, "prefetched")
        holds_tables = facts.get("mode") == GEO
        elsewhere = {*dropped} if holds_tables else {*dropped, *tables}
        ops = [op for op in program.root.ops if elsewhere.isdisjoint(op.writes)]
        ops += self._receive(tables)
        ops += [self._begun()] if holds_tables else map(self._without_values, tables)
        variables = {n: v for n, v in program.variables.items() if n not in dropped}
        if holds_tables:
            variables[_BEGUN] = Variable(_BEGUN, "f32", (1,), Kind.DATA)
        block = program.root.with_ops(ops, declare=self.messages.declared.values())
        number = facts["trainer_id"]
        made = replace(program, variables=variables, name=f"{program.name}.trainer{number}")
        return made.with_block(block)

    def _receive(self, tables: tuple[str, ...]) -> Iterator[Operator]:
        facts, joins = self.program.attrs, list[Operator]()
        placement, cuts = placement_of(self.program), slices_of(self.program)
        for param in dict.fromkeys(cut.param for cut in cuts if cut.param not in tables):
            parts = [cut for cut in cuts if cut.param == param]
            names = [cut.name for cut in parts]
            epmap = tuple(placement[name] for name in names)
            attrs: dict[str, Attr] = {"epmap": epmap, "trainer_id": facts["trainer_id"]}
            yield self.messages.rpc("recv", [], names, attrs)
            if len(parts) > 1:
                joins.append(self._join(param, parts))
        to_all = {"endpoints": facts["endpoints"], "trainer_id": facts["trainer_id"]}
        yield self.messages.rpc("fetch_barrier", [], [self.messages.control()], to_all)
        yield from joins

    def _join(self, param: str, parts: list[Slice]) -> Operator:
        like = self.program.variables[param]
        for cut in parts:
            made = replace(like, name=cut.name, shape=cut.shape, kind=Kind.TEMP)
            self.messages.declared[cut.name] = made
        names = [cut.name for cut in parts]
        op = self.messages.cut_or_join("concat", names, [param], {"axis": 0})
        return replace(op, role=Role.FORWARD)

    def _begun(self) -> Operator:
        """Returns the operator that marks the initial values as the base of deltas."""
        return self.messages.rpc("send", [_BEGUN], [], {"send_varnames": (_BEGUN,)})

    def _without_values(self, table: str) -> Operator:
        """Returns the operator that declares a table, although a trainer holds nothing of it."""
        found = [op for op in self.program.root.ops if table in op.writes]
        if len(found) != 1:
            what = f"table '{table}' is begun by {len(found)} operators, and must be by one"
            raise PassError(what, hint="give the table one initializer")
        attrs = Attrs({"shape": known_shape(self.program.variables[table])})
        return self.mark(Operator("fake_init", outputs=Operands.named(Out=table), attrs=attrs))


def _begun(program: Program, op: Operator) -> Iterator[Operator]:
    """Yields the operators that initialize, on this server, the outputs of a startup operator."""
    for name, (origin, _) in server_variables(program).items():
        if origin not in op.writes:
            continue
        made = replace(op, outputs=op.outputs.renamed({origin: name}))
        if op.type in _SHAPED:
            shape = known_shape(program.lookup(name))
            made = replace(made, attrs=made.attrs.updated(shape=shape))
        yield made


def _backups(program: Program) -> Iterator[Operator]:
    """Yields the operators that copy each parameter for each trainer, if updates need copies."""
    for param, copy in _pairs(program):
        yield Operator("assign", Operands.named(X=param), Operands.named(Out=copy))


def _pairs(program: Program) -> Iterator[tuple[str, str]]:
    listed = program.attrs.get("backups", ())
    assert isinstance(listed, tuple)
    for entry in listed:
        match entry:
            case (str(param), str(copy)):
                yield param, copy


def _names(attrs: Attrs, name: str) -> tuple[str, ...]:
    listed = attrs.get(name, ())
    assert isinstance(listed, tuple)
    return tuple(map(str, listed))
