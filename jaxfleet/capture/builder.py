"""Conversion of a jaxpr to operators: calls inlined, loops and branches as sub-blocks.

The result is a `Draft` with named values, still in single-assignment form, with the markers of
`capture.gradient_marker` as `gradient` and `parameter` operators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.capture.draft import MARK, Draft
from jaxfleet.capture.embedding import lookup
from jaxfleet.capture.embedding.lookup import PRIMITIVES
from jaxfleet.capture.gradient_marker import read_mark
from jaxfleet.capture.primitives import (
    Check,
    check_of,
    has_effect,
    implementation,
    is_foreign,
    is_leaked,
    is_loop,
    is_recomputed,
    is_refused,
    not_data,
    read_loop,
)
from jaxfleet.capture.roles import ancestors_of
from jaxfleet.errors import ProgramError
from jaxfleet.ir import (
    Attrs,
    Block,
    BlockRef,
    Frame,
    Kind,
    Literal,
    Operand,
    Operands,
    Operator,
    Role,
    Source,
    Variable,
    Word,
)
from jaxfleet.ir.naming import unique
from jaxfleet.ir.variable import make_constant
from jaxfleet.ops import find_op, jax_adapter
from jaxfleet.ops.exported import export_primitive
from jaxfleet.ops.jax_adapter import Equation, Jaxpr
from jaxfleet.ops.jax_ops import is_described
from jaxfleet.ops.user_frames import shared_callers


@dataclass(frozen=True)
class _Call:
    """A call of a function of the user's that jax traces by itself, as `jax.jit` and loops do.

    jax keeps what it traced. The frames in it begin at the function, or are those of its first
    call, which may be another one.
    """

    function: str  # empty if it is not known
    source: Source

    def around(self, own: Source) -> tuple[Frame, ...]:
        """Returns the calls that lead to a line of the function or of what it calls."""
        if not self.source.file:
            return own.callers
        source, frames = self.source, (*own.callers, Frame(own.file, own.line, own.function))
        here = (*source.callers, Frame(source.file, source.line, source.function))
        names = [frame.function.rpartition(".")[2] for frame in frames]
        if self.function in names:
            frames = frames[names.index(self.function) :]
        elif (frames[0].file, frames[0].function) == (here[0].file, here[0].function):
            return own.callers
        return shared_callers((*here, *frames[:-1]))


@dataclass(frozen=True)
class _Place:
    """Context of the equations being read."""

    stack: str = ""  # jax's name stack around them
    source: Source | None = None  # overrides their source inside a library function
    around: Source | None = None  # the source of the enclosing loop, for equations without one
    call: _Call | None = None  # the innermost call that they are in


@dataclass
class _Open:
    """A block under construction."""

    index: int
    parent: int
    args: tuple[str, ...] = ()
    variables: dict[str, Variable] = field(default_factory=dict)
    ops: list[Operator] = field(default_factory=list)
    results: tuple[Operand, ...] = ()


def build(jaxpr: Jaxpr, inputs: Sequence[Operand]) -> Draft:
    """Converts a closed jaxpr from `jax.make_jaxpr`, with a variable for each input.

    Raises:
        CaptureError: an equation has an effect or a parameter that is not data, or is unknown.
    """
    builder = _Builder({x for x in inputs if isinstance(x, str)})
    results = builder.read(jaxpr, list(inputs), _Place())
    blocks = [
        Block(b.index, b.parent, b.variables, b.args, tuple(b.ops), b.results)
        for b in builder.blocks
    ]
    # Dead operators count: without its value, nothing of a linear function is left but gradients.
    differentiated = ancestors_of(blocks[0].ops, builder.differentiated).intersection(inputs)
    kept_rows = tuple(builder.kept_rows)
    return Draft(blocks, builder.constants, results, kept_rows, frozenset(differentiated))


class _Builder:
    def __init__(self, taken: set[str]) -> None:
        self.taken = taken
        self.blocks = [_Open(0, -1)]
        self.current = self.blocks[0]
        self.constants: dict[str, Variable] = {}
        self.by_digest: dict[str, str] = {}
        self.count = 0
        self.kept_rows: list[Source] = []  # recomputations inlined into their surroundings
        self.differentiated: set[str] = set()  # what differentiated operators of block 0 read

    def read(self, closed: Jaxpr, inputs: list[Operand], place: _Place) -> list[Operand]:
        jaxpr, consts = jax_adapter.open_jaxpr(closed)
        values: dict[Any, Operand] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            if isinstance(const, jax.core.Tracer):
                raise is_leaked(const, jax_adapter.first_use(jaxpr, var))
            values[var] = self._constant(const)
        values.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            self._equation(eqn, values, place)
        return [self._value(values, atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Equation, values: dict[Any, Operand], place: _Place) -> None:
        name = eqn.primitive.name
        inputs = [self._value(values, atom) for atom in eqn.invars]
        stack = "/".join(part for part in (place.stack, jax_adapter.stack_of(eqn)) if part)
        source = _source(eqn, place, stack)
        if eqn.effects:
            raise has_effect(name, source)
        results = self._seen_through(eqn, inputs, replace(place, stack=stack), source)
        if results is None and (check := check_of(eqn)) is not None:
            op, inputs = self._check(check, inputs)
            results = [*self._declare(eqn.outvars, source, "checked")]
            self._append(op, inputs, results, stack, source)
        elif results is None:
            op = self._operator(eqn, _Place(stack, place.source, source, place.call), source)
            if op.type == "exported":
                inputs = [op.inputs[0], *inputs]
            results = [*self._declare(eqn.outvars, source, name)]
            self._append(op, inputs, results, stack, source)
        values.update(zip(eqn.outvars, results, strict=True))

    def _append(
        self, op: Operator, reads: list[Operand], writes: list[Operand], stack: str, source: Source
    ) -> None:
        role = Role.BACKWARD if "transpose(" in stack else Role.FORWARD
        given, made = Operands.of(*reads), Operands.of(*writes)
        op = replace(op, inputs=given, outputs=made, role=role, source=source)
        self.current.ops.append(op)
        if "jvp(" in stack and self.current is self.blocks[0]:
            self.differentiated.update(op.reads)

    def _check(self, check: Check, inputs: list[Operand]) -> tuple[Operator, list[Operand]]:
        place = check.number
        number = inputs[place] if isinstance(place, int) else self._value({}, place)
        values = [inputs[place] for place in check.values]
        return Operator("raise_if", attrs=Attrs({"messages": check.messages})), [
            inputs[0],
            number,
            *values,
        ]

    def _seen_through(
        self, eqn: Equation, inputs: list[Operand], place: _Place, source: Source
    ) -> list[Operand] | None:
        """Returns the results of an equation that needs no operator of its own, else None."""
        name = eqn.primitive.name
        if (call := jax_adapter.call_of(eqn)) is not None:
            is_library = jax_adapter.is_library_function(call.body)
            inner = source if is_library else place.source
            within = place.call if is_library else _Call(jax_adapter.body_name(call.body), source)
            passed = [inputs[i] for i in call.inputs]
            return self.read(call.body, passed, replace(place, source=inner, call=within))
        if is_recomputed(name) and lookup.holds_lookup(eqn.params["jaxpr"]):
            # A block that is a function cannot look up tables; its rows are kept instead.
            self.kept_rows.append(source)
            return self.read(eqn.params["jaxpr"], inputs, place)
        if (body := self._implementation(eqn, inputs)) is not None:
            given = [x for x in inputs if self._known(x) is None]
            inner = source if place.source is None else place.source
            return self.read(body, given, replace(place, source=inner))
        if name == "random_clone":  # the key itself; only jax's checker of reuse needs it
            return inputs
        if name == "platform_index":  # the branch that uses it knows its platforms itself
            return [Literal("0", "i32")]
        if name == "device_put" and not any(eqn.params["devices"]):  # a plain copy
            return inputs
        return None

    def _implementation(self, eqn: Equation, inputs: Sequence[Operand]) -> Jaxpr | None:
        """Returns the implementation of a library's primitive, or None for any other."""
        name = eqn.primitive.name
        if name in PRIMITIVES or is_loop(eqn) or is_described(f"jax.{name}") or not is_foreign(eqn):
            return None
        return implementation(eqn, [self._known(operand) for operand in inputs])

    def _known(self, operand: Operand) -> Any | None:
        """Returns an operand's value if it is the same at every step."""
        if isinstance(operand, Literal):
            return jax_adapter.literal_value(operand)
        variable = self.constants.get(operand)
        return variable.constant.value if variable is not None and variable.constant else None

    def _operator(self, eqn: Equation, place: _Place, source: Source) -> Operator:
        name = eqn.primitive.name
        if name == "name" and (mark := read_mark(eqn.params["name"])) is not None:
            return Operator(MARK, attrs=Attrs({"mark": mark.text()}))
        if name == "dim_as_value":
            dtype = Word(jax_adapter.dtype_text(eqn.outvars[0].aval.dtype))
            dim = jax_adapter.size_of(eqn.params["dim"])
            return Operator("jax.dim_value", attrs=Attrs({"dim": dim, "dtype": dtype}))
        if name in PRIMITIVES:
            return Operator(name, attrs=Attrs(dict(eqn.params)))
        if name in _ALONG_AXES and (axes := _positional(eqn)) is not None:
            return Operator(f"jax.{_ALONG_AXES[name]}", attrs=Attrs({"axes": axes}))
        if is_loop(eqn):
            op_type, attrs = read_loop(eqn, lambda body: self._block(body, place))
            return Operator(op_type, attrs=attrs)
        try:
            find_op(f"jax.{name}")
            return Operator(f"jax.{name}", attrs=jax_adapter.encode_params(eqn))
        except (ProgramError, TypeError) as error:
            if is_refused(name):
                raise not_data(name, source, error) from error
        try:
            artifact, attrs = export_primitive(eqn)
        except Exception as error:
            raise not_data(name, source, error) from error
        return Operator("exported", Operands.of(self._constant(artifact)), attrs=attrs)

    def _block(self, closed: Jaxpr, place: _Place) -> BlockRef:
        outer = self.current
        block = _Open(len(self.blocks), outer.index)
        self.blocks.append(block)
        self.current = block
        jaxpr, _ = jax_adapter.open_jaxpr(closed)
        args = self._declare(jaxpr.invars, Source(scope=jax_adapter.clean_scope(place.stack)), "a")
        block.args = tuple(args)
        if place.around is not None:
            place = replace(place, call=_Call(jax_adapter.body_name(closed), place.around))
        block.results = tuple(self.read(closed, list(args), place))
        self.current = outer
        return BlockRef(block.index)

    def _declare(self, variables: Sequence[Any], source: Source, hint: str) -> list[str]:
        prefix = source.scope.rsplit("/", 1)[-1] or hint
        names = []
        for var in variables:
            self.count += 1
            name = unique(f"{_plain(prefix)}.{self.count}", self.taken)
            dtype = jax_adapter.dtype_text(var.aval.dtype)
            shape = jax_adapter.shape_text(var.aval.shape)
            self.current.variables[name] = Variable(name, dtype, shape)
            names.append(name)
        return names

    def _value(self, values: Mapping[Any, Operand], atom: Any) -> Operand:
        if not jax_adapter.is_literal(atom):
            return values[atom]
        if atom.aval.shape == ():
            return jax_adapter.literal_of(atom.val, atom.aval.dtype)
        return self._constant(atom.val)

    def _constant(self, value: Any) -> Operand:
        if jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key):
            return self._key_constant(value)
        array = np.asarray(value)
        if array.shape == ():
            return jax_adapter.literal_of(array, array.dtype)
        constant = make_constant(array)
        name = self.by_digest.get(constant.digest)
        if name is None:
            name = unique(f"const.{len(self.constants)}", self.taken)
            self.by_digest[constant.digest] = name
            dtype = jax_adapter.dtype_text(array.dtype)
            self.constants[name] = Variable(name, dtype, array.shape, Kind.CONST, constant)
        return name

    def _key_constant(self, key: Any) -> Operand:
        data = self._constant(jax.random.key_data(key))
        self.count += 1
        name = unique(f"key.{self.count}", self.taken)
        dtype = jax_adapter.dtype_text(key.dtype)
        self.current.variables[name] = Variable(name, dtype, key.shape)
        attrs = Attrs({"impl": str(jax.random.key_impl(key))})
        wrap = Operator("jax.random_wrap", Operands.of(data), Operands.of(name), attrs)
        self.current.ops.append(wrap)
        return name


# `vmap(axis_name=)` turns reductions over its axis into reductions over an array's axis.
_ALONG_AXES = {"psum": "reduce_sum", "pmax": "reduce_max", "pmin": "reduce_min"}


def _positional(eqn: Equation) -> tuple[int, ...] | None:
    """Returns the array axes of a reduction by name, or None for an axis of devices."""
    axes = eqn.params.get("axes", ())
    if eqn.params.get("axis_index_groups") is not None or len(eqn.invars) != 1:
        return None
    return tuple(axes) if all(isinstance(axis, int) for axis in axes) else None


def _source(eqn: Equation, place: _Place, stack: str) -> Source:
    scope = jax_adapter.clean_scope(stack)
    own = place.source or jax_adapter.source_of(eqn)
    if not own.file and place.around is not None:
        own = place.around
    callers = own.callers
    if place.call is not None and own is not place.source:
        callers = place.call.around(own)
    return Source(own.file, own.line, own.function, scope, callers=callers)


def _plain(prefix: str) -> str:
    kept = "".join(c if c.isalnum() or c == "_" else "_" for c in prefix)
    return kept if kept[:1].isalpha() else f"v{kept}"
