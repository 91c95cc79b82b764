"""Writes startup programs in fluid's dialect: each side begins its variables by itself.

Servers begin what they hold, with the operators that would have begun the whole. Trainers begin
everything too, and then receive what servers have, so that all go on with the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.slices import Slice, held_parts, known_shape, placement_of, slices_of
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
from jaxfleet.ir.names import LR_COUNTER
from jaxfleet.passes._fluid_messages import Messages
from jaxfleet.passes._job import Mark
from jaxfleet.passes.geo_sgd import MODE as GEO

_BEGUN = "param_init"  # fluid's, of no value: from what is there then, changes count
# Their attribute `shape` is that of what they make: the rows that a server holds.
_SHAPED = ("fill_constant", "gaussian_random", "truncated_gaussian_random", "uniform_random")


def fluid_trainer_startup(program: Program, mark: Mark) -> Program:
    """Returns a trainer's startup program.

    Args:
        program: the step's startup program, with the attributes of the trainer's program.
        mark: says who made an operator.

    Raises:
        PassError: a table that servers hold is not begun by one operator.
    """
    return _TrainerStartup(with_counters(program), mark).run()


def fluid_server_startup(program: Program, mark: Mark) -> Program:
    """Returns a server's startup program.

    Args:
        program: the step's startup program, with the attributes of the server's program, and its
            variables.
        mark: says who made an operator.
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
    """Returns a startup program that begins what each trainer counts its steps in, if any does.

    The counter of the schedule begins so that the first step of all trainers together is its
    first.
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
        """Returns what says that all is there of which changes are then taken."""
        return self.messages.rpc("send", [_BEGUN], [], {"send_varnames": (_BEGUN,)})

    def _without_values(self, table: str) -> Operator:
        """Returns what says that a table is there, though a trainer holds nothing of it."""
        found = [op for op in self.program.root.ops if table in op.writes]
        if len(found) != 1:
            what = f"table '{table}' is begun by {len(found)} operators, and must be by one"
            raise PassError(what, hint="give the table one initializer")
        attrs = Attrs({"shape": known_shape(self.program.variables[table])})
        return self.mark(Operator("fake_init", outputs=Operands.named(Out=table), attrs=attrs))


def _begun(program: Program, op: Operator) -> Iterator[Operator]:
    """Yields what begins, on this server, what an operator begins of the step."""
    for name, (origin, _) in held_parts(program).items():
        if origin not in op.writes:
            continue
        made = replace(op, outputs=op.outputs.renamed({origin: name}))
        if op.type in _SHAPED:
            shape = known_shape(program.lookup(name))
            made = replace(made, attrs=made.attrs.updated(shape=shape))
        yield made


def _backups(program: Program) -> Iterator[Operator]:
    """Yields what keeps a copy of each parameter for each trainer, where updates need one."""
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
