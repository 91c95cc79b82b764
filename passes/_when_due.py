"""What passes share that do something only when its time has come: a count, a test, a branch."""

from collections.abc import Sequence
from dataclasses import replace

from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    BlockRef,
    Literal,
    Operand,
    Operands,
    Operator,
    Program,
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


def with_branch(
    program: Program, index: str, names: Sequence[str], body: Block
) -> tuple[Program, Operator]:
    """Returns a program with two blocks more, and the operator that runs one of them.

    Args:
        program: it.
        index: an i32: where it is 0, nothing changes; where it is 1, `body` runs.
        names: what the operator reads, and writes anew.
        body: takes values of `names`, and returns their new ones.
    """
    at = len(program.blocks)
    args = tuple(f"{name}@KEPT" for name in names)
    declared = {
        arg: Variable(arg, program.lookup(name).dtype, program.lookup(name).shape)
        for arg, name in zip(args, names, strict=True)
    }
    kept = Block(at, 0, declared, args, (), args)
    made = replace(body, index=at + 1, parent=0)
    grown = replace(program, blocks=(*program.blocks, kept, made))
    branches = (BlockRef(at), BlockRef(at + 1))
    return grown, op("jax.cond", (index, *names), names, branches=branches)


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
