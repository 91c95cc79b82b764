"""Compiled functions of single blocks of a program: lists of arrays in and out.

A parameter server's program consists of such blocks. Two blocks that differ in names alone share an
executable.
"""

import platform
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Block, Operator, Program, Variable, print_operator
from jaxfleet.ir.attributes import Attr, Attrs, BlockRef, Operand, map_attr
from jaxfleet.ir.naming import INSTEAD_OF
from jaxfleet.ir.program import Operands, Role
from jaxfleet.lower.host_transfer import device_dtype
from jaxfleet.ops import Array, Interpreter
from jaxfleet.ops.jax_adapter import dtype_text

Run = Callable[..., Sequence[Array]]
_X86 = ("x86_64", "AMD64")  # values of `platform.machine`
_WITHOUT_CHOICE: Mapping[str, str | bool] = {
    "xla_cpu_max_isa": "AVX",  # the last without fused products
    "xla_cpu_prefer_vector_width": "64",  # bits: too few for vectors
}
_APPROXIMATED = frozenset(
    f"jax.{name}"
    for name in (
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e"),
        *("cbrt", "cos", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1"),
        *("igamma", "igammac", "lgamma", "log", "log1p", "logistic", "polygamma", "pow"),
        *("regularized_incomplete_beta", "sin", "sinh", "tan", "tanh", "zeta"),
    )
)


@dataclass
class ExecutableCache:
    """Executables by the content of their blocks, shared by the cache's users."""

    compiled: int = 0  # the number of compilations
    _held: dict[str, Run] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: str, build: Callable[[], Run]) -> Run:
        """Returns the executable of a key, building it on first use."""
        with self._lock:
            if key not in self._held:
                self._held[key] = build()
                self.compiled += 1
            return self._held[key]

    def keep(self, wanted: Iterable[Run]) -> None:
        """Drops all executables but these; a step that holds another may still run it."""
        known = set(map(id, wanted))
        with self._lock:
            self._held = {key: run for key, run in self._held.items() if id(run) in known}

    def runs(self) -> list[Run]:
        """Returns the cached executables."""
        with self._lock:
            return list(self._held.values())

    def forget(self, unwanted: Iterable[Run], *, but: Iterable[Run]) -> None:
        """Drops these executables, except those in `but`."""
        gone = set(map(id, unwanted)) - set(map(id, but))
        with self._lock:
            self._held = {key: run for key, run in self._held.items() if id(run) not in gone}


def compute_in_place() -> None:
    """Makes CPUs compute in the calling thread, for a process that waits for each result.

    Passing a small block to another thread and waiting for it takes longer than the block; by a
    millisecond on a machine whose cores are busy. Takes effect only before the first use of a
    device.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


@dataclass
class LoweredBlock:
    """A block as a function."""

    reads: tuple[str, ...]  # the variables that it takes, in order: those that it does not declare
    writes: tuple[str, ...]  # the variables that it returns, in order
    # Those whose memory its results reuse; their arrays are invalid afterwards
    donated: tuple[str, ...]
    _build: Callable[[], Run] = field(repr=False)
    _run: Run | None = field(default=None, repr=False)

    def function(self, values: Sequence[Array]) -> Sequence[Array]:
        """Runs the block on its inputs and returns its outputs; compiles at the first call."""
        return self.compile()(*values)

    def compile(self) -> Run:
        """Returns the executable; a ProgramError if a result differs from the declaration."""
        if self._run is None:
            self._run = self._build()
        return self._run


def lower_block(
    program: Program, index: int, *, donate: Collection[str], cache: ExecutableCache | None = None
) -> LoweredBlock:
    """Lowers one block of a program, which has numbers for sizes.

    It may reuse the memory of `donate` for their new values. Executables are kept in `cache`, a
    private one by default.
    """
    block = program.blocks[index]
    reads, writes = outer_reads(program, block), outer_writes(program, block)
    donated = tuple(name for name in reads if name in donate and name in writes)
    cache = cache if cache is not None else ExecutableCache()

    def build() -> Run:
        key = block_key(program, block, reads, writes, donated)
        return cache.get(key, lambda: _compiled(program, block, reads, writes, donated))

    return LoweredBlock(reads, writes, donated, build)


def outer_reads(program: Program, block: Block) -> tuple[str, ...]:
    """Returns the variables that a block reads from outside, constants excluded."""
    found: dict[str, None] = {}
    written: set[str] = set()
    for op in block.ops:
        for name in op.reads:
            if name in written or name in block.variables:
                continue
            if program.lookup(name, block).constant is None:
                found[name] = None
        written.update(op.writes)
    return tuple(found)


def outer_writes(program: Program, block: Block) -> tuple[str, ...]:
    """Returns a block's writes for others: undeclared variables, or read by a block inside."""
    shared: set[str] = set()
    run_here = {index for op in block.ops for index in op.blocks}
    for other in program.blocks:
        if other.parent == block.index and other.index not in run_here:
            shared.update(name for op in other.ops for name in op.reads)
    names = dict.fromkeys(name for op in block.ops for name in op.writes)
    return tuple(name for name in names if name not in block.variables or name in shared)


