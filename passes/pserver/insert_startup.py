"""Startup programs of trainers and servers, which distribute the initial state of a job."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.placement.sliced_layout import endpoints_of, server_variables
from jaxfleet.analysis.updates import is_fluid_dialect
from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Attrs, Block, Kind, Operator, Program, Variable
from jaxfleet.passes.fluid.job import fluid_server_startup, fluid_trainer_startup
from jaxfleet.passes.pserver.insert_send_recv import InsertSendRecv
from jaxfleet.passes.pserver.job import Mark, exchange_op
from jaxfleet.pipeline import Pass, made_by, register_pass

STARTUP = ".startup"
_GIVER = 0  # the trainer whose state initializes the job


@dataclass(frozen=True)
class LeafPiece:
    """A server's piece of a state leaf, from row `start` on; -1 for the whole leaf."""

    endpoint: str
    variable: Variable
    start: int

    @property
    def name(self) -> str:
        return self.variable.name


LeafPieces = Mapping[str, Sequence[LeafPiece]]
"""What servers have, by leaf: all of its rows, in order; or all of it, once or more."""


def server_startups(
    step: Program, servers: Sequence[Program], mark: Mark = lambda op: op
) -> tuple[Program, ...]:
    """Returns the startup programs of all servers, which receive their state before the first step.

    State that no server updates belongs to the trainers. The first server keeps trainer 0's copy of
    it until all trainers have received it. The leaves are the params and state of `step`.
    """
    bare = [_server_startup(server, (), mark) for server in servers]
    known = leaf_pieces(bare)
    kept = [leaf for leaf in _leaves(step) if leaf.name not in known]
    return (_server_startup(servers[0], kept, mark), *bare[1:])


def leaf_pieces(startups: Sequence[Program]) -> LeafPieces:
    """Returns the servers' pieces of each leaf, from their startup programs."""
    found: dict[str, list[LeafPiece]] = {}
    for program in startups:
        held, endpoint = server_variables(program), program.attrs["endpoint"]
        for variable in program.of_kind(Kind.PARAM, Kind.STATE):
            leaf, start = held.get(variable.name, (variable.name, -1))
            found.setdefault(leaf, []).append(LeafPiece(str(endpoint), variable, start))
    return {leaf: sorted(pieces, key=lambda piece: piece.start) for leaf, pieces in found.items()}


def kept_for_trainers(startups: Sequence[Program]) -> frozenset[str]:
    """Returns the leaves that servers keep for trainers, and do not update."""
    found = set[str]()
    for program in startups:
        names = program.attrs.get("keeps", ())
        assert isinstance(names, tuple)
        found.update(map(str, names))
    return frozenset(found)


def trainer_startup(
    step: Program,
    trainer: Program,
    startups: Sequence[Program],
    *,
    trainer_id: int,
    mark: Mark = lambda op: op,
) -> Program:
    """Returns a trainer's startup program; trainer 0 sends the whole state to servers.

    The leaves are the params and state of `step`.
    """
    gives = [leaf.name for leaf in _leaves(step)] if trainer_id == _GIVER else []
    takes = [leaf.name for leaf in trainer.of_kind(Kind.PARAM, Kind.STATE)]
    return state_exchange(
        step,
        trainer,
        leaf_pieces(startups),
        trainer_id=trainer_id,
        gives=gives,
        takes=takes,
        mark=mark,
    )


def state_exchange(
    step: Program,
    trainer: Program,
    places: LeafPieces,
    *,
    trainer_id: int,
    gives: Collection[str] = (),
    takes: Collection[str] = (),
    mark: Mark = lambda op: op,
) -> Program:
    """Returns the program that sends some leaves to servers, and then receives some of them.

    The leaves are the params and state of `step`; `places` are the servers' pieces of them. Those
    in `gives` are sent, those in `takes` received.
    """
    made = _Exchange(places, trainer.attrs["endpoints"], trainer_id)
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
    places: LeafPieces
    endpoints: Attr
    trainer_id: int
    ops: list[Operator] = field(default_factory=list)
    declared: dict[str, Variable] = field(default_factory=dict)

    def give(self, leaves: Sequence[Variable]) -> None:
        for leaf in leaves:
            pieces = self._pieces(leaf)
            rows = [piece for piece in pieces if piece.start >= 0]
            if rows:
                sections = tuple(piece.variable.shape[0] for piece in rows)
                names = [piece.name for piece in rows]
                self._add("split_byref", [leaf.name], names, sections=sections)
            copies = dict.fromkeys(piece.name for piece in pieces if piece.start < 0)
            for name in copies:
                if name != leaf.name:
                    self._add("assign", [leaf.name], [name])
            epmap = tuple(piece.endpoint for piece in pieces)
            self._add("send", [piece.name for piece in pieces], epmap=epmap)
        if leaves:
            self._add("send_barrier", endpoints=self.endpoints, trainer_id=self.trainer_id)

    def take(self, leaves: Sequence[Variable]) -> None:
        joined: list[tuple[Variable, list[str]]] = []
        for leaf in leaves:
            pieces = self._pieces(leaf)
            pieces = [piece for piece in pieces if piece.start >= 0] or pieces[:1]
            names = [piece.name for piece in pieces]
            joined.append((leaf, names))
            epmap = tuple(piece.endpoint for piece in pieces)
            self._add("recv", (), names, epmap=epmap, trainer_id=self.trainer_id)
        self._add("fetch_barrier", endpoints=self.endpoints, trainer_id=self.trainer_id)
        for leaf, names in joined:
            if len(names) > 1:
                self._add("concat", names, [leaf.name], axis=0)
            elif names != [leaf.name]:
                self._add("assign", names, [leaf.name])

    def _pieces(self, leaf: Variable) -> Sequence[LeafPiece]:
        """Returns the servers' pieces of a leaf, and declares those with other names."""
        pieces = self.places[leaf.name]
        for piece in pieces:
            if piece.name != leaf.name:
                self.declared[piece.name] = replace(piece.variable, kind=Kind.TEMP)
        return pieces

    def _add(
        self, op_type: str, reads: Sequence[str] = (), writes: Sequence[str] = (), **attrs: Attr
    ) -> None:
        self.ops.append(exchange_op(op_type, reads, writes, **attrs))


