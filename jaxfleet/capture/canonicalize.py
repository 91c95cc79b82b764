"""Canonical form of equations that JAX writes differently under a symbolic batch size.

A step reads and runs the same whichever way it was traced, and arithmetic on known integers leaves
no operators behind.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxfleet.capture.constant_folding import (
    Known,
    Link,
    dynamic_slice_as_slice,
    dynamic_update_slice_as_pad,
    gather_as_slice,
    known_literal,
    known_result,
    literal_of,
    scatter_as_pad,
)
from jaxfleet.capture.draft import MARK, Draft
from jaxfleet.ir import (
    Attrs,
    Block,
    Dim,
    Literal,
    Operand,
    Operands,
    Operator,
    Size,
    Variable,
    Word,
)
from jaxfleet.ir.naming import unique


def canonicalize(draft: Draft, inputs: Iterable[Variable]) -> Draft:
    """Returns the draft with known integers folded, and gathers of one window as slices."""
    outside = {variable.name: variable for variable in inputs} | dict(draft.constants)
    tidied = [_Tidier({**outside, **block.variables}) for block in draft.blocks]
    blocks: list[Block] = []
    for tidier, block in zip(tidied, draft.blocks, strict=True):
        blocks.append(tidier.block(block))  # before its inner blocks, which have higher numbers
        for op in blocks[-1].ops:
            for ref, arg, operand in _invariants(op, draft.blocks):
                tidier.hand_on(operand, tidied[ref], arg)
    results = [tidied[0].resolved(result) for result in draft.results]
    return replace(draft, blocks=blocks, results=results)


def _invariants(op: Operator, blocks: Sequence[Block]) -> Iterator[tuple[int, str, Operand]]:
    """Yields each inner block of an operator with a loop-invariant argument and its value."""
    given: dict[str, dict[str, tuple[Any, Any]]] = {  # first input and count, by attribute
        "jax.remat2": {"body": (0, len(op.inputs))},
        "jax.cond": {"branches": (1, len(op.inputs))},
        "jax.scan": {"body": (0, op.attrs.get("num_consts"))},
        "jax.while": {
            "cond": (0, op.attrs.get("cond_nconsts")),
            "body": (op.attrs.get("cond_nconsts"), op.attrs.get("body_nconsts")),
        },
    }
    inputs = tuple(op.inputs)
    for name, (first, count) in given.get(op.type, {}).items():
        refs: Any = op.attrs[name]
        for ref in refs if isinstance(refs, tuple) else (refs,):
            args = blocks[ref.index].args
            for arg, operand in zip(args, inputs[first : first + count], strict=False):
                yield ref.index, arg, operand


class _Tidier:
    """Rewrites one block, operator by operator."""

    def __init__(self, types: dict[str, Variable]) -> None:
        self.types = types
        self.names: dict[str, Operand] = {}  # substitutions of names
        self.known: dict[str, Known] = {}
        self.zeros: dict[str, Literal] = {}  # all-zero arrays
        self.ops: list[Operator] = []

    def block(self, block: Block) -> Block:
        for op in block.ops:
            self._op(replace(op, inputs=op.inputs.renamed(self.names)))
        names = {name for op in self.ops for name in op.writes}.union(block.args)
        declared = {name: self.types[name] for name in names}
        results = tuple(self.resolved(result) for result in block.results)
        return replace(block, ops=tuple(self.ops), variables=declared, results=results)

    def hand_on(self, operand: Operand, inner: "_Tidier", arg: str) -> None:
        """Passes what is known of an operand to an inner block's argument."""
        if (value := self._known(operand)) is not None:
            inner.known[arg] = value
        if isinstance(operand, str) and operand in self.zeros:
            inner.zeros[arg] = self.zeros[operand]

    def resolved(self, operand: Operand) -> Operand:
        return self.names.get(operand, operand) if isinstance(operand, str) else operand

    def _op(self, op: Operator) -> None:
        if op.blocks or len(op.writes) != 1 or op.type == MARK:
            self.ops.append(op)
            return
        out = self.types[op.writes[0]]
        if (same := self._same_as(op, out)) is not None:
            self.names[out.name] = same
            return
        if (links := self._links(op)) is not None:
            self._replace(op, links)
            return
        if (zero := self._zero(op)) is not None:
            self.zeros[out.name] = zero
        value = self._value(op, out)
        if value is not None:
            self.known[out.name] = value
            op = _size_itself(op, out, value)
        self.ops.append(op)

    def _same_as(self, op: Operator, out: Variable) -> Operand | None:
        """Returns the operand that equals an operator's result, if there is one."""
        match op.type, tuple(op.inputs):
            case "jax.select_n", (Literal(dtype="bool") as which, x, y):
                return y if which.text == "true" else x
            case "jax.mul", (Literal(text="1"), str(x)) if self.types[x].type == out.type:
                return x
            case "jax.add", (Literal(text="0"), str(x)) if self.types[x].type == out.type:
                return x
        value = self._value(op, out) if out.shape == () else None
        return literal_of(value, out.dtype) if value is not None else None

    def _value(self, op: Operator, out: Variable) -> Known | None:
        inputs = [self._known(operand) for operand in op.inputs]
        given = [array for array in inputs if array is not None]
        if len(given) < len(inputs):
            return None
        return known_result(op.type, given, op.attrs, dtype=out.dtype, shape=out.shape)

    def _known(self, operand: Operand) -> Known | None:
        return known_literal(operand) if isinstance(operand, Literal) else self.known.get(operand)

    def _zero(self, op: Operator) -> Literal | None:
        value = op.inputs[0] if op.type == "jax.broadcast_in_dim" else None
        return value if isinstance(value, Literal) and value.text in {"0.0", "0"} else None

    def _links(self, op: Operator) -> list[Link] | None:
        """Returns an equivalent chain of operators, or None to keep the operator."""
        match op.type, tuple(op.inputs):
            case "jax.gather", (str(x), str(at)) if at in self.known:
                return gather_as_slice(self._shape(x), self.known[at], op.attrs)
            case "jax.scatter-add", (str(x), str(at), str(part)) if at in self.known:
                if (zero := self.zeros.get(x)) is None:
                    return None
                whole, updates = self._shape(x), self._shape(part)
                return scatter_as_pad(whole, self.known[at], updates, op.attrs, zero)
            case "jax.dynamic_slice", (str(x), *at) if (start := self._start(at)) is not None:
                sizes: Any = op.attrs["slice_sizes"]
                return dynamic_slice_as_slice(self._shape(x), start, sizes)
            case "jax.dynamic_update_slice", (str(x), str(part), *at):
                start, zero = self._start(at), self.zeros.get(x)
                if start is None or zero is None:
                    return None
                whole, updates = self._shape(x), self._shape(part)
                return dynamic_update_slice_as_pad(whole, start, updates, zero)
        return None

    def _start(self, operands: Iterable[Operand]) -> list[Size] | None:
        values = [self._known(operand) for operand in operands]
        given = [value.item() for value in values if value is not None]
        return given if len(given) == len(values) else None

    def _shape(self, name: str) -> tuple[Size, ...]:
        return self.types[name].shape

    def _replace(self, op: Operator, links: list[Link]) -> None:
        out = self.types[op.writes[0]]
        at = op.inputs[_WRITTEN.get(op.type, 0)]
        for link in links:
            name = unique(_renamed(out.name, op.type, link.op_type), self.types)
            self.types[name] = replace(out, name=name, shape=link.shape)
            inputs, outputs = Operands.of(at, *link.more), Operands.of(name)
            self.ops.append(
                replace(op, type=link.op_type, inputs=inputs, outputs=outputs, attrs=link.attrs)
            )
            at = name
        self.names[out.name] = at


# Input that is written into the first one's zeros; other chains begin with the first input.
_WRITTEN: Mapping[str, int] = {"jax.scatter-add": 2, "jax.dynamic_update_slice": 1}


def _size_itself(op: Operator, out: Variable, value: Known) -> Operator:
    """Replaces the computation of a size by one operator."""
    if out.shape or not isinstance(size := value.item(), Dim):
        return op
    attrs = Attrs({"dim": size, "dtype": Word(out.dtype)})
    return replace(op, type="jax.dim_value", inputs=Operands(), attrs=attrs)


def _renamed(name: str, old_type: str, new_type: str) -> str:
    """Returns `slice.3` for `gather.3`; a name from a scope stays."""
    prefix, dot, number = name.rpartition(".")
    old = old_type.removeprefix("jax.").replace("-", "_")
    return f"{new_type.removeprefix('jax.')}{dot}{number}" if prefix == old else name
