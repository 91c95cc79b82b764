"""Meanings of operator types: one JAX function each, with no second definition.

An operator's shapes come from `jax.eval_shape` of its meaning, its gradient from `jax.vjp`, its
lowering from calling it under `jit`. `jax.*` operators are jax primitives and need no entry.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Block, Operator, OpTraits, Program, Size, ir_traits
from jaxfleet.ir.op_traits import JAX_PREFIX, PURE

Array: TypeAlias = Any  # a jax array or tracer


class Context(Protocol):
    """The execution context available to a meaning."""

    @property
    def axis_name(self) -> str | None:
        """The mesh axis that the devices are on, or None on a single device."""
        ...

    @property
    def device(self) -> Array | None:
        """The index of this device or trainer; None on a single one."""
        ...

    def size(self, size: Size) -> int:
        """Returns the number for a symbolic size."""
        ...

    def run_block(self, block: Block, args: Sequence[Array]) -> list[Array]:
        """Runs a sub-block as a function of its arguments."""
        ...

    def run_scope(
        self, block: Block, held: Mapping[str, Array], *, keep: Iterable[str] = ()
    ) -> dict[str, Array]:
        """Runs a sub-block that sees the values around it; returns the final values of names.

        The block's own temporaries are left out, except those to `keep`.
        """
        ...

    @property
    def program(self) -> Program: ...


Meaning: TypeAlias = Callable[[Context, Operator, Sequence[Array]], Sequence[Array]]


@dataclass(frozen=True)
class OpDef:
    """The definition of one operator type."""

    type: str
    meaning: Meaning  # computes the outputs from the inputs, in operand order
    traits: OpTraits = PURE  # what no pass may do with it


@dataclass(frozen=True)
class Dialect:
    """The operator types under one prefix: `jax.` for jax's primitives."""

    prefix: str
    define: Callable[[str], OpDef]


@dataclass
class _Registry:
    ops: dict[str, OpDef] = field(default_factory=dict)
    dialects: dict[str, Dialect] = field(default_factory=dict)


_REGISTRY = _Registry()


def register_op(
    op_type: str, *, has_effect: bool = False, is_collective: bool = False
) -> Callable[[Meaning], Meaning]:
    """Registers the decorated function as the meaning of an operator type.

    `has_effect` and `is_collective` are the traits of a type that is not among the IR's own, whose
    traits are in `jaxfleet.ir.op_traits`.
    """
    traits = OpTraits(has_effect, is_collective)
    if (of_ir := ir_traits(op_type)) is not None:
        if traits not in (PURE, of_ir):
            if op_type.startswith(JAX_PREFIX):
                raise ProgramError(f"'{op_type}': operators named jax.* have no effects")
            raise ProgramError(f"'{op_type}' has its traits in jaxfleet.ir.op_traits")
        traits = of_ir

    def register(meaning: Meaning) -> Meaning:
        if op_type in _REGISTRY.ops:
            raise ProgramError(f"operator type '{op_type}' is registered twice")
        _REGISTRY.ops[op_type] = OpDef(op_type, meaning, traits)
        return meaning

    return register


def register_dialect(dialect: Dialect) -> None:
    """Registers the meanings of the types under a prefix."""
    _REGISTRY.dialects[dialect.prefix] = dialect


def find_op(op: Operator | str) -> OpDef:
    """Returns the definition of an operator, or of an operator type.

    Raises:
        ProgramError: no such type; the error lists the nearest ones.
    """
    op_type = op if isinstance(op, str) else op.type
    found = _REGISTRY.ops.get(op_type)
    if found is not None:
        return found
    for prefix, dialect in _REGISTRY.dialects.items():
        if op_type.startswith(prefix):
            definition = dialect.define(op_type)
            _REGISTRY.ops[op_type] = definition
            return definition
    raise _unknown(op_type, op if isinstance(op, Operator) else None)


def known_ops() -> Mapping[str, OpDef]:
    """Returns the registered operator types, and the jax primitives requested so far."""
    return dict(_REGISTRY.ops)


def _unknown(op_type: str, op: Operator | None) -> ProgramError:
    import difflib  # noqa: PLC0415  # only an error needs it

    near = difflib.get_close_matches(op_type, _REGISTRY.ops, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "register it with register_op"
    return ProgramError(f"no operator type '{op_type}'", op=op, hint=hint)
