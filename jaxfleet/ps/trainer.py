"""Runs a trainer's program: compiled segments, and between them what it asks of servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxfleet.ir import Operator, Program
from jaxfleet.lower.blocks import ExecutableCache
from jaxfleet.lower.dropping import drops_of
from jaxfleet.lower.moves import check_moves, finish, moves_of, start
from jaxfleet.lower.segments import Segment, segments
from jaxfleet.ops import Array
from jaxfleet.ps.client import Client
from jaxfleet.ps.communicator import Communicator, RelaxedRun
from jaxfleet.ps.host_run import Copies, Host, HostRun
from jaxfleet.ps.trainer_tables import TrainerTables


@dataclass(frozen=True)
class _Part:
    """A part of a step: what runs, and the values that nothing reads after it."""

    item: Segment | tuple[Operator, ...]
    drops: tuple[str, ...]


class Trainer:
    """A trainer's program, ready to run.

    Args:
        program: it.
        client: the lines to the servers.
        cache: where executables are kept.
        push_rows: sends a gradient of which there are some rows, by its name.
        tables: those that the program looks up.
        communicator: what sends and receives where trainers do not wait for each other.
        ahead: how many more steps are computed with what is received, besides the next.

    Attributes:
        finite: of the last step's segments: `bool[2]`, as they return it.
    """

    def __init__(
        self,
        program: Program,
        client: Client,
        cache: ExecutableCache,
        push_rows: Callable[[str, np.ndarray], None] | None = None,
        *,
        tables: TrainerTables | None = None,
        communicator: Communicator | None = None,
        ahead: int = 0,
    ) -> None:
        self.program, self.client = program, client
        self._cache, self._communicator = cache, communicator
        self._tables = tables
        push = tables.push if tables is not None else push_rows
        self._host = Host(program, client, push, ahead)
        self.finite: list[Array] = []
        self._rank = np.int32(client.me.trainer)
        self._plans: dict[tuple[tuple[str, int], ...], list[_Part]] = {}
        self._fetched = next(
            (op.reads for op in reversed(program.root.ops) if op.type == "fetch"), ()
        )

    def run(
        self, state: Mapping[str, Any], data: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> tuple[dict[str, Any], list[Array]]:
        """Runs one step.

        Args:
            state: an array for every param and state variable of the program.
            data: an array for every data variable: this trainer's rows.
            sizes: a number for every letter in the shapes of the data.

        Returns:
            What every name of the state holds now, and what is fetched.
        """
        if self._tables is not None:
            rows, lengths = self._tables.bring(data)
            data, sizes = {**data, **rows}, {**sizes, **lengths}
        key = tuple(sizes.items())
        plan = self._plans.get(key)
        if plan is None:
            self.client.doing("compiling")
            plan = self._plans[key] = self._planned(sizes)
        values = {**state, **data}
        self.finite = []
        for part in plan:
            self._run_part(part.item, values)
            for name in part.drops:
                if name not in state:  # what it holds is returned
                    values.pop(name, None)
        return {name: values[name] for name in state}, [values[name] for name in self._fetched]

    def _planned(self, sizes: Mapping[str, int]) -> list[_Part]:
        check_moves(self.program)
        declared, items = segments(self.program, sizes, cache=self._cache)
        drops = drops_of(declared, [_used(item) for item in items], self._fetched)
        return [_Part(*pair) for pair in zip(items, drops, strict=True)]

    def _run_part(self, item: Segment | tuple[Operator, ...], values: dict[str, Any]) -> None:
        if isinstance(item, Segment):
            with self.client.spans.span("compute", step=self.client.step):
                outputs = item.run(self._rank, *[values[name] for name in item.reads])
            if item.is_watched:
                *outputs, finite = outputs
                self.finite.append(finite)
            values.update(zip(item.writes, outputs, strict=True))
        else:
            self._on_host(item, values)

    def _on_host(self, ops: Sequence[Operator], values: dict[str, Any]) -> None:
        finish(start(moves_of(ops), values))
        if self._communicator is None:
            HostRun(self._host, ops, values).run()
        else:
            RelaxedRun(self._host, ops, values, communicator=self._communicator).run()

    @property
    def copies(self) -> Copies:
        """The arrays that travelled, and the copies that were made of them."""
        return self._host.copies


def _used(item: Segment | tuple[Operator, ...]) -> list[str]:
    """Returns what a part reads or writes."""
    if isinstance(item, Segment):
        return [*item.reads, *item.writes]
    return [name for op in item for name in (*op.reads, *op.writes)]
