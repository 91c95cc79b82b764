"""Equivalence of two traces of one step, with a symbolic and with a concrete batch size.

With a symbolic size jax does some things in another way: it clamps an index, say, or makes a mask
of `iota`. Such places are small, and their surroundings are equal. So values are paired by the
user's line that made them, and each pair is computed alone, from values that are the same in both
traces: a few operators on random arrays. Pairs with equal results are taken for equal, and their
dependents are compared by structure again. The step is never run as a whole.

A Python branch on the batch size silently takes one side if the size is symbolic.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.analysis.fingerprint import Numbering
from jaxfleet.capture.trace import BATCH_LETTER, Traced
from jaxfleet.ir import Kind, Operand, Operator, Program, Variable
from jaxfleet.ir.dims import substitute
from jaxfleet.ops import Array, Interpreter
from jaxfleet.ops.jax_adapter import dtype_text, numpy_dtype

_MOST_OPS = 256  # of a part; longer ones would take a compile of their own
_MOST_FAILURES = 4  # a pair that fails is not one, or all its dependents differ too
_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")
_Pair: TypeAlias = tuple[str, str]


def differing(
    left: Program, right: Program, names: Sequence[str], sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """Returns the names whose values may differ between two programs that both write them.

    The left one may have a symbolic batch size, whose value is in `sizes`.
    """
    numbering = _Numbering(sizes)
    first, second = _Side(left, sizes), _Side(right, sizes)
    budget = len(first.ops) + len(second.ops)
    tried: set[_Pair] = set()
    failures = 0
    while True:
        first.numbers, second.numbers = (side.numbered(numbering) for side in (first, second))
        rest = tuple(name for name in names if first.last(name) != second.last(name))
        known = set(first.numbers.values()).intersection(second.numbers.values())
        proven: set[int] = set()
        for x, y in _pairs(first, second, known, rest):
            parts = first.part(x, known), second.part(y, known)
            size = len(parts[0].places) + len(parts[1].places)
            if (x, y) in tried or failures == _MOST_FAILURES or size > min(budget, _MOST_OPS):
                continue
            if proven.intersection(first.numbers[name] for name in parts[0].inputs):
                continue  # its structure may match now, which the next round finds
            tried.add((x, y))
            budget -= size
            if _compute_the_same(first, second, parts):
                numbering.equate(first.numbers[x], second.numbers[y])
                second.numbers[y] = first.numbers[x]
                known.add(first.numbers[x])
                proven.add(first.numbers[x])
            else:
                failures += 1
        if not proven:
            return rest


class _Numbering(Numbering):
    """A numbering in which values may be declared equal."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(dict(sizes))
        self.same: dict[int, int] = {}

    def equate(self, left: int, right: int) -> None:
        self.same[right] = left

    def number(self, *key: Hashable) -> int:
        """Returns the number of a value's definition, or of the value it was found equal to."""
        number = super().number(*key)
        while number in self.same:
            number = self.same[number]
        return number


@dataclass(frozen=True)
class _Part:
    """The operators that compute a value from values common to both programs."""

    value: str  # their result
    places: tuple[int, ...]  # their positions, in order
    inputs: tuple[str, ...]  # the common values


@dataclass
class _Side:
    """A program in which every value has a unique name."""

    program: Program  # as traced
    sizes: Mapping[str, int]  # values of its symbols
    ops: list[Operator] = field(default_factory=list)  # its operators, with the unique names
    types: dict[str, Variable] = field(default_factory=dict)  # of every value, with concrete sizes
    # The position of the operator that makes a value
    maker: dict[str, int] = field(default_factory=dict)
    # The last value of each of the program's own names
    newest: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)  # of every value

    def __post_init__(self) -> None:
        root = self.program.root
        self.types = {v.name: self._sized(v) for v in self.program.variables.values()}
        for place, op in enumerate(root.ops):
            made = {name: f"{name}~{place}" for name in op.writes}
            inputs = op.inputs.renamed(self.newest)
            for name, new in made.items():
                declared = root.variables.get(name) or self.program.variables[name]
                self.types[new] = replace(self._sized(declared), name=new, kind=Kind.TEMP)
                self.maker[new] = place
            self.newest.update(made)
            self.ops.append(replace(op, inputs=inputs, outputs=op.outputs.renamed(made)))

    def _sized(self, variable: Variable) -> Variable:
        return replace(variable, shape=tuple(substitute(x, self.sizes) for x in variable.shape))

    def numbered(self, numbering: Numbering) -> dict[str, int]:
        temps = {name: self.types[name] for name in self.maker}
        root = replace(self.program.root, ops=tuple(self.ops), variables=temps, results=())
        return numbering.of(self.program.with_block(root))

    def last(self, name: str) -> int:
        return self.numbers[self.newest.get(name, name)]

    def part(self, value: str, known: set[int]) -> _Part:
        """Returns the operators that compute a value from common values."""
        places: set[int] = set()
        inputs: dict[str, None] = {}
        waiting: list[Operand] = [value]
        while waiting:
            name = waiting.pop()
            if not isinstance(name, str) or self.types[name].kind is Kind.CONST:
                continue
            if name not in self.maker or (name != value and self.numbers[name] in known):
                inputs[name] = None
            elif self.maker[name] not in places:
                places.add(self.maker[name])
                waiting += self.ops[self.maker[name]].inputs
        return _Part(value, tuple(sorted(places)), tuple(inputs))

    def run(self, part: _Part, inputs: Mapping[str, Array]) -> Array:
        ops = tuple(self.ops[place] for place in part.places)
        root = replace(self.program.root, ops=ops, results=())
        scope = Interpreter(self.program.with_block(root), self.sizes).run(
            inputs, keep=[part.value]
        )
        return scope[part.value]


