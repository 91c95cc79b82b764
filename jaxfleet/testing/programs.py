"""Hypothesis strategies for programs.

`programs` draws any program that can be built, valid or not, with odd names and values: for
properties of every program, such as the round trip through text. `valid_programs` draws programs
that the verifier accepts, for tests of passes.
"""

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st

from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    BlockRef,
    Constant,
    Kind,
    Literal,
    Operand,
    Operands,
    Operator,
    Program,
    Role,
    Size,
    Source,
    Struct,
    Variable,
    Word,
    letter,
    make_constant,
)
from jaxfleet.ir.dims import CALLS, call

T = TypeVar("T")

_PLAIN_NAMES = (
    *("x", "w", "h", "loss", "t0", "fc_0.w_0", "w@GRAD", "w@GRAD.block0.trainer_1", "a-b+c", "_"),
    *("params/Conv_0/kernel", "opt_state/0/mu/Dense_0/bias", "c0~1", "x$", "infer", "nan_count"),
    # Keywords of the grammar.
    *("program", "block", "data", "param", "state", "const", "temp", "in", "for", "forward"),
    *("backward", "optimize", "lr_sched", "rpc", "f32", "e5", "i", "_1"),
)
_ODD_NAMES = (
    *("true", "false", "none", "inf", "nan", "nan+1.0i", "inf+nani", "1x", "-1", "2.0:f32"),
    *("", " ", "a b", "a:b", "a,b", "a=b", "x(", ")", "[]", "{", "}", "#", "a # b", "->", "^1"),
    *('"', '""', "'", "\\", '\\"', "\n", "a\r\nb", "\t", "\x00", "\x85", "\u2028", "é", "aé", "½"),
    *("<b>", "key<fry>", "f32[b]", "@", "@c1", "forward|loss", "日本", "\ud800", "program p"),
)
_DTYPES = ("f32", "f32", "bf16", "i32", "bool", "key<fry>", "float0", "odd [", 'q"[b]', "nan", "")
_WORDS = ("f32", "nan", "key<fry>", "GatherScatterMode.CLIP", "a-b", "block", "i", "a@b/c")
_NUMBERS = (0, 1, -1, 2**70, 0.0, -0.0, 1.5, 1e-5, 1e300, float("inf"), float("-inf"))
_SHAPES: tuple[tuple[Size, ...], ...] = ((), (4,), (letter("b"), 4), (letter("b") * 2 + 1,))
_LITERALS = (Literal.of(2.0, "f32"), Literal.of(value=True, dtype="bool"))
_SOME_ATTRS = (
    Attrs(),
    Attrs({"axis": 0}),
    Attrs({"endpoint": "ps0:6174", "sync": True, "by": 0.5}),
    Attrs({"dimension_numbers": (((1,), (0,)), ((), ())), "shape": (letter("b"), 4)}),
)
_SOME_SOURCES = (Source(), Source("/home/me/train.py", 14, "train_step", "CNN/Conv_0", "dce"))


def names() -> st.SearchStrategy[str]:
    """Draws names, mostly plain, some that need quotes."""
    return _names()


def sizes() -> st.SearchStrategy[Size]:
    """Draws sizes: numbers, letters, and expressions of them."""
    return _sizes()


def attrs() -> st.SearchStrategy[Attrs]:
    """Draws attributes of every kind, up to three levels deep."""
    return _attrs(refs=True)


@st.composite
def programs(draw: st.DrawFn, *, max_ops: int = 4) -> Program:
    """Draws any program that can be built, valid or not.

    Args:
        draw: supplied by hypothesis.
        max_ops: the most operators in a block.
    """
    blocks = []
    for index in range(draw(st.sampled_from((1, 1, 2, 3)))):
        parent = draw(st.integers(-1, 2)) if index else -1
        blocks.append(draw(_any_block(index, parent, max_ops)))
    return Program(
        name=draw(_names()),
        variables={v.name: v for v in draw(_lists(_variables(), 4))},
        blocks=tuple(blocks),
        attrs=draw(_attrs(refs=True)) if draw(_rarely()) else Attrs(),
    )


