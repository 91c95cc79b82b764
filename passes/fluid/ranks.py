"""Ranks: helpers of the passes that write a rank's program, and the passes of its startup.

A rank is one of several equal processes, or devices, each with its own copy of the state. A ring is
a communicator of all ranks; fluid distributes collectives over several so that they overlap. Here
rings are metadata: XLA orders and overlaps collectives itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle

from jaxfleet.errors import PassError
from jaxfleet.ir import Attrs, Kind, Operands, Operator, Program, Role, Source, Variable
from jaxfleet.ir.variable import RAW
from jaxfleet.pipeline import Pass, made_by, register_pass

BACKWARD = frozenset({Role.BACKWARD, Role.BACKWARD_LOSS})
OPTIMIZE = frozenset({Role.OPTIMIZE, Role.OPTIMIZE_LR_SCHED})
ROLE = "collective"


def check_rank(program: Program, pass_name: str, *, rank: int, nranks: int) -> None:
    """Rejects a program that was already rewritten for a rank, and a rank out of range."""
    if "role" in program.attrs:
        what = f"{pass_name}: the program is already rewritten, as a {program.attrs['role']}'s"
        raise PassError(what, hint="transpile a program once; clone it before, to do so again")
    if not 0 <= rank < nranks:
        raise PassError(f"{pass_name}: rank {rank} of {nranks}")


def check_finished_in_root(program: Program, pass_name: str) -> None:
    """Rejects a program that finishes a gradient in a sub-block, which may not run on all ranks."""
    for block in program.blocks[1:]:
        for op in block.ops:
            if op.role in BACKWARD and op.role_var:
                what = f"{pass_name}: a gradient is finished in a sub-block"
                raise PassError(what, op=op, hint="sum it in block 0")


def rank_attrs(program: Program, *, rank: int, nranks: int) -> Attrs:
    """Returns a program's attributes with the rank added."""
    return program.attrs.updated(role=ROLE, rank=rank, nranks=nranks)


def rings(count: int, pass_name: str) -> Iterator[int]:
    """Yields the ring ids round-robin, forever; raises PassError without rings."""
    if count < 1:
        raise PassError(f"{pass_name}: {count} rings", hint="nrings is at least 1")
    return cycle(range(count))


def trained_parameters(program: Program, skip: tuple[str, ...]) -> list[Variable]:
    """Returns the parameters replicated on all ranks, in order of declaration."""
    return [v for v in program.of_kind(Kind.PARAM) if v.name not in skip]


def division_op(begins: Operator, count: int) -> Operator:
    """Returns the operator that divides the loss's gradient, made by `begins`, by `count`."""
    attrs = Attrs({"scale": 1.0 / count})
    return in_place_op("scale", begins.writes[0], attrs, Role.BACKWARD, begins.source)


def wait_for_computing(name: str, role: Role, source: Source) -> Operator:
    """Returns the operator after which computed values may be communicated."""
    return in_place_op("c_sync_calc_stream", name, Attrs(), role, source)


def allreduce(name: str, ring: int, role: Role, source: Source) -> Operator:
    """Returns the operator that sums a variable over all ranks, in place."""
    attrs = Attrs({"ring_id": ring, "use_calc_stream": False})
    return in_place_op("c_allreduce_sum", name, attrs, role, source)


def wait_for_communication(
    name: str, count: int, role: Role, source: Source
) -> tuple[Operator, ...]:
    """Returns, for every ring, the operator after which communicated values may be read."""
    return tuple(
        in_place_op("c_sync_comm_stream", name, Attrs({"ring_id": ring}), role, source)
        for ring in range(count)
    )


def in_place_op(op_type: str, name: str, attrs: Attrs, role: Role, source: Source) -> Operator:
    """Returns an operator that reads and writes one variable."""
    read, written = Operands.named(X=name), Operands.named(Out=name)
    return Operator(op_type, read, written, attrs, role, source=source)


@register_pass("gen_nccl_id")
@dataclass(frozen=True)
class GenNcclId(Pass):
    """Adds the operator that connects all trainers' processes.

    The step is not rewritten here: the executor that runs it on several devices sums gradients over
    all trainers' devices. A hierarchical sum goes first over `inner` trainers of a machine, then
    over machines; each level and each ring has its own handle.

    Before::

        program startup
          param w: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}

    After::

        program startup
          param w: f32[3]
          state NCCLID: raw[]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}
              NCCLID=NCCLID = gen_nccl_id() {hierarchical_allreduce_inter_nranks=0, nccl_comm_num=1, trainer_id=0, trainers=["127.0.0.1:6170", "127.0.0.1:6171"], use_hierarchical_allreduce=false}
    """  # noqa: E501  # an operator stands on one line

    trainers: tuple[str, ...] = ("127.0.0.1:6170", "127.0.0.1:6171")  # host:port of each
    trainer_id: int = 0
    rings: int = 1
    hierarchical: bool = False
    inner: int = 0  # trainers per machine, for hierarchical sums

    def run(self, program: Program) -> Program:
        check_rank(program, self.name, rank=self.trainer_id, nranks=len(self.trainers))
        if any(op.type == "gen_nccl_id" for op in program.root.ops):
            raise PassError(f"{self.name}: the program knows its trainers already")
        if self.rings < 1:
            raise PassError(f"{self.name}: {self.rings} rings")
        handles = [Variable(name, RAW, (), Kind.STATE) for name in self._handles()]
        tell = Operator("gen_nccl_id", outputs=Operands.named(NCCLID=handles[0].name))
        tell = made_by(replace(tell, attrs=self._attrs()), self)
        variables = {**program.variables, **{v.name: v for v in handles}}
        block = program.root.with_ops([*program.root.ops, tell])
        return replace(program.with_block(block), variables=variables)

    def _handles(self) -> list[str]:
        names = ["NCCLID", *(f"NCCLID_{ring}" for ring in range(1, self.rings))]
        if self.hierarchical:
            for ring in range(self.rings):
                names += [f"Hierarchical_{level}_NCCLID_{ring}" for level in ("inter", "exter")]
        return names

    def _attrs(self) -> Attrs:
        return Attrs(
            {
                "trainers": self.trainers,
                "trainer_id": self.trainer_id,
                "nccl_comm_num": self.rings,
                "use_hierarchical_allreduce": self.hierarchical,
                "hierarchical_allreduce_inter_nranks": self.inner,
            }
        )


