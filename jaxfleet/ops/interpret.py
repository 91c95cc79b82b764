"""Runs a Program as a jax function, operator by operator.

Under `jit` the Program becomes an XLA computation; otherwise it runs eagerly.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jax import lax

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Block, Literal, Operand, Operator, Program, Size, evaluate
from jaxfleet.ir.variable import Kind
from jaxfleet.ops.jax_adapter import literal_value
from jaxfleet.ops.product_rounding import rounding
from jaxfleet.ops.registry import Array, find_op


@dataclass
class Interpreter:
    """Runs the blocks of one program.

    `sizes` has a number for every letter, `trainer` the trainer's id if there are several and no
    mesh. If each product is to be rounded, `zero` is a `u32[]`, a zero unknown to the compiler.
    """

    program: Program
    sizes: Mapping[str, int]
    axis_name: str | None = None
    trainer: Array | None = None
    zero: Array | None = None
    _constants: dict[str, Array] = field(default_factory=dict)

    def run(self, values: Mapping[str, Array], *, keep: Iterable[str] = ()) -> dict[str, Array]:
        """Runs block 0 and returns the final values of names.

        `values` contains an array for each data, param and state variable. The temporaries in
        `keep` are returned in addition to those that a `fetch` names.
        """
        scope = {**self._values_of_constants(), **values}
        self._run_ops(self.program.root, scope, keep)
        return scope

    def run_block(self, block: Block, args: Sequence[Array]) -> list[Array]:
        """Runs a block that is a function, and returns its results."""
        scope = {**self._values_of_constants(), **dict(zip(block.args, args, strict=True))}
        self._run_ops(block, scope)
        return [_read(scope, result, None) for result in block.results]

    def run_scope(
        self, block: Block, held: Mapping[str, Array], *, keep: Iterable[str] = ()
    ) -> dict[str, Array]:
        """Runs a block without arguments and results, which sees the values around it.

        `held` contains the values of the names that it reads, which are inputs of its operator.
        Returns the final values of names; of the block's temporaries, those in `keep`.
        """
        scope, kept = {**self._values_of_constants(), **held}, frozenset(keep)
        self._run_ops(block, scope, kept)
        own = block.variables.keys() - kept
        return {name: value for name, value in scope.items() if name not in own}

    @property
    def device(self) -> Array | None:
        """The index of this device or trainer; None on a single one."""
        return self.trainer if self.axis_name is None else lax.axis_index(self.axis_name)

    def size(self, size: Size) -> int:
        """Returns the number for a symbolic size."""
        return evaluate(size, self.sizes)

    def _run_ops(self, block: Block, scope: dict[str, Array], keep: Iterable[str] = ()) -> None:
        last_reads = _last_reads(block, keep)
        for place, op in enumerate(block.ops):
            inputs = [_read(scope, operand, op) for operand in op.inputs]
            outputs = self._run_op(op, inputs)
            scope.update(zip(op.writes, outputs, strict=True))
            for name in last_reads.get(place, ()):
                scope.pop(name, None)

    def _run_op(self, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
        try:
            meaning = find_op(op).meaning
            if self.zero is not None:
                meaning = rounding(meaning, self.zero)
            return meaning(self, op, inputs)
        except ProgramError:
            raise
        except (TypeError, ValueError) as error:
            raise ProgramError(f"{op.type}: {error}", op=op) from error

    def _values_of_constants(self) -> dict[str, Array]:
        if not self._constants:
            for variable in self.program.of_kind(Kind.CONST):
                constant = variable.constant
                if constant is None or constant.value is None:
                    what = f"constant '{variable.name}' has no value, only its digest"
                    hint = "load the program with jaxfleet.ir.load_program"
                    raise ProgramError(what, hint=hint)
                self._constants[variable.name] = constant.value
        return self._constants


def _read(scope: Mapping[str, Array], operand: Operand, op: Operator | None) -> Array:
    if isinstance(operand, Literal):
        return literal_value(operand)
    if operand not in scope:
        what = f"'{operand}' has no value"
        hint = "an operator lists among its inputs what its sub-block reads"
        raise ProgramError(what, op=op, hint=hint)
    return scope[operand]


def _last_reads(block: Block, keep: Iterable[str]) -> dict[int, list[str]]:
    """Returns, by operator, the temporaries that no later operator reads.

    An eager step frees them there; under `jit` XLA does so. Fetched values are read after the step.
    """
    kept = {*keep, *(result for result in block.results if isinstance(result, str))}
    kept.update(name for op in block.ops if op.type == "fetch" for name in op.reads)
    last: dict[str, int] = {}
    for place, op in enumerate(block.ops):
        for name in (*op.reads, *op.writes):
            if name in block.variables and name not in kept:
                last[name] = place
    places: dict[int, list[str]] = {}
    for name, place in last.items():
        places.setdefault(place, []).append(name)
    return places
