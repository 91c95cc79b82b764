"""Optimizer state that can be sharded over the devices (ZeRO-1).

A leaf qualifies if it has the shape of a parameter, only the update uses it, and the update keeps
its rows separate from the gradient on. The search is by trial: all such leaves are cut, and then
those that some operator needs whole are reverted.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from jaxfleet.analysis.flow import Flow, FlowValue
from jaxfleet.analysis.sharding import (
    Mesh,
    Sharding,
    ShardingPlan,
    StateSharding,
    propagate,
    sharded,
    summed_state,
)
from jaxfleet.ir import Kind, Operator, Program, Role, Size, Variable

_UPDATE = frozenset({Role.OPTIMIZE, Role.OPTIMIZE_LR_SCHED, Role.LR_SCHED})


@dataclass(frozen=True)
class ShardableState:
    """The sharded state.

    Attributes:
        held: the layout of the state, and the gradients that arrive in rows.
        plan: the program's sharding with it.
        whole: pairs of a replicated leaf and the reason.
    """

    held: StateSharding
    plan: ShardingPlan
    whole: tuple[tuple[str, str], ...]


def shardable_state(
    program: Program,
    mesh: Mesh,
    cut: Mapping[str, int],
    *,
    local: AbstractSet[tuple[int, int]] = frozenset(),
) -> ShardableState:
    """Returns the state of a one-device program that is cut over devices.

    `cut` is the data that is cut, with the axes; `local` is as for `propagate`.
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
    def sums(self) -> Mapping[str, Sharding]:
        """The state that accumulates gradients, which is each device's own."""
        return summed_state(self.program).state

    def run(self) -> ShardableState:
        gradients = dict(self._gradients())
        leaves = dict(self._leaves())
        while True:
            state = {name: sharded(axis) for name, axis in leaves.items()}
            held = StateSharding({**self.sums, **state}, gradients)
            plan = propagate(
                self.program, self.mesh, sharded_inputs=self.cut, local=self.local, held=held
            )
            flow = Flow.of(self.program, inputs=leaves)
            final = plan.blocks[0].final
            bad = dict.fromkeys(self._idle(plan, flow, gradients, tuple(leaves)), "")
            bad |= {n: "its update is not made of rows" for n in leaves if final[n] != state[n]}
            bad |= dict(self._needed_whole(plan, flow, tuple(leaves)))
            if not bad.keys() & (leaves.keys() | gradients.keys()):
                return ShardableState(held, plan, tuple(self.whole.items()))
            self.whole |= {name: why for name, why in bad.items() if name in leaves}
            leaves = {n: axis for n, axis in leaves.items() if n not in bad}
            gradients = {n: axis for n, axis in gradients.items() if n not in bad}

    def _gradients(self) -> Iterator[tuple[str, int]]:
        for param, gradient in self._pairs():
            if (axis := self._axis(self.program.variables[param].shape)) is not None:
                yield gradient, axis

    def _leaves(self) -> Iterator[tuple[str, int]]:
        """Yields the leaves to try, with the axes, and records why others are whole."""
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
        for axis, size in enumerate(shape):
            if isinstance(size, int) and size and size % self.mesh.devices == 0:
                return axis
        return None

    def _needed_whole(
        self, plan: ShardingPlan, flow: Flow, inputs: tuple[str, ...]
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
                    value = FlowValue(index, place, 0)
                    where = f"{op.type} needs it whole"
                    yield from ((n, where) for n in self._behind(value, plan, flow, inputs))

    def _behind(
        self, value: FlowValue, plan: ShardingPlan, flow: Flow, inputs: tuple[str, ...]
    ) -> Iterator[str]:
        """Yields the leaves and gradients from which an operator's rows are made."""

        def is_rows(x: FlowValue) -> bool:
            return x == value or _label(plan, x).is_sharded

        for x in flow.reaching([value], is_rows):
            if x.place < 0 and x.block == 0:
                yield inputs[x.output]
            elif (op := flow.op(x)) is not None and op.role_var:
                yield op.writes[x.output]

    def _idle(
        self, plan: ShardingPlan, flow: Flow, gradients: Mapping[str, int], inputs: tuple[str, ...]
    ) -> set[str]:
        """Returns the gradients whose rows reach no cut leaf: whole they cost the same."""
        final = {flow.final[name] for name in inputs if name in flow.final}
        idle = set[str]()
        for block, place, _ in plan.completions():
            op = self.program.blocks[block].ops[place]
            for count, name in enumerate(op.writes):
                if name in gradients:
                    start = FlowValue(block, place, count)
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


def _label(plan: ShardingPlan, value: FlowValue) -> Sharding:
    block = plan.blocks[value.block]
    if value.place >= 0:
        return block.ops[value.place].outputs[value.output]
    if value.block == 0:
        return sharded(0)  # only leaves that are cut count as inputs
    return block.args[value.output]