def _compiled(
    program: Program,
    block: Block,
    reads: Sequence[str],
    writes: Sequence[str],
    donated: Collection[str],
) -> Run:
    own = {name: v for name, v in block.variables.items() if name not in writes}
    body = replace(block, variables=own)
    declared = {name: program.lookup(name, block) for name in (*reads, *writes)}

    def run(zero: Array, *values: Array) -> list[Array]:
        held = dict(zip(reads, values, strict=True))
        after = Interpreter(program, {}, zero=zero).run_scope(body, held)
        return [_result(after[name], declared[name], values) for name in writes]

    run.__name__ = f"{program.name}.block{block.index}"
    places = tuple(place for place, name in enumerate(reads, start=1) if name in donated)
    zero, specs = jnp.zeros((), jnp.uint32), [_spec(declared[name]) for name in reads]
    lowered = jax.jit(run, donate_argnums=places).lower(zero, *specs)
    compiled = lowered.compile(compiler_options=compiler_options(program, block))
    return partial(compiled, zero)


def _result(value: Array, variable: Variable, values: Sequence[Array]) -> Array:
    """Returns a block's result for a variable of the declared type, in memory of its own."""
    if any(value is given for given in values):
        value = jnp.array(value, copy=True)  # the caller may overwrite its argument
    value = jnp.asarray(value)
    if dtype_text(value.dtype) != variable.dtype or value.shape != variable.shape:
        found = f"{dtype_text(value.dtype)}{list(value.shape)}"
        what = f"'{variable.name}' is declared {variable.type}, and an operator makes {found}"
        raise ProgramError(what)
    return value


def _spec(variable: Variable) -> jax.ShapeDtypeStruct:
    if not all(isinstance(size, int) for size in variable.shape):
        what = f"'{variable.name}' is {variable.type}: a block is compiled for numbers"
        raise ProgramError(what, hint="give the letters numbers first")
    shape: Any = variable.shape
    return jax.ShapeDtypeStruct(shape, device_dtype(variable.dtype))


def block_key(
    program: Program,
    block: Block,
    reads: Sequence[str],
    writes: Sequence[str],
    donated: Collection[str] = (),
) -> str:
    """Returns the text of a block with its names numbered: equal text, equal executable."""
    return _Key(program).of(block, reads, writes, donated)


class _Key:
    """Prints a block with its names numbered."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._names: dict[tuple[int, str], str] = {}
        self._blocks: dict[int, int] = {}
        self._lines: list[str] = []

    def of(
        self, block: Block, reads: Sequence[str], writes: Sequence[str], donated: Collection[str]
    ) -> str:
        """Returns the text of a block and of all blocks that its operators run."""
        self._block(block)
        for name in reads:
            self._lines.append(f"read {self._name(name, block)} {name in donated}")
        self._lines += [f"write {self._name(name, block)}" for name in writes]
        return "\n".join(self._lines)

    def _block(self, block: Block) -> None:
        inner: list[int] = []
        args = " ".join(self._name(name, block) for name in block.args)
        self._lines.append(f"block {self._blocks.setdefault(block.index, 0)} {args}")
        for op in block.ops:
            inner += [index for index in op.blocks if index not in self._blocks]
            for index in op.blocks:
                self._blocks.setdefault(index, len(self._blocks))
            plain = replace(
                op,
                inputs=self._operands(op.inputs, block),
                outputs=self._operands(op.outputs, block),
                attrs=self._attrs(op),
                role=Role.FORWARD,
                role_var=(),
            )
            self._lines.append(print_operator(plain))
        self._lines.append("results " + " ".join(self._operand(x, block) for x in block.results))
        for index in inner:
            self._block(self._program.blocks[index])

    def _attrs(self, op: Operator) -> Attrs:
        said = {k: map_attr(v, self._numbered) for k, v in op.attrs.items() if k != INSTEAD_OF}
        return Attrs(said)

    def _operands(self, operands: Operands, block: Block) -> Operands:
        return operands.renamed({name: self._name(name, block) for name in operands.names})

    def _operand(self, operand: Operand, block: Block) -> str:
        return self._name(operand, block) if isinstance(operand, str) else str(operand)

    def _numbered(self, attr: Attr) -> Attr:
        return BlockRef(self._blocks[attr.index]) if isinstance(attr, BlockRef) else attr

    def _name(self, name: str, block: Block) -> str:
        at, scope = _declared(self._program, name, block)
        if (at, name) not in self._names:
            new = f"v{len(self._names)}"
            self._names[at, name] = new
            constant = scope[name].constant
            value = f" = @{constant.digest}" if constant is not None else ""
            self._lines.append(f"{new}: {scope[name].type}{value}")
        return self._names[at, name]


def _declared(program: Program, name: str, block: Block) -> tuple[int, Mapping[str, Variable]]:
    """Returns the declaring block of a name (-1 for the program) and its variables."""
    at = block
    while name not in at.variables:
        if at.parent < 0:
            program.lookup(name, block)  # raises if there is none
            return -1, program.variables
        at = program.blocks[at.parent]
    return at.index, at.variables


def compiler_options(program: Program, block: Block) -> dict[str, str | bool]:
    """Returns XLA's compiler options for a block."""
    has_choice = jax.default_backend() == "cpu" and platform.machine() in _X86
    if has_choice and any(_approximates(program, b, op) for b, op in _operators(program, block)):
        return dict(_WITHOUT_CHOICE)
    return {}


def _operators(program: Program, block: Block) -> Iterator[tuple[Block, Operator]]:
    for op in block.ops:
        yield block, op
        for index in op.blocks:
            yield from _operators(program, program.blocks[index])


def _approximates(program: Program, block: Block, op: Operator) -> bool:
    """Whether an operator approximates, and for more than one number."""
    return op.type in _APPROXIMATED and any(program.lookup(w, block).shape for w in op.writes)
