"""Rewrites blocks by a plan of labels: puts a conversion wherever a value must lie otherwise."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.labels import (
    REPLICATED,
    SUM,
    BlockPlan,
    Label,
    Layout,
    Mesh,
    OpPlan,
    Plan,
)
from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    Kind,
    Literal,
    Operand,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
)
from jaxfleet.ir.names import unique

Mark = Callable[[Operator], Operator]
_NO_ROLE_VAR: tuple[tuple[str, str], ...] = ()


def place_blocks(program: Program, plan: Plan, mesh: Mesh, mark: Mark) -> Program:
    """Returns the program that each device runs.

    Args:
        program: the one-device program.
        plan: how its values lie.
        mesh: the devices.
        mark: says of an operator which pass made it.
    """
    blocks = [
        _Placer(program, block, plan.blocks[block.index], plan.zeros, mesh, mark).run()
        if block.index in plan.blocks
        else block
        for block in program.blocks
    ]
    final = plan.blocks[0].final
    variables = {
        name: replace(v, shape=mesh.local_shape(v.shape, final[name]))
        if v.kind is Kind.DATA
        else v
        for name, v in program.variables.items()
    }
    return replace(program, blocks=tuple(blocks), variables=variables)


@dataclass
class _Placer:
    """Rewrites one block.

    Attributes:
        current: the variable that now holds a value under its planned label.
        converted: (variable, label) to the variable that holds it under another label.
    """

    program: Program
    block: Block
    plan: BlockPlan
    zeros: frozenset[str]
    mesh: Mesh
    mark: Mark
    ops: list[Operator] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    current: dict[str, str] = field(default_factory=dict)
    converted: dict[tuple[str, Label], str] = field(default_factory=dict)

    def run(self) -> Block:
        block = self.block
        for name, label in zip(block.args, self.plan.args, strict=True):
            self._declare(block.variables[name], label)
        for name, variable in block.variables.items():
            self.variables.setdefault(name, variable)
        for op, op_plan in zip(block.ops, self.plan.ops, strict=True):
            self._place(op, op_plan)
        results = tuple(
            self._converted(operand, found, wanted, self._last(operand))
            for operand, found, wanted in zip(
                block.results, self.plan.found, self.plan.results, strict=True
            )
        )
        if block.index == 0:
            self._complete_state()
        return replace(block, ops=tuple(self.ops), variables=self.variables, results=results)

    def _place(self, op: Operator, plan: OpPlan) -> None:
        inputs = [
            self._converted(operand, label, wanted, op)
            for operand, label, wanted in zip(
                op.inputs, plan.labels, plan.placing.inputs, strict=True
            )
        ]
        outputs = [
            self._output(name, label) for name, label in zip(op.writes, plan.outputs, strict=True)
        ]
        completes = [op.writes[count] for count in plan.completed]
        pairs = tuple(pair for pair in op.role_var if pair[1] in completes)
        placed = replace(
            op,
            type=plan.placing.op_type or op.type,
            inputs=op.inputs.replaced(inputs),
            outputs=op.outputs.replaced(outputs),
            attrs=plan.placing.attrs,
            role_var=tuple(pair for pair in op.role_var if pair not in pairs),
        )
        self.ops.append(self.mark(placed) if plan.placing.op_type else placed)
        for count, how in plan.completed.items():
            self._complete(outputs[count], how, op)

    def _complete(self, name: str, how: str, near: Operator) -> None:
        """Completes a value in place, right after the operator that makes it."""
        role_var = tuple(pair for pair in near.role_var if pair[1] == name)
        if how == "local":
            self._insert("c_local", name, name, near, role_var, devices=self.mesh.devices)
        else:
            self._insert(f"c_allreduce_{how}", name, name, near, role_var, ring_id=0)

    def _complete_state(self) -> None:
        """Makes every state variable hold, on every device, what it must in the next step."""
        for variable in self.program.of_kind(Kind.PARAM, Kind.STATE):
            label = self.plan.final[variable.name]
            held = self.current.get(variable.name, variable.name)
            near = self._last(variable.name)
            if label.layout is Layout.VARYING:
                self._insert("c_allreduce_avg", held, variable.name, near, _NO_ROLE_VAR, ring_id=0)
            elif label.is_sharded:
                self._insert(
                    "c_allgather", held, variable.name, near, _NO_ROLE_VAR,
                    axis=label.axis, devices=self.mesh.devices,
                )  # fmt: skip

    def _output(self, name: str, label: Label) -> str:
        """Declares what an operator writes, and forgets what was held of its old value."""
        self.converted = {key: held for key, held in self.converted.items() if key[0] != name}
        self.current.pop(name, None)
        variable = self.block.variables.get(name) or self.program.lookup(name, self.block)
        if variable.kind.persistable and label != REPLICATED:
            # The state keeps its shape: rows, or a device's own value, go by another name.
            held = unique(f"{name}.own", self.variables)
            self.current[name] = held
            self._declare(replace(variable, name=held, kind=Kind.TEMP), label)
            return held
        if name in self.block.variables:
            self._declare(variable, label)
        return name

    def _declare(self, variable: Variable, label: Label) -> None:
        shape = self.mesh.local_shape(variable.shape, label)
        self.variables[variable.name] = replace(variable, shape=shape)

    def _converted(self, operand: Operand, label: Label, wanted: Label, near: Operator) -> Operand:
        """Returns what holds an operand under the label that is wanted."""
        held = self.current.get(operand, operand) if isinstance(operand, str) else operand
        if label == wanted or (label.layout is Layout.VARYING and wanted == REPLICATED):
            return held
        if self._is_zero(operand) and not wanted.is_sharded:
            return self._zero(operand, near) if label.is_sharded else held
        if isinstance(operand, str) and (operand, wanted) in self.converted:
            return self.converted[operand, wanted]
        result = self._convert(operand, held, label, wanted, near)
        if isinstance(operand, str):
            self.converted[operand, wanted] = result
        return result

    def _is_zero(self, operand: Operand) -> bool:
        return operand.value == 0 if isinstance(operand, Literal) else operand in self.zeros

    def _zero(self, operand: Operand, near: Operator) -> str:
        """Returns the whole of a value that is zero, which needs no device's rows."""
        whole = self._whole(operand)
        if (whole.name, REPLICATED) in self.converted:
            return self.converted[whole.name, REPLICATED]
        new = self.converted[whole.name, REPLICATED] = self._temporary(whole, REPLICATED, "zero")
        zero = Literal.of(0 if whole.dtype[0] in "iu" else 0.0, whole.dtype)
        shape = self.variables[new].shape
        self._insert("jax.broadcast_in_dim", zero, new, near, broadcast_dimensions=(), shape=shape)
        return new

    def _convert(
        self, operand: Operand, held: Operand, label: Label, wanted: Label, near: Operator
    ) -> str:
        whole = self._whole(operand)
        devices = self.mesh.devices
        if label.is_sharded and wanted.is_sharded:
            middle = self._convert(operand, held, label, REPLICATED, near)
            return self._convert(operand, middle, REPLICATED, wanted, near)
        if label.is_sharded:
            new = self._temporary(whole, wanted, "full")
            self._insert("c_allgather", held, new, near, axis=label.axis, devices=devices)
            return self._summand(new, whole, near) if wanted == SUM else new
        if wanted.is_sharded:
            new = self._temporary(whole, wanted, "rows")
            op_type = "c_reducescatter" if label.is_sum else "c_split"
            self._insert(op_type, held, new, near, axis=wanted.axis, devices=devices)
            return new
        assert wanted == SUM, f"no conversion from {label} to {wanted}"
        return self._summand(held, whole, near)

    def _summand(self, held: Operand, whole: Variable, near: Operator) -> str:
        new = self._temporary(whole, SUM, "summand")
        self._insert("c_summand", held, new, near)
        return new

    def _whole(self, operand: Operand) -> Variable:
        if isinstance(operand, Literal):
            return Variable("literal", operand.dtype, ())
        return self.block.variables.get(operand) or self.program.lookup(operand, self.block)

    def _temporary(self, whole: Variable, label: Label, suffix: str) -> str:
        name = unique(f"{whole.name}.{suffix}", self.variables)
        self._declare(replace(whole, name=name, kind=Kind.TEMP, constant=None), label)
        return name

    def _last(self, operand: Operand) -> Operator:
        """Returns the last operator that wrote a variable, for its role and source."""
        for op in reversed(self.block.ops):
            if operand in op.writes:
                return op
        return self.block.ops[-1] if self.block.ops else Operator("assign", role=Role.FORWARD)

    def _insert(
        self,
        op_type: str,
        operand: Operand,
        output: str,
        near: Operator,
        role_var: tuple[tuple[str, str], ...] = _NO_ROLE_VAR,
        **attrs: Attr,
    ) -> None:
        op = Operator(
            op_type,
            Operands.of(operand),
            Operands.of(output),
            Attrs(attrs),
            near.role,
            role_var,
            near.source,
        )
        self.ops.append(self.mark(op))


