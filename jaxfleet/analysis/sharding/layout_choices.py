"""Layouts decided with the data flow: statistics that stay local, and sharded optimizer state.

The sums of batch statistics, such as those of BatchNorm, may stay local to a device. They are the
sums in the forward part that feed both the rows and the state that no optimizer updates: a loss's
count of valid rows feeds no state, and a state's count of rows seen does not feed the rows. They
include the counterparts in the backward part: sums from the same lines of the user's modules that
feed the rows, as no gradient does.

A leaf of the optimizer's state can be sharded over the devices (ZeRO-1) if it has the shape of a
parameter, only the update uses it, and the update keeps its rows separate from the gradient on. The
search is by trial: all such leaves are cut, and then those that some operator needs whole are
reverted.
"""

from collections.abc import Callable, Iterator, Mapping
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


def batch_statistics(program: Program, plan: ShardingPlan) -> frozenset[tuple[int, int]]:
    """Returns the operators, by block and place, whose sums may stay local to a device.

    `plan` is the sharding of the one-device program with statistics over the whole batch.
    """
    return _Search(program, plan, Flow.of(program)).run()


@dataclass(frozen=True)
class _Search:
    program: Program
    plan: ShardingPlan
    flow: Flow

    def run(self) -> frozenset[tuple[int, int]]:
        to_rows = self._reaching_rows(Role.FORWARD)
        to_state = self.flow.reaching(self._kept(), self._is_in(Role.FORWARD))
        forward = [x for x in self._sums(Role.FORWARD) if x in to_rows and x in to_state]
        places = {self._place_in_source(x) for x in (*forward, *self._users(forward))}
        back_to_rows = self._reaching_rows(Role.BACKWARD)
        backward = [
            x
            for x in self._sums(Role.BACKWARD)
            if x in back_to_rows and self._place_in_source(x) in places
        ]
        return frozenset((value.block, value.place) for value in (*forward, *backward))

    def _sums(self, role: Role) -> Iterator[FlowValue]:
        """Yields the sums over rows, except gradients of parameters."""
        for index, block in sorted(self.plan.blocks.items()):
            for place, plan in enumerate(block.ops):
                op = self.program.blocks[index].ops[place]
                if op.role is not role or op.role_var or op.blocks:
                    continue
                if any(label.is_sharded for label in plan.placing.inputs):
                    for count, label in enumerate(plan.placing.outputs):
                        if label.is_sum:
                            yield FlowValue(index, place, count)

    def _reaching_rows(self, role: Role) -> set[FlowValue]:
        rows = filter(self._has_rows, list(self.flow.sources))
        return self.flow.reaching(rows, self._is_in(role))

    def _kept(self) -> set[FlowValue]:
        """Returns the final values of untrained state that can be averaged."""
        floats = (v for v in self.program.of_kind(Kind.STATE) if v.dtype.startswith(("f", "bf")))
        return {self.flow.final[v.name] for v in floats if v.name in self.flow.final}

    def _users(self, sums: list[FlowValue]) -> Iterator[FlowValue]:
        """Yields the rows that are computed, directly or indirectly, from sums."""
        is_forward = self._is_in(Role.FORWARD)
        derived = self.flow.reached(sums, lambda x: is_forward(x) and not self._has_rows(x))
        for value in (*sums, *derived):
            for reader in self.flow.readers.get(value, ()):
                if self._has_rows(reader) and self.flow.op(reader) is not None:
                    yield reader

    def _is_in(self, role: Role) -> Callable[[FlowValue], bool]:
        def is_in(value: FlowValue) -> bool:
            op = self.flow.op(value)
            return op is None or op.role is role or op.type == "assign"

        return is_in

    def _has_rows(self, value: FlowValue) -> bool:
        block = self.plan.blocks[value.block]
        if value.place < 0:
            return block.args[value.output].is_sharded
        return block.ops[value.place].outputs[value.output].is_sharded

    def _place_in_source(self, value: FlowValue) -> tuple[str, int, str]:
        op = self.flow.op(value)
        assert op is not None
        return op.source.file, op.source.line, op.source.scope


_UPDATE = frozenset({Role.OPTIMIZE, Role.OPTIMIZE_LR_SCHED, Role.LR_SCHED})


@dataclass(frozen=True)
class ShardableState:
    """The sharded state."""

    held: StateSharding  # the layout of the state, and the gradients that arrive in rows
    plan: ShardingPlan  # the program's sharding with it
    whole: tuple[tuple[str, str], ...]  # pairs of a replicated leaf and the reason


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