def valid_programs(*, max_ops: int = 8) -> st.SearchStrategy[Program]:
    """Draws programs that the verifier accepts.

    Their operators have made-up types, so they cannot run; they read, write and update in place,
    and some have sub-blocks, functions and others.

    Args:
        max_ops: the most operators in a block.
    """
    # One draw of bytes, each a decision, is fifty times as fast as one draw per decision.
    choices = st.binary(min_size=8 * max_ops, max_size=24 * max_ops)
    return choices.map(lambda drawn: _ValidProgram(drawn, max_ops).program())


class _ValidProgram:
    """A valid program under construction; every decision takes one of the drawn bytes."""

    def __init__(self, drawn: bytes, max_ops: int) -> None:
        self.choices = iter(drawn)
        self.max_ops = max_ops
        self.blocks: list[Block] = []
        self.count = 0

    def number(self, below: int) -> int:
        """Returns a number less than `below`, 0 once all bytes are used."""
        return next(self.choices, 0) % below

    def one_of(self, items: Sequence[T]) -> T:
        return items[self.number(len(items))]

    def some_of(self, items: Sequence[T], most: int) -> list[T]:
        return [self.one_of(items) for _ in range(self.number(most + 1))]

    def program(self) -> Program:
        kinds = [Kind.DATA, Kind.PARAM, *self.some_of(list(Kind)[:4], 4)]
        variables = [self.variable(kind) for kind in kinds]
        writable = [v.name for v in variables if v.kind is not Kind.CONST]
        self.block(-1, known=[v.name for v in variables], writable=writable, depth=0)
        return Program("drawn", {v.name: v for v in variables}, tuple(self.blocks))

    def variable(self, kind: Kind) -> Variable:
        self.count += 1
        name = f"{kind.value}{self.count}"
        if kind is Kind.CONST:
            array = np.arange(1 + self.number(12), dtype=np.float32)
            return Variable(name, "f32", array.shape, kind, make_constant(array))
        return Variable(name, self.one_of(("f32", "i32")), self.one_of(_SHAPES), kind)

    def block(self, parent: int, *, known: list[str], writable: list[str], depth: int) -> int:
        """Adds a block with its content, and returns its index."""
        index = len(self.blocks)
        self.blocks.append(Block(index))  # reserves the index, since sub-blocks follow
        args = [self.variable(Kind.TEMP) for _ in range(self.number(3) if depth else 0)]
        own = list(args)
        ops = []
        for _ in range(self.number(self.max_ops + 1)):
            names = [v.name for v in own]
            op, made = self.operator(index, known + names, writable + names, depth)
            ops.append(op)
            own += made
        results = self.some_of(known + [v.name for v in own], 2) if args else ()
        declared = {v.name: v for v in own}
        arg_names = tuple(v.name for v in args)
        self.blocks[index] = Block(index, parent, declared, arg_names, tuple(ops), tuple(results))
        return index

    def operator(
        self, block: int, known: list[str], writable: list[str], depth: int
    ) -> tuple[Operator, list[Variable]]:
        inputs: list[Operand] = [*self.some_of(known, 3)]
        inputs += self.some_of(_LITERALS, 1)
        made = [self.variable(Kind.TEMP) for _ in range(self.number(3))]
        outputs = [v.name for v in made] + self.some_of(writable, 1)
        attrs = self.one_of(_SOME_ATTRS)
        if depth < 2 and not self.number(4):
            body = self.block(block, known=known, writable=writable, depth=depth + 1)
            attrs = attrs.updated(body=BlockRef(body))
        op = Operator(
            type=self.one_of(("add", "mul", "jax.sin", "c_allreduce_sum", "send")),
            inputs=self.in_slots(inputs),
            outputs=self.in_slots(outputs),
            attrs=attrs,
            role=self.one_of(list(Role)),
            role_var=tuple((name, "g") for name in self.some_of(known, 1)),
            source=self.one_of(_SOME_SOURCES),
        )
        return op, made

    def in_slots(self, operands: Sequence[Operand]) -> Operands:
        """Puts operands into one unnamed slot, one named, or one each."""
        flat = tuple(operands)
        each = [(f"S{place}", (operand,)) for place, operand in enumerate(flat)]
        return self.one_of((Operands.of(*flat), Operands([("X", flat)]), Operands(each)))


@cache
def _names() -> st.SearchStrategy[str]:
    plain, odd = st.sampled_from(_PLAIN_NAMES), st.sampled_from(_ODD_NAMES)
    return st.one_of(plain, plain, odd, st.text(max_size=4))