def _server_startup(server: Program, kept: Sequence[Variable], mark: Mark) -> Program:
    """Returns a server's startup program: it receives its variables from trainer 0."""
    own = server.of_kind(Kind.PARAM, Kind.STATE)
    facts = {n: server.attrs[n] for n in ("endpoint", "endpoints", "holds", "pserver_id", "role")}
    if kept:
        facts["keeps"] = tuple(leaf.name for leaf in kept)
    facts["trainers"] = server.attrs["trainers"]
    endpoint = server.attrs["endpoint"]
    received = ([v.name for v in found] for found in (own, kept) if found)
    ops = [exchange_op("recv", (), x, endpoint=endpoint, trainer_id=_GIVER) for x in received]
    variables = {v.name: v for v in (*own, *(replace(leaf, kind=Kind.STATE) for leaf in kept))}
    block = Block(ops=tuple(map(mark, ops)))
    return Program(f"{server.name}{STARTUP}", variables, (block,), Attrs(facts))


def _leaves(step: Program) -> tuple[Variable, ...]:
    return step.of_kind(Kind.PARAM, Kind.STATE)


@register_pass("insert_startup")
@dataclass(frozen=True)
class InsertStartup(Pass):
    """Writes a trainer's startup program, or a server's.

    Trainer 0 sends its initial state to the servers: it cuts their variables into slices
    (`split_byref`), sends everything, and waits until all servers have it (`send_barrier`). Then
    every trainer receives the inputs of its own program (`recv`, `fetch_barrier`, `concat`), so
    that all start equal. A server receives the variables of its program; the first one also keeps
    the trainers' own state.

    In fluid's dialect it runs on the step's startup program, with the attributes (and variables) of
    the program that it belongs to: each side initializes its own variables, and trainers then
    receive the servers' values.

    Before::

        program p {endpoints=["s:1", "s:2"], placement=[["b", "s:1"], ["w.block0", "s:2"], ["w.block1", "s:1"]], slices=[["b", [3]], ["w", [2, 2]]]}
          data  x: f32[4,3]
          param b: f32[3]
          param w: f32[4,3]
          state m: f32[4,3]
          state seen: i32[]
          block 0
            forward
              seen = jax.add(seen, 4:i32)
            backward
              b@GRAD: f32[3] = jax.reduce_sum(x) {axes=[0]} for (b, b@GRAD)
              w@GRAD: f32[4,3] = jax.neg(x) for (w, w@GRAD)
            optimize
              b = jax.sub(b, b@GRAD)
              m = jax.add(m, w@GRAD)
              w = jax.sub(w, m)

    After::

        program p.trainer0.startup {endpoints=["s:1", "s:2"], role="trainer", trainers=1}
          param b: f32[3]
          param w: f32[4,3]
          state m: f32[4,3]
          state seen: i32[]
          block 0
            rpc
              send(X=b) {epmap=["s:1"]}
            dist
              Out=[w.block0: f32[2,3], w.block1: f32[2,3]] = split_byref(X=w) {sections=[2, 2]}
            rpc
              send(X=[w.block0, w.block1]) {epmap=["s:2", "s:1"]}
            dist
              Out=[m.block0: f32[2,3], m.block1: f32[2,3]] = split_byref(X=m) {sections=[2, 2]}
            rpc
              send(X=[m.block0, m.block1]) {epmap=["s:2", "s:1"]}
              send(X=seen) {epmap=["s:1"]}
              send_barrier() {endpoints=["s:1", "s:2"], trainer_id=0}
              Out=b = recv() {epmap=["s:1"], trainer_id=0}
              Out=[w.block0, w.block1] = recv() {epmap=["s:2", "s:1"], trainer_id=0}
              Out=seen = recv() {epmap=["s:1"], trainer_id=0}
              fetch_barrier() {endpoints=["s:1", "s:2"], trainer_id=0}
            dist
              Out=w = concat(X=[w.block0, w.block1]) {axis=0}
    """  # noqa: E501  # a program's attributes are one line

    trainer_id: int = 0  # the trainer whose program is written
    server: int = -1  # the server whose program is written instead; -1: a trainer's
    trainers: int = 1

    runs_after = ("grad_allreduce", "slice_var", "dispatch")

    def run(self, program: Program) -> Program:
        if is_fluid_dialect(program):
            write = fluid_server_startup if "pserver_id" in program.attrs else fluid_trainer_startup
            return write(program, self._mark)
        if "role" in program.attrs:
            what = f"insert_startup: the program is already a {program.attrs['role']}'s"
            raise PassError(what, hint="run it on the step, instead of insert_send_recv")
        count = len(endpoints_of(program))
        if not -1 <= self.server < count:
            raise PassError(f"insert_startup: server {self.server} of {count}")
        trainer = InsertSendRecv(self.trainer_id, trainers=self.trainers).run(program)
        servers = [InsertSendRecv(server=n, trainers=self.trainers).run(program)
                   for n in range(count)]  # fmt: skip
        startups = server_startups(program, servers, self._mark)
        if self.server >= 0:
            return startups[self.server]
        return trainer_startup(
            program, trainer, startups, trainer_id=self.trainer_id, mark=self._mark
        )

    def _mark(self, op: Operator) -> Operator:
        return made_by(op, self)
