"""Batch statistics, such as those of BatchNorm: sums that may stay local to a device.

These are the sums in the forward part that feed both the rows and the state that no optimizer
updates: a loss's count of valid rows feeds no state, and a state's count of rows seen does not feed
the rows. They include the counterparts in the backward part: sums from the same lines of the user's
modules that feed the rows, as no gradient does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxfleet.analysis.flow import Flow, FlowValue
from jaxfleet.analysis.sharding import ShardingPlan
from jaxfleet.ir import Kind, Program, Role


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
        state = [v.name for v in self.program.of_kind(Kind.STATE) if _is_float(v.dtype)]
        return {self.flow.final[name] for name in state if name in self.flow.final}

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


def _is_float(dtype: str) -> bool:
    return dtype.lstrip("b").startswith("f")
