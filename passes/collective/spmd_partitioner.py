"""SPMD partitioner: turns a sharding plan into the program of each device, with collectives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from jaxfleet.analysis.sharding import (
    REPLICATED,
    SCATTER,
    SUM,
    VARYING,
    BlockPlan,
    Mesh,
    OpPlan,
    ShardingKind,
    ShardingPlan,
    StateSharding,
)
from jaxfleet.errors import PassError
from jaxfleet.ir import Block, Kind, Operand, Operator, Program, Variable
from jaxfleet.passes.collective.reshard import ON_THE_RING, ReadValue, Resharding

Mark = Callable[[Operator], Operator]


def partition_blocks(
    program: Program, plan: ShardingPlan, mesh: Mesh, mark: Mark, held: StateSharding | None = None
) -> Program:
    """Returns the program that each device runs; `held` is state that is not replicated."""
    held = held or StateSharding()
    taken = {*program.variables, *(name for block in program.blocks for name in block.variables)}
    blocks = [
        _BlockPartitioner(program, block, plan.blocks[block.index], mesh, mark, taken, held).run()
        if block.index in plan.blocks
        else block
        for block in program.blocks
    ]
    lies = {**plan.blocks[0].final, **{v.name: held.label(v.name) for v in _state(program)}}
    variables = {
        name: replace(v, shape=mesh.local_shape(v.shape, lies[name]))
        if v.kind is Kind.DATA or v.kind.persistable
        else v
        for name, v in program.variables.items()
    }
    return replace(program, blocks=tuple(blocks), variables=variables)


@dataclass
class _BlockPartitioner:
    """Rewrites one block.

    `current` maps a state variable to the variable that holds its value with its planned sharding.
    """

    program: Program
    block: Block
    plan: BlockPlan
    mesh: Mesh
    mark: Mark
    taken: set[str]
    held: StateSharding
    ops: list[Operator] = field(default_factory=list)
    current: dict[str, str] = field(default_factory=dict)
    conversions: Resharding = field(init=False)

    def __post_init__(self) -> None:
        def add(op: Operator) -> None:
            self.ops.append(self.mark(op))

        self.conversions = Resharding(self.program, self.block, self.mesh, self.taken, add)

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
        names = [self._output(op, plan, place) for place in range(len(op.writes))]
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
        value = ReadValue(operand, self._held(operand), label, place in plan.zeros)
        if op.type == "fetch" and label == VARYING:  # a fetched value keeps its name
            insert = self.conversions.insert
            insert("c_allreduce_avg", value.held, str(operand), op, ON_THE_RING)
            return operand
        return self.conversions.get(value, wanted, op)

    def _result(self, place: int) -> Operand:
        operand, plan = self.block.results[place], self.plan
        value = ReadValue(operand, self._held(operand), plan.found[place], place in plan.zeros)
        return self.conversions.get(value, plan.results[place], self._last_op(operand))

    def _complete(self, op: Operator, name: str, held: str, how: str) -> None:
        """Completes a value in place, right after the operator that makes it."""
        pairs = tuple([pair for pair in op.role_var if pair[1] == name])
        insert = self.conversions.insert
        if how == SCATTER:
            attrs = {"axis": self.held.gradients[name], "devices": self.mesh.devices}
            insert("c_reducescatter", held, name, op, attrs, pairs=pairs)
        elif how == "local":
            insert("c_local", held, held, op, {"devices": self.mesh.devices}, pairs=pairs)
        else:
            insert(f"c_allreduce_{how}", held, held, op, ON_THE_RING, pairs=pairs)

    def _complete_state(self) -> None:
        """Gives every state variable, on every device, the sharding that the next step expects."""
        for variable in _state(self.program):
            name, label = variable.name, self.plan.final[variable.name]
            wanted = self.held.label(name)
            if label == wanted or (label, wanted) == (REPLICATED, VARYING):
                continue
            op_type, attrs = self.conversions.conversion(ReadValue(name, name, label), wanted)
            self.conversions.insert(op_type, self._held(name), name, self._last_op(name), attrs)

    def _held(self, operand: Operand) -> Operand:
        return self.current.get(operand, operand) if isinstance(operand, str) else operand

    def _output(self, op: Operator, plan: OpPlan, place: int) -> str:
        """Declares an operator's output, and drops records of its old value."""
        name, label, conversions = op.writes[place], plan.outputs[place], self.conversions
        conversions.forget(name)
        self.current.pop(name, None)
        if name in self.block.variables:
            if plan.completed.get(place) == SCATTER:
                conversions.declare(self.block.variables[name], label)
                return conversions.new_temporary(self.block.variables[name], SUM, "summand")
            conversions.declare(self.block.variables[name], label)
            return name
        variable = self.program.lookup(name, self.block)
        wanted = self.held.label(name) if variable.kind.persistable else label
        fits = label == wanted or (label, wanted) == (REPLICATED, VARYING)
        if not fits:
            # The state keeps its shape; rows and a device's own value get another name.
            self.current[name] = conversions.new_temporary(variable, label, "own")
            return self.current[name]
        return name

    def _last_op(self, operand: Operand) -> Operator:
        known = self._last_writers.get(operand) if isinstance(operand, str) else None
        return known or (self.block.ops[-1] if self.block.ops else Operator("assign"))

    @cached_property
    def _last_writers(self) -> dict[str, Operator]:
        return {name: op for op in self.block.ops for name in op.writes}


def _state(program: Program) -> tuple[Variable, ...]:
    return program.of_kind(Kind.PARAM, Kind.STATE)


def check_devices(program: Program, name: str, devices: int) -> None:
    """Rejects a program that is already divided, or fewer than one device."""
    if "devices" in program.attrs:
        raise PassError(f"{name}: the program is already rewritten for devices")
    if devices < 1:
        raise PassError(f"{name}: {devices} devices")


def device_program(
    program: Program,
    plan: ShardingPlan,
    mesh: Mesh,
    cut: Mapping[str, int],
    mark: Mark,
    *,
    held: StateSharding | None = None,
) -> Program:
    """Returns the program that each device runs for a one-device program with a sharding plan.

    `cut` is data that is cut, with the axes, `held` state that is not replicated.
    """
    held = held or StateSharding()
    placed = partition_blocks(program, plan, mesh, mark, held)
    sharded = tuple((name, axis) for name, axis in _sharded(program, plan, cut, held))
    attrs = program.attrs.updated(devices=mesh.devices, sharded=sharded)
    own = tuple(n for n, x in held.state.items() if x == VARYING or x.is_sum)
    return replace(placed, attrs=attrs.updated(own=own) if own else attrs)


def _sharded(
    program: Program, plan: ShardingPlan, cut: Mapping[str, int], held: StateSharding
) -> list[tuple[str, int]]:
    state = {v.name for v in program.of_kind(Kind.PARAM, Kind.STATE)}
    found = list(cut.items())
    found += [(name, x.axis) for name, x in held.state.items() if x.is_sharded]
    for op in program.root.ops:
        if op.type == "fetch":
            names = [name for name in op.reads if name not in state]
            labels = [(name, plan.blocks[0].final[name]) for name in names]
            found += [(name, x.axis) for name, x in labels if x.layout is ShardingKind.SHARDED]
    return found
