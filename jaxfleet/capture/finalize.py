"""Final form of a draft: markers removed, gradients named, state updated in place."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxfleet.capture.draft import Draft
from jaxfleet.capture.gradients import find_gradients, name_gradients, take_inner_updates
from jaxfleet.capture.primitives import NOT_WRAPPED
from jaxfleet.capture.roles import ancestors_of, assign_roles, unmarked
from jaxfleet.errors import CaptureError
from jaxfleet.ir import Attrs, Kind, Operand, Operands, Operator, Program, Role, Variable
from jaxfleet.ir.naming import unique


@dataclass(frozen=True)
class Interface:
    """Inputs and outputs of a step."""

    state: Sequence[Variable]  # variables of the state, in the order of its leaves
    data: Sequence[Variable]  # variables of the batch, in the order of its leaves
    new_state: Sequence[Operand]  # new value of each state leaf
    metrics: Sequence[tuple[str, Operand]]  # name and value of each metric


def finalize(draft: Draft, interface: Interface, *, name: str, attrs: Attrs) -> Program:
    """Returns the program of a drafted step."""
    types = {v.name: v for v in (*interface.state, *interface.data, *draft.constants.values())}
    types |= draft.blocks[0].variables
    state_names = [variable.name for variable in interface.state]
    inner = take_inner_updates(draft, state=state_names, types=types)
    draft, root = inner.draft, inner.draft.blocks[0]
    gradients = find_gradients(root.ops, state=state_names, types=types)
    params = {gradient.param for gradient in gradients} | inner.params
    _check_all_marked(draft, types, interface, params, inner.results)
    metrics = [value for _, value in interface.metrics if isinstance(value, str)]
    ops = assign_roles(
        root.ops,
        types=types,
        data=[v.name for v in interface.data],
        returned=metrics,
        updated=inner.results,
    )
    ops, renames = name_gradients(ops, gradients, taken=types)
    step = _Step(ops, {**types}, renames)
    late = step.update_in_place(interface)
    step.name_metrics(interface.metrics)
    step.assign_late(late)
    step.fetch(interface.metrics)
    declared = {v.name: v for v in (*interface.data, *interface.state, *draft.constants.values())}
    declared |= {
        name: replace(types[name], kind=Kind.PARAM) for name in state_names if name in params
    }
    temporaries = {n: v for n, v in step.types.items() if n not in declared}
    block = replace(root, ops=tuple(step.ops), variables=temporaries).without_unused()
    return Program(name, declared, (block, *draft.blocks[1:]), attrs)


def _check_all_marked(
    draft: Draft,
    types: Mapping[str, Variable],
    interface: Interface,
    params: set[str],
    updated: Collection[str],
) -> None:
    """Rejects a leaf that a loss depends on, and that unmarked gradients update.

    The gradients of a loss that is linear in a leaf do not read it. Leaves that no loss depends on
    are statistics of gradients, or an optimizer's.
    """
    ops = draft.blocks[0].ops
    reached = unmarked(ops, types, updated)
    gradients = [name for op in ops if op.role is Role.BACKWARD for name in op.writes]
    read = ancestors_of(ops, gradients) | draft.differentiated
    updates = {name: op for op in ops for name in op.writes}
    for variable, value in zip(interface.state, interface.new_state, strict=True):
        if not isinstance(value, str) or value not in reached:
            continue
        if variable.name in params or variable.name not in read:
            continue
        if params:
            what = f"the gradient of '{variable.name}' does not pass through distributed_optimizer"
            hint = (
                "wrap the outermost optimizer, so that it sees every gradient: "
                "jf.distributed_optimizer(optax.masked(...)), not the other way round; where one "
                "optimizer's update is differentiated for another, wrap both; where the step has "
                "a rule of its own in place of an optimizer, hand the rule what "
                "jf.distributed_optimizer(optax.identity()).update(grads, opt, params) returns"
            )
        else:
            what = f"'{variable.name}' is trained, but {NOT_WRAPPED}"
            hint = "write tx = jf.distributed_optimizer(optax.adam(1e-3)) where you make it"
        raise CaptureError(what, source=updates[value].source, hint=hint)


class _Step:
    """Renames the outputs of block 0's operators to their final names."""

    def __init__(
        self, ops: Sequence[Operator], types: dict[str, Variable], renames: Mapping[str, Operand]
    ) -> None:
        self.types = types
        self.renames = {old: _resolve(old, renames) for old in renames}
        for old, new in self.renames.items():
            if isinstance(new, str) and new not in types:
                types[new] = replace(types[old], name=new)
        self.ops = [_renamed(op, self.renames) for op in ops]

    def update_in_place(self, interface: Interface) -> list[tuple[str, Operand]]:
        """Writes new state in place where the old value is not read afterwards.

        Returns the other updates, for `assign_late`.
        """
        updates = [
            (variable.name, self._final(value))
            for variable, value in zip(interface.state, interface.new_state, strict=True)
        ]
        updates = [(name, value) for name, value in updates if name != value]
        last_read, producer = self._places()
        for _, value in (*updates, *interface.metrics):
            if isinstance(value, str) and value not in producer:
                last_read[value] = len(self.ops)  # an input that is returned unchanged
        in_place: dict[str, Operand] = {}
        late: list[tuple[str, Operand]] = []
        for name, value in updates:
            place = self._place_to_rename(value, producer, in_place)
            if place is not None and last_read.get(name, -1) <= place:
                in_place[str(value)] = name
            else:
                late.append((name, value))
        self._rename(in_place)
        return [(name, _renamed_operand(value, in_place)) for name, value in late]

    def name_metrics(self, metrics: Sequence[tuple[str, Operand]]) -> None:
        """Names the metrics, by a copy if a value already has another final name."""
        _, producer = self._places()
        claimed: dict[str, Operand] = {}
        copies: list[tuple[str, Operand]] = []
        for name, operand in metrics:
            value = self._final(operand)
            if self._place_to_rename(value, producer, claimed) is not None:
                claimed[str(value)] = name
                self.types[name] = replace(self.types[str(value)], name=name)
            else:
                copies.append((name, value))
        self._rename(claimed)
        for name, value in copies:
            self._assign(name, _renamed_operand(value, claimed), Role.FORWARD)

    def assign_late(self, updates: Sequence[tuple[str, Operand]]) -> None:
        """Assigns the updates that cannot be in place; a swap goes through copies."""
        targets = {name for name, _ in updates}
        copies: dict[str, Operand] = {}
        values = [(name, self._final(value)) for name, value in updates]
        for _, value in values:
            if isinstance(value, str) and value in targets and value not in copies:
                copy = unique(f"{value}.old", self.types)
                self._assign(copy, value, Role.OPTIMIZE)
                copies[value] = copy
        for name, value in values:
            self._assign(name, _renamed_operand(value, copies), Role.OPTIMIZE)

    def fetch(self, metrics: Sequence[tuple[str, Operand]]) -> None:
        if metrics:
            role = self.ops[-1].role if self.ops else Role.FORWARD
            names = Operands.of(*(name for name, _ in metrics))
            self.ops.append(Operator("fetch", names, role=role))

    def _place_to_rename(
        self, value: Operand, producer: Mapping[str, int], claimed: Mapping[str, Operand]
    ) -> int | None:
        """Returns the position of a renamable temporary's operator, else None."""
        if not isinstance(value, str) or value in claimed:
            return None
        place = producer.get(value)
        if place is None or self.types[value].kind is not Kind.TEMP:
            return None
        is_gradient = any(value == gradient for _, gradient in self.ops[place].role_var)
        return None if is_gradient else place

    def _final(self, operand: Operand) -> Operand:
        return self.renames.get(operand, operand) if isinstance(operand, str) else operand

    def _places(self) -> tuple[dict[str, int], dict[str, int]]:
        last_read: dict[str, int] = {}
        producer: dict[str, int] = {}
        for place, op in enumerate(self.ops):
            last_read.update(dict.fromkeys(op.reads, place))
            producer.update(dict.fromkeys(op.writes, place))
        return last_read, producer

    def _rename(self, names: Mapping[str, Operand]) -> None:
        if names:
            self.ops = [_renamed(op, names) for op in self.ops]
            self.renames = {
                old: _renamed_operand(new, names) for old, new in self.renames.items()
            } | dict(names)

    def _assign(self, name: str, value: Operand, role: Role) -> None:
        if name not in self.types:
            known = self.types[value] if isinstance(value, str) else None
            dtype = known.dtype if known else value.dtype  # type: ignore[union-attr]
            self.types[name] = Variable(name, dtype, known.shape if known else ())
        self.ops.append(Operator("assign", Operands.of(value), Operands.of(name), role=role))


def _resolve(name: str, renames: Mapping[str, Operand]) -> Operand:
    seen: Operand = name
    while isinstance(seen, str) and seen in renames and renames[seen] != seen:
        seen = renames[seen]
    return seen


def _renamed_operand(operand: Operand, names: Mapping[str, Operand]) -> Operand:
    return names.get(operand, operand) if isinstance(operand, str) else operand


def _renamed(op: Operator, names: Mapping[str, Operand]) -> Operator:
    inputs, outputs = op.inputs.renamed(names), op.outputs.renamed(names)
    if inputs is op.inputs and outputs is op.outputs:
        return op
    return replace(op, inputs=inputs, outputs=outputs)
