"""Runs a program on devices that have different numbers of rows.

XLA runs one program on all devices, and an array has one shape. So what differs is padded to the
largest, and every run of operators between collectives becomes a `switch` over the shapes that
there are: each branch cuts the padding off, computes, and pads again. Nothing is ever computed
from padding, and a mean is over a device's own rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxfleet.errors import FeedError
from jaxfleet.ir import Operator, Program
from jaxfleet.ops import Array, Interpreter, find_op

Shape: TypeAlias = tuple[int, ...]
Values: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True)
class Variant:
    """The shapes that some of the devices have.

    Attributes:
        interpreter: runs operators with the sizes that these devices have.
        shapes: of each value so far.
    """

    interpreter: Interpreter
    shapes: dict[str, Shape]

    def run(self, ops: Sequence[Operator], values: Values, wanted: Iterable[str]) -> Values:
        """Returns what operators make of values of the variant's own shapes."""
        program = self.interpreter.program
        part = program.with_block(program.root.with_ops(ops))
        names = list(wanted)
        made = replace(self.interpreter, program=part).run(values, keep=names)
        return {name: made[name] for name in names}

    def predict(
        self, ops: Sequence[Operator], values: Values, wanted: Iterable[str]
    ) -> dict[str, Shape]:
        """Returns the shapes of what operators would make."""
        like = {n: jax.ShapeDtypeStruct(self.shapes[n], v.dtype) for n, v in values.items()}
        made = jax.eval_shape(lambda given: self.run(ops, given, wanted), like)
        return {name: value.shape for name, value in made.items()}

    def branch(
        self, ops: Sequence[Operator], wanted: Mapping[str, Shape]
    ) -> Callable[[Values], Values]:
        """Returns operators as a function of padded values to values padded to these shapes."""

        def run(values: Values) -> Values:
            own = {name: _cut(value, self.shapes[name]) for name, value in values.items()}
            return {n: _pad(v, wanted[n]) for n, v in self.run(ops, own, wanted).items()}

        return run


def run_uneven(
    program: Program, variants: Sequence[Variant], which: Array, values: Values, keep: Iterable[str]
) -> dict[str, Array]:
    """Runs block 0 and returns what names hold at its end, padded.

    Args:
        program: what runs.
        variants: the different shapes there are; they learn those of all values.
        which: the place of this device's among them.
        values: data and state, padded.
        keep: the names that are wanted at the end.

    Raises:
        FeedError: an operator joins devices by a value that has not one shape on all of them.
    """
    held = dict(values)
    for section in _sections(program, keep):
        if section.is_collective:
            _check_alike(section.ops, variants)
            made = variants[0].run(section.ops, held, section.makes)
            shapes = [{name: value.shape for name, value in made.items()}] * len(variants)
        else:
            read = {name: held[name] for name in section.reads if name in held}
            shapes = [x.predict(section.ops, read, section.makes) for x in variants]
            largest = {name: _largest([s[name] for s in shapes]) for name in section.makes}
            branches = [variant.branch(section.ops, largest) for variant in variants]
            made = lax.switch(which, branches, read)
        held.update(made)
        for variant, more in zip(variants, shapes, strict=True):
            variant.shapes.update(more)
    return held


@dataclass(frozen=True)
class _Section:
    """Operators that stand together.

    Attributes:
        ops: they.
        is_collective: all devices do them together.
        reads: the names that they read.
        makes: the names that they write and that are wanted after them.
    """

    ops: tuple[Operator, ...]
    is_collective: bool
    reads: frozenset[str]
    makes: tuple[str, ...]


def _sections(program: Program, keep: Iterable[str]) -> Iterator[_Section]:
    """Yields the operators of block 0 in order, collectives apart from the others."""
    groups = [
        (is_collective, tuple(ops))
        for is_collective, ops in groupby(program.root.ops, lambda op: find_op(op).is_collective)
    ]
    wanted, found = set(keep), []
    for is_collective, ops in reversed(groups):
        written = dict.fromkeys(name for op in ops for name in op.writes)
        makes = tuple(name for name in written if name in wanted)
        # What is written may be written in part only, by a sub-block, so its old value is read.
        reads = frozenset(n for op in ops for n in (*op.reads, *(op.writes if op.blocks else ())))
        wanted |= reads
        found.append(_Section(ops, is_collective, reads, makes))
    return reversed(found)


def _check_alike(ops: Sequence[Operator], variants: Sequence[Variant]) -> None:
    for op in ops:
        for name in op.reads:
            shapes = {variant.shapes[name] for variant in variants}
            if len(shapes) > 1:
                what = f"'{name}' has different shapes on the devices, {sorted(shapes)},"
                hint = "feed all devices equally many rows"
                raise FeedError(f"{what} and '{op.type}' joins them", op=op, hint=hint)


def _largest(shapes: Sequence[Shape]) -> Shape:
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


def _cut(value: Array, shape: Shape) -> Array:
    return value if value.shape == shape else value[tuple(slice(0, size) for size in shape)]


def _pad(value: Array, shape: Shape) -> Array:
    if value.shape == shape:
        return value
    return jnp.pad(value, [(0, wide - size) for size, wide in zip(value.shape, shape, strict=True)])