def _pairs(
    left: _Side, right: _Side, known: set[int], names: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yields candidate pairs, of one line, role and type, and finally the outputs."""
    if not names:
        return
    there = _by_line(left, known)
    for key, values in _by_line(right, known).items():
        others = there.get(key, [])
        if len(others) == len(values):
            yield from zip(others, values, strict=True)
        elif others:
            yield others[-1], values[-1]
    yield from ((left.newest[x], right.newest[x]) for x in names if x in left.newest)


def _by_line(side: _Side, known: set[int]) -> dict[Hashable, list[str]]:
    """Returns the values unique to one program, by source line and type."""
    found: dict[Hashable, list[str]] = defaultdict(list)
    for op in side.ops:
        for name in op.writes:
            if side.numbers[name] not in known:
                line, type_ = op.source, side.types[name]
                key = (line.file, line.line, line.scope, op.role, type_.dtype, type_.shape)
                found[key].append(name)
    return found


def _compute_the_same(left: _Side, right: _Side, parts: tuple[_Part, _Part]) -> bool:
    """Whether two parts compute close values from the same inputs, of mixed and of one sign."""
    here, there = parts

    def run_both(values: Mapping[int, Array]) -> tuple[Array, Array]:
        x = left.run(here, {name: values[left.numbers[name]] for name in here.inputs})
        return x, right.run(there, {name: values[right.numbers[name]] for name in there.inputs})

    types = {left.numbers[name]: left.types[name] for name in here.inputs}
    types |= {right.numbers[name]: right.types[name] for name in there.inputs}
    run = jax.jit(run_both)
    try:
        return all(
            _are_close(*run({number: _drawn(v, number, low) for number, v in types.items()}))
            for low in (-1.0, 0.5)
        )
    except Exception:  # noqa: BLE001  # a part that cannot run alone is not proven
        return False


def _drawn(variable: Variable, seed: int, low: float) -> Array:
    """Returns random values of a variable's type; integers are in range as indices of any axis."""
    shape: Any = variable.shape
    if variable.dtype.startswith("key<"):
        keys = (jax.random.key(seed, impl=name) for name in _KEYS)
        return jnp.broadcast_to(
            next(k for k in keys if dtype_text(k.dtype) == variable.dtype), shape
        )
    drawn, dtype = np.random.default_rng(seed), numpy_dtype(variable.dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return drawn.uniform(low, 1.0, shape).astype(dtype)
    return drawn.integers(0, 2, shape).astype(dtype)


def _are_close(x: Array, y: Array) -> bool:
    """Whether two results differ by no more than the order of their sums explains."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    left, right = np.asarray(x), np.asarray(y)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not jnp.issubdtype(left.dtype, jnp.inexact):
        return bool((left == right).all())
    allowed = float(jnp.finfo(left.dtype).eps) ** 0.5  # type: ignore[no-untyped-call]  # jax's own
    wide = np.complex128 if np.iscomplexobj(left) else np.float64
    left, right = left.astype(wide), right.astype(wide)
    scale = np.max(np.abs(right), initial=0.0, where=np.isfinite(right))
    return bool(np.allclose(left, right, rtol=allowed, atol=allowed * scale, equal_nan=True))


@dataclass(frozen=True)
class Difference:
    """Difference between two traces of one step."""

    names: tuple[str, ...]  # state leaves and metrics whose values differ
    # The first operator of the second trace that the first lacks, or the other way round
    op: Operator | None


def unlike(left: Traced, right: Traced, rows: int) -> Difference | None:
    """Returns the structural difference between two traces, except dead operators.

    The left one may have a symbolic batch size, which stands for `rows`.
    """
    numbering = Numbering({BATCH_LETTER: rows})
    before, after = numbering.of(left.program), numbering.of(right.program)
    names = tuple(name for name in _returned(left) if before[name] != after[name])
    if not names:
        return None

    def new(program: Program, numbers: Mapping[str, int], others: Mapping[str, int]) -> Any:
        known = set(others.values())
        for op in program.root.ops:
            made = [numbers[name] for name in op.writes]
            if not known.issuperset(made) and numbering.known(made) is None:
                return op
        return None

    first = new(right.program, after, before) or new(left.program, before, after)
    return Difference(names, first)


def different_results(symbolic: Traced, concrete: Traced, rows: int) -> Difference | None:
    """Returns the difference between a symbolic trace and one at `rows` rows.

    Where their structures differ, since jax does some things in another way with a symbolic size,
    the parts that differ are computed on random values.
    """
    found = unlike(symbolic, concrete, rows)
    if found is None:
        return None
    sizes = {BATCH_LETTER: rows}
    names = differing(symbolic.program, concrete.program, found.names, sizes)
    return replace(found, names=names) if names else None


def _returned(traced: Traced) -> list[str]:
    lasting = traced.program.of_kind(Kind.PARAM, Kind.STATE)
    return [*(variable.name for variable in lasting), *traced.metrics]
