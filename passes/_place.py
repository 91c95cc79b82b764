"""Rewrites blocks by a plan of labels: puts a conversion wherever a value must lie otherwise."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from jaxfleet.analysis.labels import (
    REPLICATED,
    VARYING,
    BlockPlan,
    Label,
    Mesh,
    OpPlan,
    Plan,
)
from jaxfleet.ir import Block, Kind, Operand, Operator, Program
from jaxfleet.passes._conversions import ON_THE_RING, Conversions, Value

Mark = Callable[[Operator], Operator]


def place_blocks(program: Program, plan: Plan, mesh: Mesh, mark: Mark) -> Program:
    """Returns the program that each device runs.

    Args:
        program: the one-device program.
        plan: how its values lie.
        mesh: the devices.
        mark: says of an operator which pass made it.
    """
    taken = {*program.variables, *(name for block in program.blocks for name in block.variables)}
    blocks = [
        _Placer(program, block, plan.blocks[block.index], mesh, mark, taken).run()
        if block.index in plan.blocks
        else block
        for block in program.blocks
    ]
    final = plan.blocks[0].final
    variables = {
        name: replace(v, shape=mesh.local_shape(v.shape, final[name])) if v.kind is Kind.DATA else v
        for name, v in program.variables.items()
    }
    return replace(program, blocks=tuple(blocks), variables=variables)


@dataclass
class _Placer:
    """Rewrites one block.

    Attributes:
        taken: the names that are in use anywhere in the program.
        current: the variable that now holds a state variable's value under its planned label.
        conversions: puts in what makes values lie otherwise.
    """

    program: Program
    block: Block
    plan: BlockPlan
    mesh: Mesh
    mark: Mark
    taken: set[str]
    ops: list[Operator] = field(default_factory=list)
    current: dict[str, str] = field(default_factory=dict)
    conversions: Conversions = field(init=False)

    def __post_init__(self) -> None:
        def add(op: Operator) -> None:
            self.ops.append(self.mark(op))

        self.conversions = Conversions(self.program, self.block, self.mesh, self.taken, add)

    def run(self) -> Block:
        block, plan = self.block, self.plan
        for name, label in zip(block.args, plan.args, strict=True):
            self.conversions.declare(block.variables[name], label)
        for name, variable in block.variables.items():
            self.conversions.variables.setdefault(name, variable)
        for op, op_plan in zip(block.ops, plan.ops, strict=True):
            self._place(op, op_plan)
        results = tuple([self._result(place) for place in range(len(block.results))])
        if block.index == 0:
            self._complete_state()
        ops = self.conversions.remaking.without_unread(self.ops, results)
        variables = self.conversions.variables
        placed = replace(block, ops=tuple(ops), variables=variables, results=results)
        return placed.without_unused() if len(ops) < len(self.ops) else placed

    def _place(self, op: Operator, plan: OpPlan) -> None:
        placing = plan.placing
        inputs = op.inputs
        if plan.labels != placing.inputs or self.current:
            inputs = inputs.replaced([self._input(op, plan, i) for i in range(len(inputs))])
        names = [self._output(x, label) for x, label in zip(op.writes, plan.outputs, strict=True)]
        outputs = op.outputs if tuple(names) == op.writes else op.outputs.replaced(names)
        done = {op.writes[count] for count in plan.completed}
        placed = replace(
            op,
            type=placing.op_type or op.type,
            inputs=inputs,
            outputs=outputs,
            attrs=placing.attrs,
            role_var=tuple([pair for pair in op.role_var if pair[1] not in done]),
        )
        self.ops.append(self.mark(placed) if placing.op_type else placed)
        self.conversions.remaking.note(op, inputs, placing)
        for count, how in plan.completed.items():
            self._complete(op, op.writes[count], names[count], how)

    def _input(self, op: Operator, plan: OpPlan, place: int) -> Operand:
        operand, label, wanted = op.inputs[place], plan.labels[place], plan.placing.inputs[place]
        value = Value(operand, self._held(operand), label, place in plan.zeros)
        if op.type == "fetch" and label == VARYING:  # what is fetched keeps its name
            insert = self.conversions.insert
            insert("c_allreduce_avg", value.held, str(operand), op, ON_THE_RING)
            return operand
        return self.conversions.get(value, wanted, op)

    def _result(self, place: int) -> Operand:
        operand, plan = self.block.results[place], self.plan
        value = Value(operand, self._held(operand), plan.found[place], place in plan.zeros)
        return self.conversions.get(value, plan.results[place], self._last_op(operand))

    def _complete(self, op: Operator, name: str, held: str, how: str) -> None:
        """Completes a value in place, right after the operator that makes it."""
        pairs = tuple([pair for pair in op.role_var if pair[1] == name])
        insert = self.conversions.insert
        if how == "local":
            insert("c_local", held, held, op, {"devices": self.mesh.devices}, pairs=pairs)
        else:
            insert(f"c_allreduce_{how}", held, held, op, ON_THE_RING, pairs=pairs)

    def _complete_state(self) -> None:
        """Makes every state variable hold, on every device, what it must in the next step."""
        insert, devices = self.conversions.insert, self.mesh.devices
        for variable in self.program.of_kind(Kind.PARAM, Kind.STATE):
            name, label = variable.name, self.plan.final[variable.name]
            held, near = self._held(name), self._last_op(name)
            if label == VARYING:
                insert("c_allreduce_avg", held, name, near, ON_THE_RING)
            elif label.is_sharded:
                insert("c_allgather", held, name, near, {"axis": label.axis, "devices": devices})

    def _held(self, operand: Operand) -> Operand:
        return self.current.get(operand, operand) if isinstance(operand, str) else operand

    def _output(self, name: str, label: Label) -> str:
        """Declares what an operator writes, and forgets what was held of its old value."""
        conversions = self.conversions
        conversions.forget(name)
        self.current.pop(name, None)
        if name in self.block.variables:
            conversions.declare(self.block.variables[name], label)
            return name
        variable = self.program.lookup(name, self.block)
        if variable.kind.persistable and label != REPLICATED:
            # The state keeps its shape: rows, or a device's own value, go by another name.
            self.current[name] = conversions.new_temporary(variable, label, "own")
            return self.current[name]
        return name

    def _last_op(self, operand: Operand) -> Operator:
        """Returns the last operator that wrote a variable, for its role and source."""
        known = self._last_writers.get(operand) if isinstance(operand, str) else None
        return known or (self.block.ops[-1] if self.block.ops else Operator("assign"))

    @cached_property
    def _last_writers(self) -> dict[str, Operator]:
        return {name: op for op in self.block.ops for name in op.writes}