@register_pass("comm_init")
@dataclass(frozen=True)
class CommInit(Pass):
    """Joins a rank to every ring, at the end of the startup program.

    Each ring has an id, which rank 0 creates and the others fetch from it, and a communicator
    created from that id. Here the mesh of devices is the communicator, so the operators compute
    nothing; they record the participants.

    Before::

        program startup
          param w: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}

    After::

        program startup {nranks=2, rank=0, role="collective"}
          param w: f32[3]
          state nccl_id_0: raw[]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}
              Out=nccl_id_0 = c_gen_nccl_id() {endpoint="127.0.0.1:6170", other_endpoints=["127.0.0.1:6171"], rank=0}
              c_comm_init(X=nccl_id_0) {nranks=2, rank=0, ring_id=0}
    """  # noqa: E501  # an operator stands on one line

    endpoints: tuple[str, ...] = ("127.0.0.1:6170", "127.0.0.1:6171")  # of all ranks, in order
    current: str = "127.0.0.1:6170"  # this rank's
    rank: int = 0
    ids: tuple[str, ...] = ("nccl_id_0",)  # one for each ring

    def run(self, program: Program) -> Program:
        nranks = len(self.endpoints)
        check_rank(program, self.name, rank=self.rank, nranks=nranks)
        if self.current not in self.endpoints:
            what = f"{self.name}: current is {self.current}, which no rank's endpoint is"
            raise PassError(what, hint=f"the ranks' are {', '.join(self.endpoints)}")
        ops = [op for ring, name in enumerate(self.ids) for op in self._joins(ring, name)]
        root = program.root.with_ops([*program.root.ops, *(made_by(op, self) for op in ops)])
        made = {name: Variable(name, RAW, (), Kind.STATE) for name in self.ids}
        attrs = rank_attrs(program, rank=self.rank, nranks=nranks)
        variables = {**program.variables, **made}
        return replace(program.with_block(root), variables=variables, attrs=attrs)

    def _joins(self, ring: int, name: str) -> tuple[Operator, Operator]:
        others = tuple(endpoint for endpoint in self.endpoints if endpoint != self.current)
        found = Attrs({"rank": self.rank, "endpoint": self.current, "other_endpoints": others})
        known = Attrs({"nranks": len(self.endpoints), "rank": self.rank, "ring_id": ring})
        return (
            Operator("c_gen_nccl_id", outputs=Operands.named(Out=name), attrs=found),
            Operator("c_comm_init", Operands.named(X=name), attrs=known),
        )


@register_pass("comm_init_all")
@dataclass(frozen=True)
class CommInitAll(Pass):
    """Joins all devices of one process, at the end of the startup program.

    There are no peers to wait for, and no state to transfer: one process initializes the state, and
    all its devices use it. So the startup program remains a program for one device.

    Before::

        program startup
          param w: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}

    After::

        program startup
          param w: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}
              c_comm_init_all() {ring_id=0}
    """

    ring_id: int = 0

    def run(self, program: Program) -> Program:
        if any(op.type == "c_comm_init_all" for op in program.root.ops):
            raise PassError(f"{self.name}: the program joins all devices already")
        join = made_by(Operator("c_comm_init_all", attrs=Attrs({"ring_id": self.ring_id})), self)
        return program.with_block(program.root.with_ops([*program.root.ops, join]))


@register_pass("broadcast_params")
@dataclass(frozen=True)
class BroadcastParams(Pass):
    """Broadcasts the parameters that rank `root` initialized to every rank.

    Ranks draw their own random numbers, and must start equal to stay equal. Other state is
    initialized with constants and not sent. Runs after `comm_init`, which creates the rings.

    Before::

        program startup {nranks=2, rank=0, role="collective"}
          param w: f32[3]
          block 0
            forward
              Out=w = uniform_random() {shape=[3]}

    After::

        program startup {nranks=2, rank=0, role="collective"}
          param w: f32[3]
          block 0
            forward
              Out=w = uniform_random() {shape=[3]}
              Out=w = c_broadcast(X=w) {ring_id=0, root=0, use_calc_stream=false}
              Out=w = c_sync_comm_stream(X=w) {ring_id=0}
    """

    nrings: int = 1
    root: int = 0
    skip: tuple[str, ...] = ()  # parameters of which each rank has rows of its own

    runs_after = ("comm_init",)

    def run(self, program: Program) -> Program:
        ring_ids = rings(self.nrings, self.name)
        names = [v.name for v in trained_parameters(program, self.skip)]
        if not names:
            return program
        ops = [self._broadcast(name, next(ring_ids)) for name in names]
        ops += wait_for_communication(names[-1], self.nrings, Role.FORWARD, Source())
        made = [made_by(op, self) for op in ops]
        return program.with_block(program.root.with_ops([*program.root.ops, *made]))

    def _broadcast(self, name: str, ring: int) -> Operator:
        attrs = Attrs({"ring_id": ring, "root": self.root, "use_calc_stream": False})
        return in_place_op("c_broadcast", name, attrs, Role.FORWARD, Source())