@cache
def _sizes() -> st.SearchStrategy[Size]:
    letters = st.sampled_from([letter(name) for name in ("b", "n", "max", "floordiv", "b_2")])
    simple = st.one_of(st.integers(-1, 1000), letters)
    return st.one_of(simple, simple, _computed(simple), _computed(_computed(simple)))


def _computed(parts: st.SearchStrategy[Size]) -> st.SearchStrategy[Size]:
    return st.builds(_compute, st.sampled_from(("+", "-", "*", *CALLS)), parts, parts)


def _compute(how: str, x: Size, y: Size) -> Size:
    if how == "+":
        return x + y
    if how == "-":
        return x - y
    if how == "*":
        return x * y
    divides = how in {"floordiv", "mod"}
    return call(how, x, abs(y) + 1 if divides and isinstance(y, int) else y)


@cache
def _literals() -> st.SearchStrategy[Literal]:
    numbers = st.one_of(
        st.booleans(), st.sampled_from(_NUMBERS), st.integers(), st.floats(), st.complex_numbers()
    )
    return st.builds(Literal.of, numbers, st.sampled_from(_DTYPES))


@cache
def _attrs(*, refs: bool) -> st.SearchStrategy[Attrs]:
    leaves: list[st.SearchStrategy[Attr]] = [
        st.sampled_from((None, True, False)),
        st.sampled_from(_NUMBERS),
        st.integers(),
        st.floats(),
        _names(),
        st.sampled_from(_WORDS).map(Word),
        _sizes(),
        _literals(),
    ]
    if refs:
        leaves.append(st.integers(0, 3).map(BlockRef))
    values: st.SearchStrategy[Attr] = st.one_of(leaves)
    for _ in range(2):
        fields = st.dictionaries(_names(), values, max_size=2).map(Attrs)
        tuples = _lists(values, 3).map(tuple)
        values = st.one_of(*leaves, tuples, st.builds(Struct, _names(), fields))
    return st.dictionaries(_names(), values, max_size=3).map(Attrs)


@cache
def _variables() -> st.SearchStrategy[Variable]:
    return st.builds(
        Variable,
        name=_names(),
        dtype=st.sampled_from(_DTYPES),
        shape=_lists(_sizes(), 2).map(tuple),
        kind=st.sampled_from(Kind),
        constant=st.one_of(st.none(), st.none(), _names().map(Constant)),
    )


@cache
def _sources() -> st.SearchStrategy[Source]:
    text = st.one_of(st.just(""), _names())
    line = st.integers(0, 99)
    return st.builds(Source, file=text, line=line, function=text, scope=text, made_by=text)


@cache
def _any_block(index: int, parent: int, max_ops: int) -> st.SearchStrategy[Block]:
    function = st.sampled_from((False, False, True))
    return st.builds(
        _block_of,
        st.just((index, parent)),
        _lists(_variables(), 5),
        function.flatmap(lambda some: _lists(_names(), 2 if some else 0)),
        _lists(_any_operators(), max_ops),
        function.flatmap(lambda some: _lists(_operands(), 2 if some else 0)),
    )


def _block_of(
    place: tuple[int, int],
    variables: list[Variable],
    args: list[str],
    ops: list[Operator],
    results: list[Operand],
) -> Block:
    declared = {v.name: v for v in variables}
    return Block(*place, declared, tuple(args), tuple(ops), tuple(results))


@cache
def _operands() -> st.SearchStrategy[Operand]:
    return st.one_of(_names(), _names(), _names(), _literals())


@cache
def _any_operators() -> st.SearchStrategy[Operator]:
    slots = st.tuples(st.one_of(st.just(""), _names()), _lists(_operands(), 3).map(tuple))
    operands = _lists(slots, 2).map(Operands)
    return st.builds(
        Operator,
        type=_names(),
        inputs=operands,
        outputs=operands,
        attrs=st.one_of(st.just(Attrs()), _attrs(refs=True)),
        role=st.sampled_from(Role),
        role_var=st.one_of(st.just(()), _lists(st.tuples(_names(), _names()), 2).map(tuple)),
        source=st.one_of(st.just(Source()), _sources()),
    )


def _rarely() -> st.SearchStrategy[bool]:
    return st.sampled_from((False, False, True))


def _lists(elements: st.SearchStrategy[T], most: int) -> st.SearchStrategy[list[T]]:
    return st.lists(elements, max_size=most)
