"""What passes share that do something only when its time has come: a count, a test, a branch."""

from collections.abc import Iterable, Sequence

from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    BlockRef,
    Literal,
    Operand,
    Operands,
    Operator,
    Role,
    Variable,
    Word,
)


def op(op_type: str, inputs: Sequence[Operand], outputs: Sequence[str], **attrs: Attr) -> Operator:
    """Returns an operator of the update."""
    return Operator(
        op_type, Operands.of(*inputs), Operands.of(*outputs), Attrs(attrs), Role.OPTIMIZE
    )


def number(value: float, dtype: str = "f32") -> Literal:
    """Returns a number as operators read it."""
    return Literal(repr(float(value)) if dtype.startswith("f") else str(int(value)), dtype)


def branch(index: str, names: Sequence[str], blocks: tuple[int, int]) -> Operator:
    """Returns the operator that runs one of two blocks.

    Args:
        index: an i32: where it is 0, the first runs; where it is 1, the second.
        names: what it reads, and writes anew.
        blocks: the two.
    """
    return op("jax.cond", (index, *names), names, branches=tuple(map(BlockRef, blocks)))


def unchanged(given: Iterable[tuple[str, Variable]], *, index: int = 1) -> Block:
    """Returns the block in which nothing changes.

    Args:
        given: the variables, each with one that is like it.
        index: its place.
    """
    declared = [Variable(f"{name}@KEPT", like.dtype, like.shape) for name, like in given]
    args = tuple(variable.name for variable in declared)
    return Block(index, 0, {variable.name: variable for variable in declared}, args, (), args)


def due_every(count: str, every: Operand, name: str) -> tuple[list[Operator], list[Variable], str]:
    """Returns what counts a step and says whether it is due: operators, temporaries, an i32.

    The count begins anew when it is due.

    Args:
        count: a state variable, i32[].
        every: after how many steps it is due.
        name: what the temporaries' names begin with.
    """
    more, due, index = f"{name}.more", f"{name}.due", f"{name}.index"
    ops = [
        op("jax.add", (count, number(1, "i32")), (more,)),
        op("jax.ge", (more, every), (due,)),
        op("jax.convert_element_type", (due,), (index,), new_dtype=Word("i32"), weak_type=False),
        op("jax.select_n", (due, more, number(0, "i32")), (count,)),
    ]
    declared = [Variable(more, "i32", ()), Variable(due, "bool", ()), Variable(index, "i32", ())]
    return ops, declared, index
