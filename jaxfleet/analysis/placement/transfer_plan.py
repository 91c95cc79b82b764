"""The transfer plan of a job: bytes held by servers, and bytes sent in a step."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from jaxfleet import notebook as html
from jaxfleet.analysis.optimizer_groups import OptimizerGroups, find_optimizer_groups
from jaxfleet.analysis.optimizer_groups.result import joined_names
from jaxfleet.analysis.placement.policies import (
    LoadBalance,
    SliceLoad,
    bytes_of,
    dispatch_slices,
    reasons_for_whole,
    slice_loads,
)
from jaxfleet.analysis.placement.side_traffic import SideTraffic
from jaxfleet.analysis.placement.sliced_layout import endpoints_of, placement_of
from jaxfleet.errors import PassError
from jaxfleet.ir import Dim, Program
from jaxfleet.pipeline import table


@dataclass(frozen=True)
class ServerPlan:
    """The bytes that one server holds, and those that it receives and sends in a step."""

    endpoint: str
    parts: tuple[SliceLoad, ...]  # the slices placed there
    param_bytes: int  # of the parameters
    state_bytes: int  # of their optimizer state, and of the state that every server keeps
    from_trainers: int  # all trainers' gradients
    to_trainers: int  # the parameters, once for each trainer
    # its partial results of operators across parameters, once for each other server
    to_servers: int


@dataclass(frozen=True)
class TransferPlan:
    """The server of every slice, and the traffic of a step. It prints as text."""

    name: str
    trainers: int
    servers: tuple[ServerPlan, ...]  # in the order of their endpoints
    push_bytes: int  # the gradients that each trainer sends in a step
    pull_bytes: int  # the parameters that each trainer receives in a step
    extras: SideTraffic
    balance: LoadBalance = field(repr=False)  # how evenly the servers are filled
    best: LoadBalance = field(repr=False)  # how evenly `balanced` would fill them
    # reasons, with the parameters that are not cut
    whole: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        lines = [*self._blocks(), *self.summary()]
        return "\n".join([self._headline(), *(f"  {line}" for line in lines)])

    def _repr_html_(self) -> str:
        """The bytes of servers and trainers as tables, with every server's slices folded."""
        heads = "server", "parameters", "optimizer state", "receives", "sends", "to other servers"
        rows = [
            (s.endpoint, *(f"{n:,}" for n in (s.param_bytes, s.state_bytes, s.from_trainers,
                                              s.to_trainers, s.to_servers)))
            for s in self.servers
        ]  # fmt: skip
        rows.append(("each trainer", "", "", f"{self.pull_bytes:,}", f"{self.push_bytes:,}", ""))
        notes = [*self.extras.lines(), self._balance()]
        notes += [f"whole: {joined_names(params)}: {why}" for why, params in self.whole]
        return html.shown(
            html.head("TransferPlan", self.name, *self._headline().split(": ")[-1].split(", ")),
            html.cut_table(rows, heads=heads, right=range(1, len(heads))),
            *(html.element("div", note.strip()) for note in notes),
            *(
                html.folded(
                    f"{server.endpoint}: {len(server.parts):,} slices",
                    html.cut_table(map(_slice_row, server.parts), heads=_SLICE, right=(1, 2, 3)),
                )
                for server in self.servers[: html.MOST_ROWS]
            ),
        )

    def summary(self) -> Iterator[str]:
        """Yields the traffic, the balance and the whole parameters: all but the list of blocks."""
        yield "bytes in each step:"
        rows = [("", "receives", "sends", "to other servers")]
        rows += [
            (s.endpoint, f"{s.from_trainers:,}", f"{s.to_trainers:,}", f"{s.to_servers:,}")
            for s in self.servers
        ]
        rows.append(("each trainer", f"{self.pull_bytes:,}", f"{self.push_bytes:,}", ""))
        yield from (f"  {line}" for line in table(rows, right=(1, 2, 3)).splitlines())
        yield from self.extras.lines()
        yield self._balance()
        for why, params in self.whole:
            yield f"whole: {joined_names(params)}: {why}"

    def to_json(self) -> dict[str, object]:
        return {
            "program": self.name,
            "trainers": self.trainers,
            "servers": [_server_json(server) for server in self.servers],
            "trainer": {"push_bytes": self.push_bytes, "pull_bytes": self.pull_bytes},
            "extras": asdict(self.extras),
            "balance": round(self.balance.ratio, 4),
            "best_balance": round(self.best.ratio, 4),
            "whole": [{"why": why, "params": list(params)} for why, params in self.whole],
        }

    def _headline(self) -> str:
        servers, trainers = len(self.servers), self.trainers
        return (
            f"plan of '{self.name}': {servers} server{'s' * (servers != 1)}, "
            f"{trainers} trainer{'s' * (trainers != 1)}"
        )

    def _blocks(self) -> Iterator[str]:
        for server in self.servers:
            yield (
                f"{server.endpoint} holds {server.param_bytes:,} bytes of parameters, "
                f"{server.state_bytes:,} of optimizer state"
            )
            rows = list(map(_slice_row, server.parts))
            lines = table(rows, right=(1, 2, 3)).splitlines() if rows else ["nothing"]
            yield from (f"  {line}" for line in lines)

    def _balance(self) -> str:
        line = f"balance: the fullest server holds {self.balance.ratio:.2f} times the mean"
        if round(self.best.ratio, 2) < round(self.balance.ratio, 2):
            return f"{line}; {self.best.ratio:.2f} with the method balanced"
        return line


