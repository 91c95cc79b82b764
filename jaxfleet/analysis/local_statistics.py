"""Finds the sums over the batch that are statistics of it, as BatchNorm keeps.

They are what both the rows and the state that no optimizer touches are computed from in the
forward part: a loss's count of rows that matter feeds no state, and a state's count of rows seen
does not come back to the rows. With them go their counterparts in the backward part: sums that
come from the same lines of the user's modules and go back to the rows, as no gradient does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxfleet.analysis.flow import Flow, Value
from jaxfleet.analysis.labels import Plan
from jaxfleet.ir import Kind, Program, Role


def batch_statistics(program: Program, plan: Plan) -> frozenset[tuple[int, int]]:
    """Returns the operators, by block and place, whose sums may stay a device's own.

    Args:
        program: a one-device program.
        plan: its labels with statistics over the whole batch.
    """
    return _Search(program, plan, Flow.of(program)).run()


@dataclass(frozen=True)
class _Search:
    program: Program
    plan: Plan
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

    def _sums(self, role: Role) -> Iterator[Value]:
        """Yields the sums that rows are reduced to, gradients of parameters left out."""
        for index, block in sorted(self.plan.blocks.items()):
            for place, plan in enumerate(block.ops):
                op = self.program.blocks[index].ops[place]
                if op.role is not role or op.role_var or op.blocks:
                    continue
                if any(label.is_sharded for label in plan.placing.inputs):
                    for count, label in enumerate(plan.placing.outputs):
                        if label.is_sum:
                            yield Value(index, place, count)

    def _reaching_rows(self, role: Role) -> set[Value]:
        rows = filter(self._has_rows, list(self.flow.sources))
        return self.flow.reaching(rows, self._is_in(role))

    def _kept(self) -> set[Value]:
        """Returns what the state that is not trained holds at the end, if it can be averaged."""
        state = [v.name for v in self.program.of_kind(Kind.STATE) if _is_float(v.dtype)]
        return {self.flow.final[name] for name in state if name in self.flow.final}

    def _users(self, sums: list[Value]) -> Iterator[Value]:
        """Yields the rows that are computed from sums, or from what is computed from them."""
        is_forward = self._is_in(Role.FORWARD)
        derived = self.flow.reached(sums, lambda x: is_forward(x) and not self._has_rows(x))
        for value in (*sums, *derived):
            for reader in self.flow.readers.get(value, ()):
                if self._has_rows(reader) and self.flow.op(reader) is not None:
                    yield reader

    def _is_in(self, role: Role) -> Callable[[Value], bool]:
        def is_in(value: Value) -> bool:
            op = self.flow.op(value)
            return op is None or op.role is role or op.type == "assign"

        return is_in

    def _has_rows(self, value: Value) -> bool:
        block = self.plan.blocks[value.block]
        if value.place < 0:
            return block.args[value.output].is_sharded
        return block.ops[value.place].outputs[value.output].is_sharded

    def _place_in_source(self, value: Value) -> tuple[str, int, str]:
        op = self.flow.op(value)
        assert op is not None
        return op.source.file, op.source.line, op.source.scope


def _is_float(dtype: str) -> bool:
    return dtype.lstrip("b").startswith("f")
