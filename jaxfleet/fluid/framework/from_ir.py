"""Conversion from the IR back to a fluid program, which shows scripts a transpiler's result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxfleet.errors import PassError
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.operator import ROLE, ROLE_VAR, Operator, number_of
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.to_ir import ir_operator, ir_program
from jaxfleet.fluid.framework.types import VarType, ir_dtype
from jaxfleet.fluid.framework.variable import Parameter, Variable
from jaxfleet.ir import Block as IrBlock
from jaxfleet.ir import BlockRef, Kind, Operands
from jaxfleet.ir import Operator as IrOperator
from jaxfleet.ir import Program as IrProgram
from jaxfleet.ir import Variable as IrVariable
from jaxfleet.ir.variable import RAW, long_dtype
from jaxfleet.ops.fluid import EMPTY, UNWANTED
from jaxfleet.ops.user_frames import line_of_caller
from jaxfleet.pipeline import Pass
from jaxfleet.runtime.transpile import transpile


def write_back(program: Program, made: IrProgram, *, origin: Program | None = None) -> Program:
    """Replaces a program's operators and variables by those of an IR program; returns it.

    Whatever the passes left unchanged stays the same object, with its attributes and with the
    properties of its variables besides shape and dtype.

    Variables that `program` lacks take these properties from `origin`, from which it is derived.
    """
    _Writer(program, made, origin or program).run()
    return program


@dataclass(frozen=True)
class Rewritten:
    """The result of passes on a program, before it is written back."""

    program: Program
    made: IrProgram

    @classmethod
    def of(cls, program: Program, passes: Sequence[Pass], *, name: str = "main") -> "Rewritten":
        """Runs passes on a program, dumping each result if the environment requests it.

        PassError if a pass cannot run; a note gives the source line that requested it.
        """
        try:
            return cls(program, transpile(ir_program(program, name=name), passes, dump_dir=None)[0])
        except PassError as error:
            line = line_of_caller()
            if line is not None:
                error.add_note(f"  {line.where()}")
            raise

    def write_back(self) -> None:
        """Replaces the program by the result; a copy of the original is its `_origin_program`."""
        origin = self.program.clone()
        write_back(self.program, self.made)
        self.program._origin_program = origin


class _Writer:
    """Writes `made` to one program."""

    def __init__(self, program: Program, made: IrProgram, origin: Program) -> None:
        self.program, self.made, self.origin = program, made, origin
        self._known: dict[IrOperator, list[Operator]] = {}
        for block in program.blocks:
            for op in block.ops:
                self._known.setdefault(ir_operator(op), []).append(op)

    def run(self) -> None:
        blocks = [self._block(block.index, block.parent) for block in self.made.blocks]
        variables = [self._variables(block, of) for block, of in self._scopes(blocks)]
        ops = [
            self._ops(block, blocks, of) for block, of in zip(blocks, self.made.blocks, strict=True)
        ]
        for block, held, run in zip(blocks, variables, ops, strict=True):
            block.vars, block.ops = held, run
        self.program.blocks = blocks
        self.program.current_block_idx = 0
        self.program._facts = dict(self.made.attrs)
        self.program.version += 1

    def _block(self, index: int, parent: int) -> Block:
        """Returns block 0, which scripts may hold, or a new one."""
        return self.program.global_block() if index == 0 else Block(self.program, index, parent)

    def _scopes(self, blocks: list[Block]) -> Iterator[tuple[Block, Mapping[str, IrVariable]]]:
        for block, of in zip(blocks, self.made.blocks, strict=True):
            outer = self.made.variables if block.idx == 0 else {}
            yield block, {**outer, **of.variables}

    # --- variables ---------------------------------------------------------------------------

    def _variables(self, block: Block, of: Mapping[str, IrVariable]) -> dict[str, Variable]:
        return {name: self._variable(block, made) for name, made in of.items()}

    def _variable(self, block: Block, made: IrVariable) -> Variable:
        like = _find(self.program, made.name) or _find(self.origin, _whole(made.name))
        if like is not None and like.block is block and _is_same(like, made):
            return like
        declared: dict[str, Any] = {"name": made.name, "is_data": made.kind is Kind.DATA}
        if made.dtype == RAW:
            return Variable(block, type=VarType.RAW, persistable=made.kind.persistable, **declared)
        declared["shape"] = [size if isinstance(size, int) else -1 for size in made.shape]
        declared["dtype"] = long_dtype(made.dtype)
        if like is not None:
            declared.update(type=like.type, stop_gradient=like.stop_gradient)
            if ir_dtype(like.dtype) == made.dtype:
                declared["dtype"] = like.dtype
        if made.kind is Kind.PARAM and declared["shape"]:
            return _parameter(block, declared, like)
        variable = Variable(block, persistable=made.kind.persistable, **declared)
        variable.sizes = made.shape
        return variable

    # --- operators ---------------------------------------------------------------------------

    def _ops(self, block: Block, blocks: list[Block], of: IrBlock) -> list[Operator]:
        return [self._op(block, blocks, op) for op in of.ops]

    def _op(self, block: Block, blocks: list[Block], made: IrOperator) -> Operator:
        known = self._known.get(made)
        if known and not made.blocks:
            op = known.pop(0)
            op.block = block
            return op
        attrs: dict[str, Any] = {name: _attr(value, blocks) for name, value in made.attrs.items()}
        outputs = _with_unwanted(_slots(made.outputs), attrs.pop(UNWANTED, ()))
        attrs[ROLE] = number_of(made.role)
        attrs[ROLE_VAR] = [name for pair in made.role_var for name in pair]
        return Operator(block, made.type, _slots(made.inputs), outputs, attrs, made.source)


def _with_unwanted(
    outputs: dict[str, list[str]], unwanted: Sequence[tuple[str, int]]
) -> dict[str, list[str]]:
    """Restores the empty names of unrequested outputs beside others of their slots."""
    for slot, at in unwanted:
        outputs[slot].insert(at, EMPTY)
    return outputs


def _find(program: Program, name: str) -> Variable | None:
    return next((block.vars[name] for block in program.blocks if name in block.vars), None)


def _whole(name: str) -> str:
    """Returns the variable of a slice or trainer copy: `w@GRAD` for `w@GRAD.block0.trainer_1`."""
    head, _, last = name.rpartition(".")
    if head and (last.startswith(("trainer_", "block")) and last[-1].isdigit()):
        return _whole(head)
    return name


def _is_same(like: Variable, made: IrVariable) -> bool:
    if made.dtype == RAW:
        return made.name == like.name and like.type == VarType.RAW
    kept = made.name == like.name and made.kind.persistable == like.persistable
    return kept and like.sizes == made.shape and ir_dtype(like.dtype) == made.dtype


def _parameter(block: Block, declared: dict[str, Any], like: Variable | None) -> Parameter:
    if isinstance(like, Parameter):
        declared.update(
            trainable=like.trainable,
            optimize_attr=like.optimize_attr,
            regularizer=like.regularizer,
            is_distributed=like.is_distributed,
        )
    return Parameter(block, **declared)


def _slots(operands: Operands) -> dict[str, list[str]]:
    return {slot: [str(name) for name in names] for slot, names in operands.slots}


def _attr(value: Any, blocks: list[Block]) -> Any:
    if isinstance(value, tuple):
        return [_attr(item, blocks) for item in value]
    return blocks[value.index] if isinstance(value, BlockRef) else value