def transfer_plan(
    program: Program,
    *,
    trainers: int,
    trainer: Program | None = None,
    rows: int | None = None,
    groups: OptimizerGroups | None = None,
) -> TransferPlan:
    """Returns the bytes that a step's servers hold, and its traffic.

    A step that `slice_var` and `dispatch` did not run on is a PassError. `trainer` is the program
    that `insert_send_recv` made of it for trainer 0; without it, only gradients, parameters and
    partial results across parameters are counted. `rows` are each trainer's, if known; so are
    the program's optimizer `groups`.
    """
    if trainers < 1:
        raise PassError(f"plan: trainers is {trainers}, but must be at least 1")
    batch = program.attrs.get("batch")
    letters = batch.letters if isinstance(batch, Dim) else ()
    sizes = dict.fromkeys(letters, rows) if rows is not None else {}
    endpoints, placement = endpoints_of(program), placement_of(program)
    groups = groups if groups is not None else find_optimizer_groups(program)
    parts = slice_loads(program, groups)
    push, pull = sum(x.push_bytes for x in parts), sum(x.param_bytes for x in parts)
    # Every server keeps this state, such as counters of schedules.
    common_state = (*groups.lr_state, *groups.crossing_state)
    common = sum(bytes_of(groups.program.variables[name]) for name in common_state)

    def server(endpoint: str) -> ServerPlan:
        held = [part for part in parts if placement[part.slice.name] == endpoint]
        params = sum(part.param_bytes for part in held)
        return ServerPlan(
            endpoint=endpoint,
            parts=tuple(held),
            param_bytes=params,
            state_bytes=sum(part.state_bytes for part in held) + common,
            from_trainers=trainers * sum(part.push_bytes for part in held),
            to_trainers=trainers * params,
            to_servers=(len(endpoints) - 1) * sum(part.part_bytes for part in held),
        )

    whole: dict[str, list[str]] = {}
    for param, why in reasons_for_whole(program, groups).items():
        whole.setdefault(why, []).append(param)
    return TransferPlan(
        name=program.name,
        trainers=trainers,
        servers=tuple(map(server, endpoints)),
        push_bytes=push,
        pull_bytes=pull,
        extras=SideTraffic.of(
            trainer, push_bytes=push, pull_bytes=pull, trainers=trainers, sizes=sizes
        ),
        balance=LoadBalance.of(parts, placement, endpoints),
        best=LoadBalance.of(parts, dispatch_slices("balanced", parts, endpoints), endpoints),
        whole=tuple((why, tuple(params)) for why, params in whole.items()),
    )


_SLICE = "slice", "shape", "bytes of parameters", "of optimizer state"


def _slice_row(part: SliceLoad) -> tuple[str, str, str, str]:
    shape = "x".join(map(str, part.slice.shape)) or "scalar"
    return part.slice.name, shape, f"{part.param_bytes:,}", f"{part.state_bytes:,}"


def _server_json(server: ServerPlan) -> dict[str, object]:
    return {
        "endpoint": server.endpoint,
        "param_bytes": server.param_bytes,
        "state_bytes": server.state_bytes,
        "from_trainers": server.from_trainers,
        "to_trainers": server.to_trainers,
        "to_servers": server.to_servers,
        "blocks": [
            {
                "name": part.slice.name,
                "param": part.slice.param,
                "start": part.slice.start,
                "shape": list(part.slice.shape),
                "param_bytes": part.param_bytes,
                "state_bytes": part.state_bytes,
            }
            for part in server.parts
        ],
    }
