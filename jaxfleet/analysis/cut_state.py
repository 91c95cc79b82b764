"""Chooses what of an optimizer's state may be cut over the devices, each with its part.

A leaf may be that has the shape of a parameter, that only the update uses, and whose update the
labels keep apart row by row from the gradient on. It is found by trying: all such leaves are cut,
and those are taken back that some operator would need whole.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from jaxfleet.analysis.flow import Flow, Value
from jaxfleet.analysis.labels import Held, Label, Mesh, Plan, infer, sharded, summed
from jaxfleet.ir import Kind, Operator, Program, Role, Size, Variable

_UPDATE = frozenset({Role.OPTIMIZE, Role.OPTIMIZE_LR_SCHED, Role.LR_SCHED})


@dataclass(frozen=True)
class CutState:
    """What is cut.

    Attributes:
        held: how the state lies, and which gradients come in rows.
        plan: how the program runs so.
        whole: pairs of a leaf that every device has whole, and why.
    """

    held: Held
    plan: Plan
    whole: tuple[tuple[str, str], ...]


def cut_state(
    program: Program,
    mesh: Mesh,
    cut: Mapping[str, int],
    *,
    local: AbstractSet[tuple[int, int]] = frozenset(),
) -> CutState:
    """Returns what of a one-device program's state is cut over devices.

    Args:
        program: it.
        mesh: the devices.
        cut: the data that is cut, with the axes.
        local: operators whose sums over the batch each device keeps to itself, as for `infer`.
    """
    return _Choice(program, mesh, cut, local).run()


@dataclass
class _Choice:
    program: Program
    mesh: Mesh
    cut: Mapping[str, int]
    local: AbstractSet[tuple[int, int]]
    whole: dict[str, str] = field(default_factory=dict)

    @property
    def sums(self) -> Mapping[str, Label]:
        """The state that gradients are added up in, which is each device's own."""
        return summed(self.program).state

    def run(self) -> CutState:
        gradients = dict(self._gradients())
        leaves = dict(self._leaves())
        while True:
            state = {name: sharded(axis) for name, axis in leaves.items()}
            held = Held({**self.sums, **state}, gradients)
            plan = infer(
                self.program, self.mesh, sharded_inputs=self.cut, local=self.local, held=held
            )
            flow = Flow.of(self.program, inputs=leaves)
            final = plan.blocks[0].final
            bad = dict.fromkeys(self._idle(plan, flow, gradients, tuple(leaves)), "")
            bad |= {n: "its update is not made of rows" for n in leaves if final[n] != state[n]}
            bad |= dict(self._needed_whole(plan, flow, tuple(leaves)))
            if not bad.keys() & (leaves.keys() | gradients.keys()):
                return CutState(held, plan, tuple(self.whole.items()))
            self.whole |= {name: why for name, why in bad.items() if name in leaves}
            leaves = {n: axis for n, axis in leaves.items() if n not in bad}
            gradients = {n: axis for n, axis in gradients.items() if n not in bad}

    def _gradients(self) -> Iterator[tuple[str, int]]:
        for param, gradient in self._pairs():
            if (axis := self._axis(self.program.variables[param].shape)) is not None:
                yield gradient, axis

    def _leaves(self) -> Iterator[tuple[str, int]]:
        """Yields the leaves to try, with the axes, and notes why others are whole."""
        shapes = {self.program.variables[param].shape for param, _ in self._pairs()}
        written = {name for op in self._ops() if op.role in _UPDATE for name in op.writes}
        elsewhere = {
            x for op in self._ops() if op.role not in _UPDATE for x in (*op.reads, *op.writes)
        }  # one line reads better
        for variable in self.program.of_kind(Kind.STATE):
            name = variable.name
            if name not in written or not variable.shape or name in self.sums:
                continue
            axis = self._axis(variable.shape)
            why = self._why_whole(variable, axis, shapes, elsewhere)
            if why or axis is None:
                self.whole[variable.name] = why
            else:
                yield variable.name, axis

    def _why_whole(
        self, leaf: Variable, axis: int | None, shapes: set[tuple[Size, ...]], elsewhere: set[str]
    ) -> str:
        if leaf.name in elsewhere:
            return "more than the update uses it"
        if leaf.shape not in shapes:
            return "it has the shape of no parameter"
        return f"no axis divides by {self.mesh.devices}" if axis is None else ""

    def _axis(self, shape: tuple[Size, ...]) -> int | None:
        """Returns the first axis that the devices can share."""
        for axis, size in enumerate(shape):
            if isinstance(size, int) and size and size % self.mesh.devices == 0:
                return axis
        return None

    def _needed_whole(
        self, plan: Plan, flow: Flow, inputs: tuple[str, ...]
    ) -> Iterator[tuple[str, str]]:
        """Yields the leaves and gradients whose rows an operator of the update needs together."""
        for index, block in sorted(plan.blocks.items()):
            ops = self.program.blocks[index].ops
            for place, (op, found) in enumerate(zip(ops, block.ops, strict=True)):
                if op.role not in _UPDATE or op.type in {"fetch", "c_complete"}:
                    continue
                moved = [x for x, y in zip(found.labels, found.placing.inputs, strict=True)
                         if x.is_sharded and x != y]  # fmt: skip
                if moved:
                    value = Value(index, place, 0)
                    where = f"{op.type} needs it whole"
                    yield from ((n, where) for n in self._behind(value, plan, flow, inputs))

    def _behind(
        self, value: Value, plan: Plan, flow: Flow, inputs: tuple[str, ...]
    ) -> Iterator[str]:
        """Yields the leaves and gradients that an operator's rows are made of."""

        def is_rows(x: Value) -> bool:
            return x == value or _label(plan, x).is_sharded

        for x in flow.reaching([value], is_rows):
            if x.place < 0 and x.block == 0:
                yield inputs[x.output]
            elif (op := flow.op(x)) is not None and op.role_var:
                yield op.writes[x.output]

    def _idle(
        self, plan: Plan, flow: Flow, gradients: Mapping[str, int], inputs: tuple[str, ...]
    ) -> set[str]:
        """Returns the gradients whose rows reach no leaf that is cut: whole they cost the same."""
        final = {flow.final[name] for name in inputs if name in flow.final}
        idle = set[str]()
        for block, place, _ in plan.completions():
            op = self.program.blocks[block].ops[place]
            for count, name in enumerate(op.writes):
                if name in gradients:
                    start = Value(block, place, count)
                    reached = flow.reached([start], lambda x: _label(plan, x).is_sharded)
                    if final.isdisjoint(reached):
                        idle.add(name)
        return idle

    def _pairs(self) -> Iterator[tuple[str, str]]:
        for op in self._ops():
            yield from op.role_var

    def _ops(self) -> Iterator[Operator]:
        for block in self.program.blocks:
            yield from block.ops


def _label(plan: Plan, value: Value) -> Label:
    block = plan.blocks[value.block]
    if value.place >= 0:
        return block.ops[value.place].outputs[value.output]
    if value.block == 0:
        return sharded(0)  # only leaves that are cut count as inputs
    return block.args[value.output]
