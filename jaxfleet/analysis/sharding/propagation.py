"""Sharding propagation: derives the sharding of every value from those of the batch and the state.

Shardings propagate forward from the batch, which is cut, and the state, which is replicated. A
partial value is completed once, right after the operator that makes it, if any reader needs it
complete. That set is found by repeated propagation with the earlier results, up to a fixed point.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from jaxfleet.analysis.sharding import control_flow
from jaxfleet.analysis.sharding.plan import (
    SCATTER,
    BlockPlan,
    OperatorSharding,
    OperatorView,
    OpPlan,
    OutputKey,
    ShardingPlan,
    StateSharding,
)
from jaxfleet.analysis.sharding.rules import operator_sharding
from jaxfleet.analysis.sharding.spec import REPLICATED, VARYING, Mesh, Sharding, sharded
from jaxfleet.errors import PassError
from jaxfleet.ir import Block, Kind, Literal, Operand, Operator, Program, Variable

_BROADCAST = "jax.broadcast_in_dim"
_ZERO_KEEPING = frozenset(
    f"jax.{name}"
    for name in ("broadcast_in_dim", "convert_element_type", "copy", "neg", "reshape", "transpose")
)


def propagate(
    program: Program,
    mesh: Mesh,
    *,
    sharded_inputs: Mapping[str, int],
    local: AbstractSet[tuple[int, int]] = frozenset(),
    held: StateSharding | None = None,
) -> ShardingPlan:
    """Returns how a one-device program runs on devices.

    `sharded_inputs` are the data variables that are cut, with the axis. The sums over the batch of
    the operators `local`, by block and place, stay local to each device, scaled up to represent the
    whole (local batch statistics). `held` is the layout of state that is not replicated. A
    sub-block that reads rows of a block around it, past its arguments, is a PassError.
    """
    return _Propagation(program, mesh, sharded_inputs, local, held or StateSharding()).run()


class _ValueState(NamedTuple):
    """The state of a value."""

    label: Sharding
    key: OutputKey | None = None  # the output that makes it, or None if it comes from outside
    is_zero: bool = False  # whether it is zero whatever the data


_Env: TypeAlias = dict[str, _ValueState]
_WHOLE = _ValueState(REPLICATED)
_ZERO = _ValueState(REPLICATED, None, is_zero=True)


@dataclass
class _Propagation:
    program: Program
    mesh: Mesh
    sharded_inputs: Mapping[str, int]
    local: AbstractSet[tuple[int, int]]
    held: StateSharding
    completed: set[OutputKey] = field(default_factory=set)
    plans: dict[int, BlockPlan] = field(default_factory=dict)
    around: list[_Env] = field(default_factory=list)  # of the blocks being planned
    placed: dict[object, OperatorSharding] = field(default_factory=dict)

    def run(self) -> ShardingPlan:
        while True:
            before = len(self.completed)
            self.plans.clear()
            self._root()
            if len(self.completed) == before:
                break
        notes = [
            (op, plan.placing.note)
            for index, block_plan in sorted(self.plans.items())
            for op, plan in zip(self.program.blocks[index].ops, block_plan.ops, strict=True)
            if plan.placing.note
        ]
        return ShardingPlan(self.plans, tuple(notes))

    def enter(
        self, block: Block, args: Sequence[Sharding], results: Sequence[Sharding] | None = None
    ) -> BlockPlan:
        """Plans a block that is a function.

        `args` is the preferred layout of its arguments, the plan contains the required one;
        `results` is the required layout of its results, any by default.
        """
        settled = tuple(
            REPLICATED if label.is_sum and (block.index, -1, place) in self.completed else label
            for place, label in enumerate(args)
        )
        env = {
            name: _ValueState(label, (block.index, -1, place))
            for place, (name, label) in enumerate(zip(block.args, settled, strict=True))
        }
        plan = self._block(block, settled, env)
        found = [self._held(operand, env, None) for operand in block.results]
        plan.found = tuple(value.label for value in found)
        plan.results = tuple(results) if results is not None else plan.found
        plan.zeros = frozenset(place for place, value in enumerate(found) if value.is_zero)
        for value, wanted in zip(found, plan.results, strict=True):
            self._ask(value, wanted)
        return plan

    def run_alone(self, block: Block) -> None:
        """Plans a block that every device runs by itself, on any inputs."""
        env = dict.fromkeys(block.variables, _WHOLE)
        plan = BlockPlan((REPLICATED,) * len(block.args))
        self.around.append(env)
        for op in block.ops:
            labels = tuple(self._held(operand, env, op).label for operand in op.inputs)
            outputs = (REPLICATED,) * len(op.writes)
            placing = OperatorSharding(labels, outputs, self.mesh.full_attrs(op.attrs))
            plan.ops.append(OpPlan(labels, placing, outputs, {}, frozenset()))
            for index in op.blocks:
                self.run_alone(self.program.blocks[index])
        self.around.pop()
        plan.found = plan.results = (REPLICATED,) * len(block.results)
        plan.final = dict.fromkeys(block.variables, REPLICATED)
        self.plans[block.index] = plan

    def is_completed_arg(self, block: Block, place: int) -> bool:
        """Whether a block needs an argument complete."""
        return (block.index, -1, place) in self.completed

    def _root(self) -> None:
        env = dict.fromkeys(self.program.variables, _WHOLE)
        env.update({name: _ValueState(sharded(axis)) for name, axis in self.sharded_inputs.items()})
        env.update({name: _ValueState(label) for name, label in self.held.state.items()})
        plan = self._block(self.program.root, (), env)
        for variable in self.program.of_kind(Kind.PARAM, Kind.STATE):
            self._ask(env[variable.name], self.held.label(variable.name))
        plan.final = {name: value.label for name, value in env.items()}

    def _block(self, block: Block, args: tuple[Sharding, ...], env: _Env) -> BlockPlan:
        plan = BlockPlan(args)
        self.around.append(env)
        for number, op in enumerate(block.ops):
            plan.ops.append(self._op(block, number, op, env))
        self.around.pop()
        plan.final = {name: value.label for name, value in env.items()}
        self.plans[block.index] = plan
        return plan

    def _op(self, block: Block, number: int, op: Operator, env: _Env) -> OpPlan:
        values = [self._held(operand, env, op) for operand in op.inputs]
        labels = tuple([value.label for value in values])
        zeros = frozenset([place for place, value in enumerate(values) if value.is_zero])
        placing = self._place(block, number, labels, zeros)
        for value, wanted in zip(values, placing.inputs, strict=True):
            self._ask(value, wanted)
        outputs, completed = self._outputs(block, number, placing)
        is_zero = bool(zeros) and len(values) == 1 and op.type in _ZERO_KEEPING
        for count, name in enumerate(op.writes):
            env[name] = _ValueState(outputs[count], (block.index, number, count), is_zero)
        return OpPlan(labels, placing, outputs, completed, zeros)

    def _held(self, operand: Operand, env: _Env, op: Operator | None) -> _ValueState:
        if isinstance(operand, Literal):
            return _ZERO if operand.value == 0 else _WHOLE
        return env.get(operand) or self._held_outside(operand, op)

    def _held_outside(self, name: str, op: Operator | None) -> _ValueState:
        """Returns the state of a name of the enclosing blocks, which is read unchanged."""
        value = next((env[name] for env in reversed(self.around) if name in env), _WHOLE)
        self._ask(value, REPLICATED)
        if value.label.is_sharded or value.label == VARYING:
            what = f"a sub-block reads '{name}', which is {value.label} in the block around it"
            raise PassError(what, op=op, hint="make it an argument of the sub-block")
        return _WHOLE

    def _ask(self, value: _ValueState, wanted: Sharding) -> None:
        """Requests completion of a summand where it is made, if its reader wants it complete.

        Rows of a broadcast summand are made of the complete one; others are scattered.
        """
        if not (value.label.is_partial and value.key):
            return
        if wanted in {REPLICATED, VARYING} or (wanted.is_sharded and self._is_broadcast(value.key)):
            self.completed.add(value.key)

    def _is_broadcast(self, key: OutputKey) -> bool:
        block, number, _ = key
        return number >= 0 and self.program.blocks[block].ops[number].type == _BROADCAST

    def _place(
        self, block: Block, number: int, labels: tuple[Sharding, ...], zeros: frozenset[int]
    ) -> OperatorSharding:
        op = block.ops[number]
        keys = [(block.index, number, count) for count in range(len(op.writes))]
        completes = not op.role_var and not self.completed.isdisjoint(keys)
        known = (block.index, number, labels, zeros, completes)
        if known in self.placed:
            return self.placed[known]

        def find(name: str) -> Variable:
            return block.variables.get(name) or self.program.lookup(name, block)

        view = OperatorView.of(op, labels, self.mesh, find, zeros=zeros, completes=completes)
        if op.blocks:
            counts = range(len(op.writes))
            needed = frozenset(n for n in counts if self._is_needed(block, number, op, n))
            return control_flow.control_flow_sharding(self, replace(view, needed=needed))
        self.placed[known] = operator_sharding(view)
        return self.placed[known]

    def _outputs(
        self, block: Block, number: int, placing: OperatorSharding
    ) -> tuple[tuple[Sharding, ...], dict[int, str]]:
        """Returns the final layout of outputs, and the completion of those that need one."""
        op, outputs, completed = block.ops[number], list(placing.outputs), dict[int, str]()
        for count, label in enumerate(outputs):
            if not label.is_partial:
                continue
            if label.is_sum and (block.index, number) in self.local:
                completed[count], outputs[count] = "local", VARYING
            elif label.is_sum and (axis := self._rows_of(op, count)) is not None:
                completed[count], outputs[count] = SCATTER, sharded(axis)
            elif not label.is_sum or self._is_needed(block, number, op, count):
                completed[count], outputs[count] = label.how, REPLICATED
        return tuple(outputs), completed

    def _rows_of(self, op: Operator, count: int) -> int | None:
        """Returns the axis along which a gradient is cut where it is made, or None."""
        is_gradient = any(gradient == op.writes[count] for _, gradient in op.role_var)
        return self.held.gradients.get(op.writes[count]) if is_gradient else None

    def _is_needed(self, block: Block, number: int, op: Operator, count: int) -> bool:
        """Whether a sum must be complete; a parameter's gradient always must."""
        is_gradient = any(gradient == op.writes[count] for _, gradient in op.role_var)
        return is_gradient or (block.index, number, count) in self.completed
