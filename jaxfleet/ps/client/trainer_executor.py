"""Executes a trainer's programs: of steps, and of startup.

A program's segments are compiled; its host operators run between them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfleet.ir import Operator, Program
from jaxfleet.lower.blocks import ExecutableCache
from jaxfleet.lower.host_transfer import (
    check_moves,
    finish_moves,
    moves_of,
    start_moves,
    wait_for_device,
)
from jaxfleet.lower.partition import SENDING, Segment, segments
from jaxfleet.lower.staged import last_uses
from jaxfleet.ops import Array
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.communicator import Communicator, RelaxedRun
from jaxfleet.ps.client.host_ops import Copies, Host, HostRun
from jaxfleet.tables.access import TableAccess
from jaxfleet.tables.host_lookup import HostTables, Joined
from jaxfleet.transport.messages import Kind, Plain, Tensor


class TrainerTables:
    """The table operators of a trainer's host, for a program rewritten by `sparse_table`."""

    def __init__(self, program: Program, access: TableAccess) -> None:
        self._host, self._access = HostTables.of(program), access
        self._tables = {each.gradient: each for each in self._host.lookups if each.gradient}
        self._joined = Joined({})

    def bring(self, data: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Returns rows and indices by variable, and a size for each letter of their shapes."""
        arrays, sizes, self._joined = self._host.bring(self._access, data)
        self._host.hand_over_nothing(self._access)
        return arrays, sizes

    def push(self, name: str, gradient: np.ndarray) -> None:
        self._host.hand_over(self._access, self._tables[name], self._joined, gradient)


@dataclass(frozen=True)
class _Part:
    """A part of a step: its segment or operators, and the values to drop after it.

    With the operators that are `last`, all is sent that servers need to apply the step.
    """

    item: Segment | tuple[Operator, ...]
    drops: tuple[str, ...]
    is_last: bool


class TrainerExecutor:
    """Executes a trainer's program.

    Args:
        communicator: sends and receives if trainers do not wait for each other.
        ahead: number of steps computed with the received values, beyond the next.

    Attributes:
        finite: the `bool[2]` results of the last step's watched segments.
        sizes: a number for each letter of the shapes, of the last step.
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
        self.sizes: Mapping[str, int] = {}
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
            The new state by name, and the fetched values.
        """
        if self._tables is not None:
            rows, lengths = self._tables.bring(data)
            data, sizes = {**data, **rows}, {**sizes, **lengths}
        self.sizes = sizes
        key = tuple(sizes.items())
        plan = self._plans.get(key)
        if plan is None:
            self.client.doing("compiling")
            plan = self._plans[key] = self._planned(sizes)
        values = {**state, **data}
        self.finite = []
        for part in plan:
            self._run_part(part, values)
            for name in part.drops:
                if name not in state:  # the state is returned
                    values.pop(name, None)
        return {name: values[name] for name in state}, [values[name] for name in self._fetched]

    def _planned(self, sizes: Mapping[str, int]) -> list[_Part]:
        check_moves(self.program)
        declared, items = segments(self.program, sizes, cache=self._cache)
        drops = last_uses(declared, [_used(item) for item in items], self._fetched)
        last = max(
            (at for at, item in enumerate(items) if not isinstance(item, Segment)), default=-1
        )
        return [
            _Part(item, drop, is_last=at == last)
            for at, (item, drop) in enumerate(zip(items, drops, strict=True))
        ]

    def _run_part(self, part: _Part, values: dict[str, Any]) -> None:
        if isinstance(item := part.item, Segment):
            with self.client.spans.span("compute", step=self.client.step):
                outputs = item.run(self._rank, *[values[name] for name in item.reads])
            if item.is_watched:
                *outputs, finite = outputs
                self.finite.append(finite)
            values.update(zip(item.writes, outputs, strict=True))
        else:
            is_last_of_tables = part.is_last and self._tables is not None
            self._on_host(item, values, confirms=is_last_of_tables and self._may_repeat)

    @property
    def _may_repeat(self) -> bool:
        """Whether a step is begun again if the trainers change meanwhile."""
        return self.client.me.is_sync and not self.client.me.fixed

    def _on_host(self, ops: Sequence[Operator], values: dict[str, Any], *, confirms: bool) -> None:
        finish_moves(start_moves(moves_of(ops), values))
        self._await_sent(ops, values)
        if self._communicator is None:
            HostRun(self._host, ops, values, confirms).run()
        else:
            RelaxedRun(self._host, ops, values, communicator=self._communicator).run()

    def _await_sent(self, ops: Sequence[Operator], values: Mapping[str, Any]) -> None:
        """Waits for the device where the host would anyway, so that the wait counts as computing.

        An executable returns before it has run, and all its results come together.
        """
        sent = [values[name] for op in ops if op.type in SENDING for name in op.reads
                if name in values]  # fmt: skip
        if sent:
            with self.client.spans.span("compute", step=self.client.step):
                wait_for_device(sent)

    def receive(self) -> dict[str, Any]:
        """Receives the values that the program receives, and runs nothing else of it."""
        receives = [op for op in self.program.root.ops if op.type in {"recv", "concat"}]
        run = HostRun(self._host, receives, {})
        run.ask()
        return run.finish()

    @property
    def copies(self) -> Copies:
        return self._host.copies


def _used(item: Segment | tuple[Operator, ...]) -> list[str]:
    if isinstance(item, Segment):
        return [*item.reads, *item.writes]
    return [name for op in item for name in (*op.reads, *op.writes)]


def run_startup(
    program: Program, client: Client, state: Mapping[str, np.ndarray], *, replace: bool = False
) -> dict[str, Any]:
    """Runs a startup program, or one that sends and receives some leaves later.

    Args:
        program: a trainer's program.
        client: sends requests to the servers.
        state: the leaves to send.
        replace: all trainers send leaves that replace those of the servers; otherwise servers take
            them only if they have none.

    Returns:
        The received leaves, on the device.
    """
    run = _StartupRun(Host(program, client), program.root.ops, dict(state), replace=replace)
    run.run()
    return {name: run.values[name] for name in received_leaves(program)}


def sent_leaves(program: Program) -> list[str]:
    """Returns the leaves that a startup program sends to servers."""
    read = {name for op in program.root.ops for name in op.reads}
    return [name for name in program.variables if name in read]


def received_leaves(program: Program) -> list[str]:
    """Returns the leaves that a startup program receives from servers."""
    written = {name for op in program.root.ops for name in op.writes}
    return [name for name in program.variables if name in written]


@dataclass
class _StartupRun(HostRun):
    """Runs the operators one by one; sends are state assignments with replies."""

    replace: bool = False
    given: dict[int, list[Tensor]] = field(default_factory=dict)

    def run(self) -> None:
        does: Mapping[str, Callable[[Operator], None]] = {
            "split_byref": self._split,
            "assign": self._assign,
            "send": self._send,
            "send_barrier": self._give,
            "fetch_barrier": self._fetch,
        }
        for op in self.ops:
            if op.type in does:  # the others run at the barrier
                does[op.type](op)

    def _assign(self, op: Operator) -> None:
        self.values[op.writes[0]] = self.values[op.reads[0]]

    def _wire_name(self, name: str) -> str:
        return name  # leaf names are arbitrary

    def _push(self, server: int, tensor: Tensor, how: Plain) -> None:
        del how  # a state is not encoded
        self.given.setdefault(server, []).append(tensor)

    def _give(self, op: Operator) -> None:
        """Sends each server its tensors, and waits until all have received them."""
        client = self.host.client
        body: dict[str, Plain] = {"replace": self.replace}
        if self.replace:
            names = ",".join(sorted(x.name for tensors in self.given.values() for x in tensors))
            body["round"] = client.unique(f"assign {names}").removeprefix(f"assign {names}")
        client.wait([
            client.request(server, Kind.ASSIGN, body=body, tensors=self.given.get(server, ()))
            for server in self._servers(op, "endpoints")
        ])  # fmt: skip

    def _fetch(self, _: Operator) -> None:
        self._receive()
        self.host.client.wait(self.requests)
        self._finish(())
