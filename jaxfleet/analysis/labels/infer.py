"""Finds out how every value of a one-device program lies on N devices.

Labels flow forward from the batch, which is cut, and the state, which every device has. A summand
is completed, once, right after the operator that makes it, if anything needs it complete; that is
found by running forward again with what was found before, until nothing is new.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from jaxfleet.analysis.labels import control
from jaxfleet.analysis.labels.held import SCATTER, Held
from jaxfleet.analysis.labels.label import REPLICATED, VARYING, Label, sharded
from jaxfleet.analysis.labels.mesh import Mesh
from jaxfleet.analysis.labels.placing import Placing, View
from jaxfleet.analysis.labels.plan import BlockPlan, Key, OpPlan, Plan
from jaxfleet.analysis.labels.rules import place
from jaxfleet.errors import PassError
from jaxfleet.ir import Block, Kind, Literal, Operand, Operator, Program, Variable

_BROADCAST = "jax.broadcast_in_dim"
_ZERO_KEEPING = frozenset(
    f"jax.{name}"
    for name in ("broadcast_in_dim", "convert_element_type", "copy", "neg", "reshape", "transpose")
)


def infer(
    program: Program,
    mesh: Mesh,
    *,
    sharded_inputs: Mapping[str, int],
    local: AbstractSet[tuple[int, int]] = frozenset(),
    held: Held | None = None,
) -> Plan:
    """Returns how a program runs on devices.

    Args:
        program: a one-device program.
        mesh: the devices.
        sharded_inputs: data variables that are cut, and along which axis.
        local: operators, by block and place, whose sums over the batch each device keeps to
            itself, scaled up to stand for the whole (local batch statistics).
        held: state that not every device has all of; all of it, unless given.

    Raises:
        PassError: a sub-block reads rows of a block around it, past its arguments.
    """
    return _Inference(program, mesh, sharded_inputs, local, held or Held()).run()


class _Known(NamedTuple):
    """What is known of a value.

    Attributes:
        label: how it lies.
        key: what made it, or None where it came from outside.
        is_zero: it is zero whatever the data.
    """

    label: Label
    key: Key | None = None
    is_zero: bool = False


_Env: TypeAlias = dict[str, _Known]
_WHOLE = _Known(REPLICATED)
_ZERO = _Known(REPLICATED, None, is_zero=True)


@dataclass
class _Inference:
    program: Program
    mesh: Mesh
    sharded_inputs: Mapping[str, int]
    local: AbstractSet[tuple[int, int]]
    held: Held
    completed: set[Key] = field(default_factory=set)
    plans: dict[int, BlockPlan] = field(default_factory=dict)
    around: list[_Env] = field(default_factory=list)  # of the blocks being planned
    placed: dict[object, Placing] = field(default_factory=dict)

    def run(self) -> Plan:
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
        return Plan(self.plans, tuple(notes))

    def enter(
        self, block: Block, args: Sequence[Label], results: Sequence[Label] | None = None
    ) -> BlockPlan:
        """Plans a block that is a function.

        Args:
            block: the block.
            args: how its arguments would lie; the plan says how they must.
            results: how its results must lie; as they come, unless given.
        """
        settled = tuple(
            REPLICATED if label.is_sum and (block.index, -1, place) in self.completed else label
            for place, label in enumerate(args)
        )
        env = {
            name: _Known(label, (block.index, -1, place))
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
        """Plans a block that every device runs by itself, on whatever it is given."""
        env = dict.fromkeys(block.variables, _WHOLE)
        plan = BlockPlan((REPLICATED,) * len(block.args))
        self.around.append(env)
        for op in block.ops:
            labels = tuple(self._held(operand, env, op).label for operand in op.inputs)
            outputs = (REPLICATED,) * len(op.writes)
            placing = Placing(labels, outputs, self.mesh.full_attrs(op.attrs))
            plan.ops.append(OpPlan(labels, placing, outputs, {}, frozenset()))
            for index in op.blocks:
                self.run_alone(self.program.blocks[index])
        self.around.pop()
        plan.found = plan.results = (REPLICATED,) * len(block.results)
        plan.final = dict.fromkeys(block.variables, REPLICATED)
        self.plans[block.index] = plan

    def is_completed_arg(self, block: Block, place: int) -> bool:
        """Tells whether a block needs an argument complete."""
        return (block.index, -1, place) in self.completed

    def _root(self) -> None:
        env = dict.fromkeys(self.program.variables, _WHOLE)
        env.update({name: _Known(sharded(axis)) for name, axis in self.sharded_inputs.items()})
        env.update({name: _Known(label) for name, label in self.held.state.items()})
        plan = self._block(self.program.root, (), env)
        for variable in self.program.of_kind(Kind.PARAM, Kind.STATE):
            self._ask(env[variable.name], self.held.label(variable.name))
        plan.final = {name: value.label for name, value in env.items()}

    def _block(self, block: Block, args: tuple[Label, ...], env: _Env) -> BlockPlan:
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
            env[name] = _Known(outputs[count], (block.index, number, count), is_zero)
        return OpPlan(labels, placing, outputs, completed, zeros)

    def _held(self, operand: Operand, env: _Env, op: Operator | None) -> _Known:
        if isinstance(operand, Literal):
            return _ZERO if operand.value == 0 else _WHOLE
        return env.get(operand) or self._held_outside(operand, op)

    def _held_outside(self, name: str, op: Operator | None) -> _Known:
        """Returns what is known of a name of the blocks around, which is read as it is."""
        value = next((env[name] for env in reversed(self.around) if name in env), _WHOLE)
        self._ask(value, REPLICATED)
        if value.label.is_sharded or value.label == VARYING:
            what = f"a sub-block reads '{name}', which is {value.label} in the block around it"
            raise PassError(what, op=op, hint="make it an argument of the sub-block")
        return _WHOLE

    def _ask(self, value: _Known, wanted: Label) -> None:
        """Has a summand completed where it is made, if that is how it is wanted.

        Rows of a broadcast summand are made of the complete one; others are scattered.
        """
        if not (value.label.is_partial and value.key):
            return
        if wanted in {REPLICATED, VARYING} or (wanted.is_sharded and self._is_broadcast(value.key)):
            self.completed.add(value.key)

    def _is_broadcast(self, key: Key) -> bool:
        block, number, _ = key
        return number >= 0 and self.program.blocks[block].ops[number].type == _BROADCAST

    def _place(
        self, block: Block, number: int, labels: tuple[Label, ...], zeros: frozenset[int]
    ) -> Placing:
        op = block.ops[number]
        keys = [(block.index, number, count) for count in range(len(op.writes))]
        completes = not op.role_var and not self.completed.isdisjoint(keys)
        known = (block.index, number, labels, zeros, completes)
        if known in self.placed:
            return self.placed[known]

        def find(name: str) -> Variable:
            return block.variables.get(name) or self.program.lookup(name, block)

        view = View.of(op, labels, self.mesh, find, zeros=zeros, completes=completes)
        if op.blocks:
            counts = range(len(op.writes))
            needed = frozenset(n for n in counts if self._is_needed(block, number, op, n))
            return control.place(self, replace(view, needed=needed))
        self.placed[known] = place(view)
        return self.placed[known]

    def _outputs(
        self, block: Block, number: int, placing: Placing
    ) -> tuple[tuple[Label, ...], dict[int, str]]:
        """Returns how outputs lie in the end, and how those are completed that must be."""
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
        """Tells whether a sum must be complete; a parameter's gradient always must."""
        is_gradient = any(gradient == op.writes[count] for _, gradient in op.role_var)
        return is_gradient or (block.index, number, count) in self.completed
