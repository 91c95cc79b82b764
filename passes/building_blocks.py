"""Building blocks of passes: counters, conditions, branches, extra state, copies of operators."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    BlockRef,
    Kind,
    Literal,
    Operand,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
    Word,
)
from jaxfleet.ir.inline import with_block_numbers


def update_op(
    op_type: str, inputs: Sequence[Operand], outputs: Sequence[str], **attrs: Attr
) -> Operator:
    """Returns an operator with the optimize role."""
    return Operator(
        op_type, Operands.of(*inputs), Operands.of(*outputs), Attrs(attrs), Role.OPTIMIZE
    )


def op_like(
    near: Operator, op_type: str, reads: Sequence[Operand], output: str, **attrs: Attr
) -> Operator:
    """Returns an operator with the role and the source line of another."""
    ins, outs = Operands.of(*reads), Operands.of(output)
    return Operator(op_type, ins, outs, Attrs(attrs), near.role, source=near.source)


def conversion(read: str, made: str, dtype: str) -> Operator:
    """Returns the operator that converts a number to another dtype."""
    attrs: dict[str, Attr] = {"new_dtype": Word(dtype), "weak_type": False}
    return update_op("jax.convert_element_type", (read,), (made,), **attrs)


def literal(value: float, dtype: str = "f32") -> Literal:
    """Returns a number as an operand."""
    return Literal(repr(float(value)) if dtype.startswith("f") else str(int(value)), dtype)


def conditional(index: str, names: Sequence[str], blocks: tuple[int, int]) -> Operator:
    """Returns the operator that runs one of two blocks on `names`, the second if `index` is 1."""
    return update_op("jax.cond", (index, *names), names, branches=tuple(map(BlockRef, blocks)))


def identity_block(given: Iterable[tuple[str, Variable]], *, index: int = 1) -> Block:
    """Returns the identity branch, from the argument names, each with a variable of its type."""
    declared = [Variable(f"{name}@KEPT", like.dtype, like.shape) for name, like in given]
    args = tuple(variable.name for variable in declared)
    return Block(index, 0, {variable.name: variable for variable in declared}, args, (), args)


def periodic_condition(
    count: str, every: Operand, name: str
) -> tuple[list[Operator], list[Variable], str]:
    """Returns operators, temporaries and an i32 that is 1 in every `every`-th step.

    The count, a state variable i32[], restarts when it is due. The temporaries' names begin with
    `name`.
    """
    more, due, index = f"{name}.more", f"{name}.due", f"{name}.index"
    ops = [
        update_op("jax.add", (count, literal(1, "i32")), (more,)),
        update_op("jax.ge", (more, every), (due,)),
        conversion(due, index, "i32"),
        update_op("jax.select_n", (due, more, literal(0, "i32")), (count,)),
    ]
    declared = [Variable(more, "i32", ()), Variable(due, "bool", ()), Variable(index, "i32", ())]
    return ops, declared, index


def with_extra_variables(
    program: Program, kept: Iterable[tuple[Variable, str | int | float]], **attrs: tuple[str, ...]
) -> Program:
    """Returns a program with more variables that a step keeps beside its state.

    The initial value of each is a number, or a variable of the state. `attrs` are names to append
    to attributes that are lists of names, such as `sums`.
    """
    kept = list(kept)
    variables = {**program.variables, **{variable.name: variable for variable, _ in kept}}
    pairs = tuple((variable.name, begin) for variable, begin in kept)
    more: dict[str, Attr] = {
        name: (*_listed(program, name), *names) for name, names in attrs.items() if names
    }
    said = program.attrs.updated(beside=(*_listed(program, "beside"), *pairs), **more)
    return replace(program, variables=variables, attrs=said)


def _listed(program: Program, attr: str) -> tuple[Attr, ...]:
    found = program.attrs.get(attr, ())
    assert isinstance(found, tuple)
    return found


def check_gradients_are_known(program: Program, pass_name: str) -> None:
    """Raises a PassError if a parameter is updated inside a loop or a branch of its own.

    A frozen parameter, whose new value does not depend on a gradient, is accepted.
    """
    trained = {param for x in program.root.ops for param, _ in x.role_var}
    for param in program.of_kind(Kind.PARAM):
        op = None if param.name in trained else _with_blocks(program, param.name)
        if op is not None:
            what = f"{pass_name}: the update of '{param.name}' runs inside a loop or a branch"
            raise PassError(what, op=op, hint="update once a step, outside of it, or leave it out")


def _with_blocks(program: Program, name: str) -> Operator | None:
    """Returns the last loop or branch that computes the new value of `name`, if any.

    If an operator inside of it writes `name` itself, returns that operator. Operators of block 0
    that compute gradients of other parameters are not followed.
    """
    inner = (op for block in program.blocks[1:] for op in block.ops if name in op.writes)
    if (found := next(inner, None)) is not None:
        return found
    needed = {name}
    for op in reversed(program.root.ops):
        if needed.isdisjoint(op.writes) or op.role_var:
            continue
        if op.blocks:
            return op
        needed.update(op.reads)
    return None


@dataclass
class OperatorCopies:
    """Copies operators of a program; the copied sub-blocks are to be appended to its own."""

    program: Program
    blocks: list[Block] = field(default_factory=list)

    def of(self, op: Operator, names: Mapping[str, str], parent: int = 0) -> Operator:
        """Returns a copy of an operator in block `parent`, with variables renamed by `names`."""
        moved = {index: self._block(index, names, parent) for index in op.blocks}
        copied = with_block_numbers(op, moved.__getitem__)
        inputs, outputs = op.inputs.renamed(names), op.outputs.renamed(names)
        return replace(copied, inputs=inputs, outputs=outputs)

    def _block(self, index: int, names: Mapping[str, str], parent: int) -> int:
        block = self.program.blocks[index]
        place, number = len(self.blocks), len(self.program.blocks) + len(self.blocks)
        self.blocks.append(block)
        outer = {old: new for old, new in names.items() if old not in block.variables}
        ops = tuple(self.of(op, outer, number) for op in block.ops)
        results = tuple(outer.get(x, x) if isinstance(x, str) else x for x in block.results)
        self.blocks[place] = replace(block, index=number, parent=parent, ops=ops, results=results)
        return number
