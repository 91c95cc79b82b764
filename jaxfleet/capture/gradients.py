"""Parameters of marked gradients, and the gradients' names after them.

A gradient inside a loop or a branch is not a value of the step, so it has no name there. For those
capture finds the state leaves that the optimizer trains, and the operators that update them.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxfleet.capture.draft import MARK, Draft
from jaxfleet.capture.gradient_marker import GRADIENT, PARAMETER, Mark, read_mark
from jaxfleet.capture.roles import ancestors_of
from jaxfleet.errors import CaptureError
from jaxfleet.ir import Attrs, Block, Operand, Operator, Role, Size, Variable
from jaxfleet.ir.naming import grad_name, unique

_COPIES = frozenset({MARK, "jax.convert_element_type", "jax.copy"})


@dataclass(frozen=True)
class Gradient:
    """A marked gradient."""

    param: str  # state variable of which it is the gradient
    raw: Operand  # the value before the marker
    marked: str  # the value after it


def find_gradients(
    ops: Sequence[Operator], *, state: Sequence[str], types: Mapping[str, Variable]
) -> list[Gradient]:
    """Returns the marked gradients with their parameters, in the order of their markers.

    A parameter passed to `update` with its gradient is followed back to the state; without
    parameters, they are the part of the state that has the gradients' paths and shapes and that the
    gradients depend on.

    Raises:
        CaptureError: a gradient's parameter is ambiguous.
    """
    finder = _Finder(ops, state, types)
    found = []
    for op in ops:
        mark = _mark_of(op)
        if mark is not None and mark.kind == PARAMETER:
            finder.params[mark.optimizer, mark.leaf] = op.inputs[0]
        elif mark is not None and mark.kind == GRADIENT:
            found.append(Gradient(finder.param_of(mark, op), op.inputs[0], op.writes[0]))
    return found


def name_gradients(
    ops: Sequence[Operator], gradients: Sequence[Gradient], *, taken: Iterable[str]
) -> tuple[list[Operator], dict[str, Operand]]:
    """Removes the markers, and names each gradient at the operator that produces it.

    Returns the operators, and the replacement of every name that was removed or changed.
    """
    by_mark = {gradient.marked: gradient for gradient in gradients}
    written = {name for op in ops if op.type != MARK for name in op.writes}
    in_use = set(taken)
    renames: dict[str, Operand] = {}
    pairs: dict[str, tuple[str, str]] = {}  # the raw value -> (parameter, name)
    kept: list[Operator] = []
    for op in ops:
        if op.type != MARK:
            kept.append(op)
        elif (gradient := by_mark.get(op.writes[0])) is None:
            renames[op.writes[0]] = op.inputs[0]
        else:
            name = unique(grad_name(gradient.param), in_use)
            in_use.add(name)
            renames[gradient.marked] = name
            pair, raw = (gradient.param, name), gradient.raw
            if isinstance(raw, str) and raw in written and raw not in pairs:
                renames[raw] = name
                pairs[raw] = pair
            else:  # the value is an input, or the gradient of another parameter too
                kept.append(_copy(op, pair))
    return [_with_pairs(op, pairs) for op in kept], renames


def matching_leaves(
    path: str, shape: tuple[Size, ...], state: Iterable[str], types: Mapping[str, Variable]
) -> list[str]:
    """Returns the state leaves that a gradient may belong to, by its path and shape."""
    alike = [name for name in state if types[name].shape == shape]
    return [name for name in alike if _ends_with(name, path)]


def _copy(op: Operator, pair: tuple[str, str]) -> Operator:
    return replace(op, type="assign", attrs=Attrs(), role=Role.BACKWARD, role_var=(pair,))


def _with_pairs(op: Operator, pairs: Mapping[str, tuple[str, str]]) -> Operator:
    found = tuple(pairs[name] for name in op.writes if name in pairs)
    return replace(op, role_var=found) if found else op


class _Finder:
    """Finds parameters by the markers, in the order of the step."""

    def __init__(
        self, ops: Sequence[Operator], state: Sequence[str], types: Mapping[str, Variable]
    ) -> None:
        self.ops = ops
        self.state = state
        self.types = types
        self.params: dict[tuple[int, int], Operand] = {}  # (optimizer, leaf) -> the last given
        self.found: dict[tuple[int, int], str] = {}  # cache for parameters that are updated again
        self.by_last_part: dict[str, list[str]] = defaultdict(list)
        for name in state:
            self.by_last_part[_last_part(name)].append(name)
        self.producers = {name: op for op in ops for name in op.writes}

    @functools.cached_property
    def used_by_some_gradient(self) -> set[str]:
        gradients = [name for op in self.ops if _is_gradient(op) for name in op.reads]
        return ancestors_of(self.ops, gradients)

    def param_of(self, mark: Mark, op: Operator) -> str:
        key = (mark.optimizer, mark.leaf)
        if key not in self.found:
            self.found[key] = self._find(mark, op, self.params.get(key))
        return self.found[key]

    def _find(self, mark: Mark, op: Operator, given: Operand | None) -> str:
        origin = self._origin(given) if given is not None else None
        matches = [origin] if origin is not None else self._matches(mark, op)
        if len(matches) == 1:
            return matches[0]
        gradient = f"the gradient '{mark.path}'" if mark.path else "the gradient"
        gradient = f"{gradient}, {self.types[op.writes[0]].type},"
        if matches:
            what = f"{gradient} may belong to any of {', '.join(matches)}"
            hint = "pass the parameters too: tx.update(gradients, optimizer_state, params)"
        elif given is not None:
            what = f"{gradient} comes with a parameter that is not a leaf of the state"
            hint = "take the parameters from the state, not from outside of the step"
        else:
            what = f"{gradient} fits no leaf of the state"
            hint = "keep the parameters in the state, and pass them too: tx.update(..., params)"
        raise CaptureError(what, source=op.source, hint=hint)

    def _matches(self, mark: Mark, op: Operator) -> list[str]:
        """Returns the leaves of its path and shape, narrowed to its dependencies if possible."""
        shape = self.types[op.writes[0]].shape
        near = self.by_last_part[_last_part(mark.path)] if mark.path else self.state
        alike = matching_leaves(mark.path, shape, near, self.types)
        used = [name for name in alike if name in self.used_by_some_gradient]
        if len(used) < 2:
            return used or alike
        needed = ancestors_of(self.ops, op.reads)  # takes a walk over the step for each gradient
        found = [name for name in used if name in needed]
        return self._added_to(op.writes[0], found) if len(found) > 1 else found

    def _added_to(self, marked: str, leaves: list[str]) -> list[str]:
        """Narrows leaves to those that a value derived from the gradient is added to, if any.

        This distinguishes an updated parameter from a target network with the same leaves.
        """
        reached, found = {marked}, set[str]()
        for op in self.ops:
            if reached.isdisjoint(op.reads):
                continue
            reached.update(op.writes)
            if op.type in {"jax.add", "jax.sub"}:
                found.update(leaf for leaf in map(self._origin, op.inputs) if leaf is not None)
        return [name for name in leaves if name in found] or leaves

    def _origin(self, operand: Operand) -> str | None:
        """Follows a value back through copies and casts to its state leaf."""
        known = set(self.state)
        while operand not in known:
            op = self.producers.get(operand) if isinstance(operand, str) else None
            if op is None or op.type not in {MARK, "jax.convert_element_type", "jax.copy"}:
                return None
            operand = op.inputs[0]
        return str(operand)


def _mark_of(op: Operator) -> Mark | None:
    return read_mark(op.attrs["mark"]) if op.type == MARK else None


def _is_gradient(op: Operator) -> bool:
    mark = _mark_of(op)
    return mark is not None and mark.kind == GRADIENT


def _last_part(path: str) -> str:
    return path.rpartition("/")[2]


def _ends_with(name: str, path: str) -> bool:
    return not path or name == path or name.endswith(f"/{path}")


@dataclass(frozen=True)
class InnerUpdates:
    """Updates inside loops and branches."""

    draft: Draft  # the step, without markers in sub-blocks
    params: frozenset[str]  # the state leaves that they train
    results: frozenset[str]  # outputs of the operators of block 0 that contain an update


def take_inner_updates(
    draft: Draft, *, state: Sequence[str], types: Mapping[str, Variable]
) -> InnerUpdates:
    """Finds the updates in sub-blocks of a marked step, and removes their markers."""
    marked = [block.index for block in draft.blocks[1:] if any(op.type == MARK for op in block.ops)]
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
        marks = [(mark, op) for op in block.ops if (mark := _mark_of(op)) is not None]
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
        if op.type == MARK:
            names[op.writes[0]] = inputs[0]
        else:
            ops.append(replace(op, inputs=inputs))
    results = tuple(names.get(x, x) if isinstance(x, str) else x for x in block.results)
    return replace(block, ops=tuple(ops), results=results).without_unused()
