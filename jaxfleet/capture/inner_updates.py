"""Parameter updates inside loops and branches.

A gradient inside a loop is not a value of the step, so it has no name there. Capture finds the
state leaves that the optimizer trains, and the operators of the step that update them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxfleet.capture.draft import MARK, Draft
from jaxfleet.capture.gradient_marker import GRADIENT, PARAMETER, Mark, read_mark
from jaxfleet.capture.gradients import matching_leaves
from jaxfleet.errors import CaptureError
from jaxfleet.ir import Block, Operand, Operator, Variable

_COPIES = frozenset({MARK, "jax.convert_element_type", "jax.copy"})


@dataclass(frozen=True)
class InnerUpdates:
    """Updates inside loops and branches.

    Attributes:
        draft: the step, without markers in sub-blocks.
        params: the state leaves that they train.
        results: outputs of the operators of block 0 that contain an update.
    """

    draft: Draft
    params: frozenset[str]
    results: frozenset[str]


def take_inner_updates(
    draft: Draft, *, state: Sequence[str], types: Mapping[str, Variable]
) -> InnerUpdates:
    """Finds the updates in sub-blocks of a marked step, and removes their markers."""
    marked = [block.index for block in draft.blocks[1:] if any(map(_is_mark, block.ops))]
    if not marked:
        return InnerUpdates(draft, frozenset(), frozenset())
    search = _Search(draft, state, types)
    params = frozenset(name for index in marked for name in search.params_of(index))
    around = set(marked)
    for block in reversed(draft.blocks[1:]):  # a block comes after the enclosing one
        if block.index in around:
            around.add(block.parent)
    updating = [op for op in draft.blocks[0].ops if around.intersection(op.blocks)]
    results = frozenset(name for op in updating for name in op.writes)
    blocks = [draft.blocks[0], *(_without_marks(block) for block in draft.blocks[1:])]
    return InnerUpdates(replace(draft, blocks=blocks), params, results)


class _Search:
    """Follows values of sub-blocks out to the state."""

    def __init__(self, draft: Draft, state: Sequence[str], types: Mapping[str, Variable]) -> None:
        self.blocks, self.state, self.types = draft.blocks, state, types
        self.users = {index: (block, op) for block in draft.blocks for op in block.ops
                      for index in op.blocks}  # fmt: skip

    def params_of(self, index: int) -> set[str]:
        block = self.blocks[index]
        marks = [(_mark_of(op), op) for op in block.ops if _is_mark(op)]
        found: dict[tuple[int, int], str] = {}
        for mark, op in marks:
            if mark.kind == PARAMETER and (leaf := self._origin(block, op.inputs[0])) is not None:
                found[mark.optimizer, mark.leaf] = leaf
        for mark, op in marks:
            if mark.kind == GRADIENT and (mark.optimizer, mark.leaf) not in found:
                found[mark.optimizer, mark.leaf] = self._like(block, mark, op)
        return set(found.values())

    def _origin(self, block: Block, operand: Operand) -> str | None:
        """Returns the state leaf that a value is, or was in the first iteration of a loop."""
        makers = {name: op for op in block.ops for name in op.writes}
        while isinstance(operand, str) and (op := makers.get(operand)) is not None:
            if op.type not in _COPIES:
                return None
            operand = op.inputs[0]
        if not isinstance(operand, str):
            return None
        if block.index == 0:
            return operand if operand in self.state else None
        if operand not in block.args:
            return self._origin(self.blocks[block.parent], operand)
        outer, user = self.users[block.index]
        return self._origin(outer, _given(user, block)[block.args.index(operand)])

    def _like(self, block: Block, mark: Mark, op: Operator) -> str:
        """Returns the leaf of a gradient's path and shape, if it came without parameters."""
        shape = block.variables[op.writes[0]].shape
        leaves = matching_leaves(mark.path, shape, self.state, self.types)
        if len(leaves) == 1:
            return leaves[0]
        what = f"the gradient '{mark.path}' inside a loop or a branch may belong to "
        what += f"any of {', '.join(leaves)}" if leaves else "no leaf of the state"
        hint = "pass the parameters too: tx.update(gradients, optimizer_state, params)"
        raise CaptureError(what, source=op.source, hint=hint)


def _given(op: Operator, block: Block) -> Sequence[Operand]:
    """Returns the initial operands of the arguments of an operator's block."""
    operands = tuple(op.inputs)
    match op.type:
        case "jax.cond":
            return operands[1:]
        case "jax.while":
            of_cond, of_body = op.attrs["cond_nconsts"], op.attrs["body_nconsts"]
            assert isinstance(of_cond, int)
            assert isinstance(of_body, int)
            carried = operands[of_cond + of_body :]
            is_body = op.attrs["body"] == _ref(op, block)
            consts = operands[of_cond : of_cond + of_body] if is_body else operands[:of_cond]
            return (*consts, *carried)
    return operands  # a scan's constants, carry and rows; inputs of a recomputation


def _ref(op: Operator, block: Block) -> object:
    return next(x for x in op.attrs.values() if getattr(x, "index", None) == block.index)


def _without_marks(block: Block) -> Block:
    names: dict[str, Operand] = {}
    ops: list[Operator] = []
    for op in block.ops:
        inputs = op.inputs.renamed(names)
        if _is_mark(op):
            names[op.writes[0]] = inputs[0]
        else:
            ops.append(replace(op, inputs=inputs))
    results = tuple(names.get(x, x) if isinstance(x, str) else x for x in block.results)
    return replace(block, ops=tuple(ops), results=results).without_unused()


def _is_mark(op: Operator) -> bool:
    return op.type == MARK


def _mark_of(op: Operator) -> Mark:
    mark = read_mark(op.attrs["mark"])
    assert mark is not None
    return mark
