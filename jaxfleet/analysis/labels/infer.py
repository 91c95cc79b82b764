"""Finds out how every value of a one-device program lies on N devices.

Labels flow forward from the batch, which is cut, and the state, which every device has. A summand
is completed, once, right after the operator that makes it, if anything needs it complete; that is
found by running forward again with what was found before, until nothing is new.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.analysis.labels import control
from jaxfleet.analysis.labels.label import (
    REPLICATED,
    VARYING,
    Label,
    Layout,
    Mesh,
    Placing,
    View,
    sharded,
)
from jaxfleet.analysis.labels.plan import BlockPlan, Key, OpPlan, Plan
from jaxfleet.analysis.labels.rules import place
from jaxfleet.ir import Block, Kind, Literal, Operator, Program, Variable

_ZERO_KEEPING = frozenset(
    {"jax.broadcast_in_dim", "jax.convert_element_type", "jax.reshape", "jax.transpose", "jax.neg"}
)


def infer(
    program: Program,
    mesh: Mesh,
    *,
    sharded_inputs: Mapping[str, int],
    is_local: Callable[[Operator], bool] = lambda _: False,
) -> Plan:
    """Returns how a program runs on devices.

    Args:
        program: a one-device program, or one already rewritten for devices.
        mesh: the devices.
        sharded_inputs: data variables that are cut, and along which axis.
        is_local: tells the operators whose sums over the batch each device keeps to itself, scaled
            up to stand for the whole (local batch statistics).
    """
    return _Inference(program, mesh, sharded_inputs, is_local).run()


@dataclass
class _Inference:
    program: Program
    mesh: Mesh
    sharded_inputs: Mapping[str, int]
    is_local: Callable[[Operator], bool]
    completed: set[Key] = field(default_factory=set)
    plans: dict[int, BlockPlan] = field(default_factory=dict)
    zeros: set[str] = field(default_factory=set)
    placed: dict[tuple[int, int, tuple[Label, ...]], Placing] = field(default_factory=dict)

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
        return Plan(self.plans, frozenset(self.zeros), tuple(notes))

    def enter(
        self, block: Block, args: Sequence[Label], results: Sequence[Label] | None = None
    ) -> BlockPlan:
        """Plans a block that is a function.

        Args:
            block: the block.
            args: how its arguments would lie; the plan says how they must.
            results: how its results must lie; as they come, unless given.
        """
        settled = [
            REPLICATED if label.is_sum and self._is_completed((block.index, -1, place)) else label
            for place, label in enumerate(args)
        ]
        env = {
            name: (label, (block.index, -1, place))
            for place, (name, label) in enumerate(zip(block.args, settled, strict=True))
        }
        plan = self._block(block, tuple(settled), env)
        found = []
        for place, operand in enumerate(block.results):
            label, key = env.get(str(operand), (REPLICATED, None)) if isinstance(
                operand, str) else (REPLICATED, None)  # fmt: skip
            wanted = label if results is None else results[place]
            if key is not None and self._needs_completion(label, wanted):
                self.completed.add(key)
            found.append(label)
        plan.found = tuple(found)
        plan.results = tuple(results) if results is not None else plan.found
        return plan

    def is_completed_arg(self, block: Block, place: int) -> bool:
        """Tells whether a block needs an argument complete."""
        return self._is_completed((block.index, -1, place))

    def _root(self) -> None:
        root = self.program.root
        env: dict[str, tuple[Label, Key | None]] = {}
        for variable in self.program.variables.values():
            axis = self.sharded_inputs.get(variable.name)
            env[variable.name] = (REPLICATED if axis is None else sharded(axis), None)
        plan = self._block(root, (), env)
        for variable in self.program.of_kind(Kind.PARAM, Kind.STATE):
            label, key = env[variable.name]
            if key is not None and self._needs_completion(label, REPLICATED):
                self.completed.add(key)
        plan.final = {name: label for name, (label, _) in env.items()}

    def _block(
        self, block: Block, args: tuple[Label, ...], env: dict[str, tuple[Label, Key | None]]
    ) -> BlockPlan:
        plan = BlockPlan(args)
        for number, op in enumerate(block.ops):
            operands = [
                (REPLICATED, None) if isinstance(x, Literal) else env.get(x, (REPLICATED, None))
                for x in op.inputs
            ]
            labels = tuple(label for label, _ in operands)
            placing = self._place(block, number, op, labels)
            for (label, key), wanted in zip(operands, placing.inputs, strict=True):
                if key is not None and self._needs_completion(label, wanted):
                    self.completed.add(key)
            op_plan = OpPlan(labels, placing, placing.outputs)
            self._complete_outputs(block, number, op, op_plan)
            self._note_zero(op)
            for count, name in enumerate(op.writes):
                env[name] = (op_plan.outputs[count], (block.index, number, count))
            plan.ops.append(op_plan)
        plan.final = {name: label for name, (label, _) in env.items()}
        self.plans[block.index] = plan
        return plan

    def _place(
        self, block: Block, number: int, op: Operator, labels: tuple[Label, ...]
    ) -> Placing:
        view = self._view(block, op, labels) if op.blocks else None
        if view is not None:
            return control.place(self, view)
        key = (block.index, number, labels)
        if key not in self.placed:
            self.placed[key] = place(self._view(block, op, labels))
        return self.placed[key]

    def _view(self, block: Block, op: Operator, labels: tuple[Label, ...]) -> View:
        ins = [self._variable(block, x) if isinstance(x, str) else x for x in op.inputs]
        outs = [self._variable(block, x) for x in op.writes]
        return View(
            op,
            labels,
            tuple(x.shape if isinstance(x, Variable) else () for x in ins),
            tuple(x.shape for x in outs),
            self.mesh,
            tuple(x.dtype for x in ins),
            tuple(x.dtype for x in outs),
        )

    def _variable(self, block: Block, name: str) -> Variable:
        return block.variables.get(name) or self.program.lookup(name, block)

    def _complete_outputs(self, block: Block, number: int, op: Operator, plan: OpPlan) -> None:
        outputs = list(plan.outputs)
        for count, label in enumerate(outputs):
            if label.layout is not Layout.PARTIAL:
                continue
            key = (block.index, number, count)
            if label.is_sum and not self._is_completed(key) and not _is_gradient(op, count):
                continue
            local = label.is_sum and self.is_local(op)
            plan.completed[count] = "local" if local else label.how
            outputs[count] = VARYING if local else REPLICATED
        plan.outputs = tuple(outputs)

    def _is_completed(self, key: Key) -> bool:
        return key in self.completed

    def _needs_completion(self, label: Label, wanted: Label) -> bool:
        return label.layout is Layout.PARTIAL and wanted.layout in {
            Layout.REPLICATED,
            Layout.VARYING,
        }

    def _note_zero(self, op: Operator) -> None:
        """Remembers what is zero whatever the data: a summand needs no work to become one."""
        operand = op.inputs[0] if len(op.inputs) == 1 else None
        is_zero = (isinstance(operand, Literal) and operand.value == 0) or operand in self.zeros
        if is_zero and op.type in _ZERO_KEEPING:
            self.zeros.update(op.writes)


def _is_gradient(op: Operator, output: int) -> bool:
    """Tells whether an output is a parameter's gradient, which is completed where it is made."""
    return any(gradient == op.writes[output] for _, gradient in op.role_var)
