"""Writes startup programs: how the state that a job begins with comes to servers and trainers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.slices import held_parts
from jaxfleet.ir import Attr, Attrs, Block, Kind, Operands, Operator, Program, Role, Variable
from jaxfleet.passes._job import Mark

STARTUP = ".startup"
_GIVER = 0  # the trainer whose state the job begins with


@dataclass(frozen=True)
class Piece:
    """What one server has of a leaf of the state.

    Attributes:
        endpoint: the server's.
        variable: what it is called there.
        start: its first row; -1 where it is all of the leaf.
    """

    endpoint: str
    variable: Variable
    start: int

    @property
    def name(self) -> str:
        """What it is called on the server."""
        return self.variable.name


Places = Mapping[str, Sequence[Piece]]
"""What servers have, by leaf: all of its rows, in order; or all of it, once or more."""


def server_startups(
    step: Program, servers: Sequence[Program], mark: Mark = lambda op: op
) -> tuple[Program, ...]:
    """Returns the startup programs of all servers: what each takes in before the first step.

    What no server updates is the trainers' own. The first server keeps what trainer 0 has of it
    until all trainers have it.

    Args:
        step: whose params and state are the leaves.
        servers: their programs.
        mark: says who made an operator.
    """
    bare = [_server_startup(server, (), mark) for server in servers]
    known = places_of(bare)
    kept = [leaf for leaf in _leaves(step) if leaf.name not in known]
    return (_server_startup(servers[0], kept, mark), *bare[1:])


def places_of(startups: Sequence[Program]) -> Places:
    """Returns what servers have of each leaf, from their startup programs."""
    found: dict[str, list[Piece]] = {}
    for program in startups:
        held, endpoint = held_parts(program), program.attrs["endpoint"]
        for variable in program.of_kind(Kind.PARAM, Kind.STATE):
            leaf, start = held.get(variable.name, (variable.name, -1))
            found.setdefault(leaf, []).append(Piece(str(endpoint), variable, start))
    return {leaf: sorted(pieces, key=lambda piece: piece.start) for leaf, pieces in found.items()}


def kept_for_trainers(startups: Sequence[Program]) -> frozenset[str]:
    """Returns the leaves that servers keep for trainers, and do not update."""
    return frozenset(name for program in startups for name in _names(program, "keeps"))


def trainer_startup(
    step: Program,
    trainer: Program,
    startups: Sequence[Program],
    *,
    trainer_id: int,
    mark: Mark = lambda op: op,
) -> Program:
    """Returns a trainer's startup program.

    Args:
        step: whose params and state are the leaves.
        trainer: the trainer's program.
        startups: those of the servers.
        trainer_id: which trainer; the first gives the whole state to servers.
        mark: says who made an operator.
    """
    gives = [leaf.name for leaf in _leaves(step)] if trainer_id == _GIVER else []
    takes = [leaf.name for leaf in trainer.of_kind(Kind.PARAM, Kind.STATE)]
    return exchange_of(
        step,
        trainer,
        places_of(startups),
        trainer_id=trainer_id,
        gives=gives,
        takes=takes,
        mark=mark,
    )


def exchange_of(
    step: Program,
    trainer: Program,
    places: Places,
    *,
    trainer_id: int,
    gives: Collection[str] = (),
    takes: Collection[str] = (),
    mark: Mark = lambda op: op,
) -> Program:
    """Returns the program that gives some leaves to servers, and then takes some of them.

    Args:
        step: whose params and state are the leaves.
        trainer: the trainer's program.
        places: what servers have of the leaves.
        trainer_id: which trainer.
        gives: the leaves that servers get.
        takes: the leaves that the trainer gets.
        mark: says who made an operator.
    """
    endpoints = trainer.attrs["endpoints"]
    made = _Exchange(places, Attrs({"endpoints": endpoints, "trainer_id": trainer_id}))
    leaves = [leaf for leaf in _leaves(step) if leaf.name in gives or leaf.name in takes]
    made.give([leaf for leaf in leaves if leaf.name in gives])
    made.take([leaf for leaf in leaves if leaf.name in takes])
    facts = {name: trainer.attrs[name] for name in ("endpoints", "role", "trainers")}
    return Program(
        f"{trainer.name}{STARTUP}",
        {leaf.name: leaf for leaf in leaves},
        (Block(variables=made.declared, ops=tuple(map(mark, made.ops))),),
        Attrs(facts),
    )


@dataclass
class _Exchange:
    """The operators of a trainer that talks with all servers about its state."""

    places: Places
    to_all: Attrs
    ops: list[Operator] = field(default_factory=list)
    declared: dict[str, Variable] = field(default_factory=dict)

    def give(self, leaves: Sequence[Variable]) -> None:
        for leaf in leaves:
            pieces = self._pieces(leaf)
            rows = [piece for piece in pieces if piece.start >= 0]
            if rows:
                sections = tuple(piece.variable.shape[0] for piece in rows)
                names = [piece.name for piece in rows]
                self._dist("split_byref", [leaf.name], names, {"sections": sections})
            copies = dict.fromkeys(piece.name for piece in pieces if piece.start < 0)
            for name in copies:
                if name != leaf.name:
                    self._dist("assign", [leaf.name], [name])
            epmap = tuple(piece.endpoint for piece in pieces)
            names = [piece.name for piece in pieces]
            self._rpc("send", inputs=names, attrs=Attrs({"epmap": epmap}))
        if leaves:
            self._rpc("send_barrier", attrs=self.to_all)

    def take(self, leaves: Sequence[Variable]) -> None:
        joined: list[tuple[Variable, list[str]]] = []
        for leaf in leaves:
            pieces = self._pieces(leaf)
            pieces = [piece for piece in pieces if piece.start >= 0] or pieces[:1]
            names = [piece.name for piece in pieces]
            joined.append((leaf, names))
            epmap = tuple(piece.endpoint for piece in pieces)
            attrs = {"epmap": epmap, "trainer_id": self.to_all["trainer_id"]}
            self._rpc("recv", outputs=names, attrs=Attrs(attrs))
        self._rpc("fetch_barrier", attrs=self.to_all)
        for leaf, names in joined:
            if len(names) > 1:
                self._dist("concat", names, [leaf.name], {"axis": 0})
            elif names != [leaf.name]:
                self._dist("assign", names, [leaf.name])

    def _pieces(self, leaf: Variable) -> Sequence[Piece]:
        """Returns what servers have of a leaf, and declares what is not called like it."""
        pieces = self.places[leaf.name]
        for piece in pieces:
            if piece.name != leaf.name:
                self.declared[piece.name] = replace(piece.variable, kind=Kind.TEMP)
        return pieces

    def _dist(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attrs: Mapping[str, Attr] | None = None,
    ) -> None:
        read, written = Operands.named(X=inputs), Operands.named(Out=outputs)
        self.ops.append(Operator(op_type, read, written, Attrs(attrs or {}), Role.DIST))

    def _rpc(
        self, op_type: str, *, inputs: Sequence[str] = (), outputs: Sequence[str] = (), attrs: Attrs
    ) -> None:
        read = Operands.named(X=inputs) if inputs else Operands()
        written = Operands.named(Out=outputs) if outputs else Operands()
        self.ops.append(Operator(op_type, read, written, attrs, Role.RPC))


def _server_startup(server: Program, kept: Sequence[Variable], mark: Mark) -> Program:
    """Returns a server's startup program: it receives its variables from trainer 0."""
    own = server.of_kind(Kind.PARAM, Kind.STATE)
    facts = {n: server.attrs[n] for n in ("endpoint", "endpoints", "holds", "pserver_id", "role")}
    if kept:
        facts["keeps"] = tuple(leaf.name for leaf in kept)
    facts["trainers"] = server.attrs["trainers"]
    endpoint = server.attrs["endpoint"]
    attrs = Attrs({"endpoint": endpoint, "trainer_id": _GIVER})
    ops = [
        Operator("recv", outputs=Operands.named(Out=[v.name for v in found]), attrs=attrs,
                 role=Role.RPC)
        for found in (own, kept) if found
    ]  # fmt: skip
    variables = {v.name: v for v in (*own, *(replace(leaf, kind=Kind.STATE) for leaf in kept))}
    block = Block(ops=tuple(map(mark, ops)))
    return Program(f"{server.name}{STARTUP}", variables, (block,), Attrs(facts))


def _leaves(step: Program) -> tuple[Variable, ...]:
    return step.of_kind(Kind.PARAM, Kind.STATE)


def _names(program: Program, attr: str) -> Iterator[str]:
    value = program.attrs.get(attr, ())
    assert isinstance(value, tuple)
    return map(str, value)
