"""Conversions between shardings: the operators inserted where a value needs another layout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from jaxfleet.analysis.sharding import (
    REPLICATED,
    SUM,
    VARYING,
    Mesh,
    OperatorSharding,
    OperatorView,
    Sharding,
)
from jaxfleet.analysis.sharding.shape import REMATERIALIZABLE, rematerialized
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
    Variable,
)
from jaxfleet.ir.naming import unique


@dataclass(frozen=True)
class _Recipe:
    op: Operator
    inputs: Operands
    placing: OperatorSharding


@dataclass
class RematerializationCache:
    """Recomputes broadcasts, iotas and random numbers where another sharding needs them.

    A broadcast of a replicated value costs less than moving its result between devices; a first
    result with no readers left is removed.
    """

    program: Program
    block: Block
    mesh: Mesh
    recipes: dict[str, _Recipe] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def note(self, op: Operator, inputs: Operands, placing: OperatorSharding) -> None:
        if op.type in REMATERIALIZABLE:
            self.recipes[op.writes[0]] = _Recipe(op, inputs, placing)

    def forget(self, name: str) -> None:
        """Drops records that use a variable's old value."""
        self.recipes.pop(name, None)
        stale = [made for made, recipe in self.recipes.items() if name in recipe.inputs.names]
        for made in stale:
            del self.recipes[made]

    def find(self, operand: Operand, wanted: Sharding) -> Operator | None:
        """Returns an operator that remakes a value with another sharding, its output yet unset."""
        recipe = self.recipes.get(operand) if isinstance(operand, str) else None
        if recipe is None:
            return None
        placing = rematerialized(self._view(recipe), wanted)
        if placing is None:
            return None
        self.used.add(str(operand))
        op = recipe.op
        return Operator(
            placing.op_type or op.type, recipe.inputs, attrs=placing.attrs, source=op.source
        )

    def without_unread(self, ops: Sequence[Operator], results: Sequence[Operand]) -> list[Operator]:
        """Returns the operators without those whose results were recomputed for every reader."""
        if not self.used:
            return list(ops)
        read = {name for op in ops for name in op.reads}
        # The next step reads the state, and a sub-block may read outer variables.
        read |= {name for b in self.program.blocks for op in b.ops for name in op.reads
                 if b.index != self.block.index} | self.program.variables.keys()  # fmt: skip
        gone = self.used - read - {x for x in results if isinstance(x, str)}
        return [op for op in ops if op.type not in REMATERIALIZABLE or op.writes[0] not in gone]

    def _view(self, recipe: _Recipe) -> OperatorView:
        def find(name: str) -> Variable:
            return self.program.lookup(name, self.block)

        return OperatorView.of(recipe.op, recipe.placing.inputs, self.mesh, find)


Pairs: TypeAlias = tuple[tuple[str, str], ...]
ON_THE_RING: Mapping[str, Attr] = {"ring_id": 0}  # fluid's spelling of: among all devices


@dataclass(frozen=True)
class ReadValue:
    """A value that an operator reads."""

    operand: Operand  # its name in the one-device program, or a literal
    held: Operand  # the variable that holds it now
    label: Sharding
    is_zero: bool = False  # it is zero whatever the data


