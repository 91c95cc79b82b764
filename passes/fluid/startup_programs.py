"""Startup programs in fluid's dialect: each side initializes its own variables.

Servers initialize their variables with the operators of the step's startup program. Trainers
initialize everything too, and then receive the servers' values, so that all agree.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.placement.sliced_layout import (
    Slice,
    known_shape,
    placement_of,
    server_variables,
    slices_of,
)
from jaxfleet.errors import PassError
from jaxfleet.ir import (
    Attr,
    Attrs,
    Kind,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
    trainer_name,
)
from jaxfleet.ir.naming import LR_COUNTER
from jaxfleet.passes.fluid.geo_sgd import MODE as GEO
from jaxfleet.passes.fluid.job import Messages
from jaxfleet.passes.pserver.job import Mark

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