@dataclass
class Resharding:
    """Rewrites one block's operands; `taken` are the names in use anywhere in the program."""

    program: Program
    block: Block
    mesh: Mesh
    taken: set[str]
    add: Callable[[Operator], None]
    variables: dict[str, Variable] = field(default_factory=dict)
    _known: dict[str, dict[Sharding, str]] = field(default_factory=dict)
    remaking: RematerializationCache = field(init=False)

    def __post_init__(self) -> None:
        self.remaking = RematerializationCache(self.program, self.block, self.mesh)

    def declare(self, variable: Variable, label: Sharding) -> None:
        """Declares a variable of the one-device program with its per-device shape."""
        shape = self.mesh.local_shape(variable.shape, label)
        known = variable if shape == variable.shape else replace(variable, shape=shape)
        self.variables[variable.name] = known

    def new_temporary(self, like: Variable, label: Sharding, suffix: str) -> str:
        """Declares a variable for another variable's value with another sharding."""
        name = unique(f"{like.name}.{suffix}", self.taken)
        self.taken.add(name)
        self.declare(replace(like, name=name, kind=Kind.TEMP, constant=None), label)
        return name

    def forget(self, name: str) -> None:
        """Drops the holder of a variable's old value."""
        self._known.pop(name, None)
        self.remaking.forget(name)

    def get(self, value: ReadValue, wanted: Sharding, near: Operator) -> Operand:
        """Returns the operand that holds a value with the wanted sharding.

        Inserted operators have the role and source line of `near`, the operator that reads it.
        """
        if value.label == wanted or (value.label, wanted) == (REPLICATED, VARYING):
            return value.held
        if value.is_zero and wanted == SUM and not value.label.is_sharded:
            return value.held
        if isinstance(value.operand, Literal):
            return self._convert(value, wanted, near)
        known = self._known.setdefault(value.operand, {})
        if wanted not in known:
            known[wanted] = self._convert(value, wanted, near)
        return known[wanted]

    def insert(
        self,
        op_type: str,
        operand: Operand,
        output: str,
        near: Operator,
        attrs: Mapping[str, Attr],
        *,
        pairs: Pairs = (),
    ) -> None:
        """Inserts an operator with one input and one output, for an operator of the program."""
        ins, outs = Operands.of(operand), Operands.of(output)
        self.add(Operator(op_type, ins, outs, Attrs(attrs), near.role, pairs, near.source))

    def _convert(self, value: ReadValue, wanted: Sharding, near: Operator) -> str:
        if (op := self.remaking.find(value.operand, wanted)) is not None:
            new = self._output(value, wanted)
            self.add(replace(op, outputs=Operands.of(new), role=near.role))
            return new
        if wanted == SUM:
            return self._summand(value, near)
        op_type, attrs = self.conversion(value, wanted)
        held = value.held
        if op_type == "c_split" and value.label.is_sharded:
            held = self.get(value, REPLICATED, near)
        new = self._output(value, wanted)
        self.insert(op_type, held, new, near, attrs)
        return new

    def conversion(self, value: ReadValue, wanted: Sharding) -> tuple[str, Mapping[str, Attr]]:
        """Returns the type and attributes of the operator that converts a value's sharding."""
        label, devices = value.label, self.mesh.devices
        if wanted == SUM:
            return "c_summand", {}
        if wanted.is_sharded:
            rows: dict[str, Attr] = {"axis": wanted.axis, "devices": devices}
            if label.is_sum:
                return "c_reducescatter", rows
            if label.is_sharded and REPLICATED not in self._known.get(str(value.operand), {}):
                return "c_alltoall", {"from_axis": label.axis, **rows}
            return "c_split", rows
        if label.is_sharded:
            return "c_allgather", {"axis": label.axis, "devices": devices}
        assert (label, wanted) == (VARYING, REPLICATED), f"no conversion from {label} to {wanted}"
        return "c_allreduce_avg", ON_THE_RING

    def _summand(self, value: ReadValue, near: Operator) -> str:
        """Makes a summand of a complete value: the first device has it, the others have zero."""
        whole = self.get(value, REPLICATED, near)
        if value.is_zero:
            return str(whole)
        new = self._output(value, SUM)
        self.insert("c_summand", whole, new, near, {})
        return new

    def _output(self, value: ReadValue, wanted: Sharding) -> str:
        like = (
            Variable("literal", value.operand.dtype, ())
            if isinstance(value.operand, Literal)
            else self.program.lookup(value.operand, self.block)
        )
        suffix = "rows" if wanted.is_sharded else "summand" if wanted == SUM else "full"
        return self.new_temporary(like, wanted, suffix)
