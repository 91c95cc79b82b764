"""Jobs in fluid's dialect whose trainers update: GEO-SGD, and federated averaging."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxfleet.analysis.placement.sliced_layout import endpoints_of, placement_of, slices_of
from jaxfleet.analysis.updates import LOOKUPS, Updates, is_fluid_dialect
from jaxfleet.errors import PassError
from jaxfleet.ir import (
    Attr,
    Attrs,
    Kind,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
    trainer_name,
)
from jaxfleet.passes.fluid.job import GEO, Messages, ServerBlocks
from jaxfleet.pipeline import Pass, made_by, register_pass


def delta_name(slice_name: str) -> str:
    """Returns the name of a slice's delta: `w.block0.delta`."""
    return f"{slice_name}.delta"


PUSH_EVERY = "push_every"  # in a trainer's facts: steps between exchanges
_NUMBER = 3  # fluid's number of the mode


@dataclass(frozen=True)
class _LocalTraining(Pass):
    """Writes the programs of a job whose trainers update."""

    trainer_id: int = 0  # the trainer whose program is written
    server: int = -1  # the server whose program is written instead; -1: a trainer's
    trainers: int = 1

    runs_after = ("slice_var", "dispatch")

    def run(self, program: Program) -> Program:
        if not is_fluid_dialect(program):
            what = f"{self.name}: roles do not say what updates what"
            raise PassError(what, hint="it is for programs in fluid's dialect")
        self._check(program)
        return self._server(program) if self.server >= 0 else self._trainer(program)

    @abstractmethod
    def _check(self, program: Program) -> None:
        """Raises PassError if servers cannot hold the program's parameters."""

    @abstractmethod
    def _trainer(self, program: Program) -> Program: ...

    @abstractmethod
    def _server(self, program: Program) -> Program: ...

    def _as_trainers(self, program: Program, mode: str, **facts: Attr) -> Program:
        """Returns a program with the attributes and name of a trainer's."""
        number = self.trainer_id
        attrs = program.attrs.updated(
            mode=mode, role="trainer", trainer_id=number, trainers=self.trainers, **facts
        )
        return replace(program, attrs=attrs, name=f"{program.name}.trainer{number}")

    def _mark(self, op: Operator) -> Operator:
        return made_by(op, self)


@register_pass("geo_sgd")
@dataclass(frozen=True)
class GeoSgd(_LocalTraining):
    """Writes a trainer's program, or a server's, for trainers that update their own parameters.

    A trainer's step stays whole: it updates its own parameters, and at its end records the rows of
    sparse tables that it looked up (`send`). Every few steps its runtime sends the changes since
    the last exchange, divided by the number of trainers, and receives those of the others. A server
    adds received deltas to its parameters, and has no optimizer.

    Before::

        program p {dialect="fluid", endpoints=["s:1"], placement=[["w", "s:1"]], slices=[["w", [4]]]}
          param w: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = assign(w) for (w, w@GRAD)
            optimize
              ParamOut=w = sgd(Grad=w@GRAD, Param=w) for (w, w@GRAD)

    After::

        program p.trainer0 {dialect="fluid", endpoints=["s:1"], mode="geo", on_servers=[], placement=[["w", "s:1"]], prefetched=[], role="trainer", slices=[["w", [4]]], trainer_id=0, trainers=1}
          param w: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = assign(w) for (w, w@GRAD)
            optimize
              ParamOut=w = sgd(Grad=w@GRAD, Param=w) for (w, w@GRAD)
            forward
              send(X=[]) {send_varnames=[]}
    """  # noqa: E501  # a program's attributes are one line

    def _check(self, program: Program) -> None:
        updates = Updates(program)
        if updates.tables:
            what = f"geo_sgd: '{min(updates.tables)}' is distributed, and trainers hold all rows"
            raise PassError(what, hint="make the embedding with is_sparse=True alone")

    def _trainer(self, program: Program) -> Program:
        updates = Updates(program)
        ops = [_by_itself(op) for op in program.root.ops]
        sparse = [op for op in ops if op.type in LOOKUPS and op.attrs.get("is_sparse")]
        asked = [(str(n), str(op.inputs.slot("W")[0]))
                 for op in sparse for n in op.inputs.slot("Ids")]  # fmt: skip
        said = Attrs({"send_varnames": tuple(table for _, table in asked)})
        ids = Operands.named(X=[name for name, _ in asked])
        ops.append(self._mark(Operator("send", ids, attrs=said, role=Role.FORWARD)))
        prefetched = tuple(sorted(updates.prefetched))
        made = self._as_trainers(program, GEO, on_servers=(), prefetched=prefetched)
        return made.with_block(made.root.with_ops(ops))

    def _server(self, program: Program) -> Program:
        updates, endpoints = Updates(program), endpoints_of(program)
        placement, endpoint = placement_of(program), endpoints[self.server]
        made = ServerBlocks(program, endpoint, self.server, self.trainers)
        here = [cut for cut in slices_of(program) if placement[cut.name] == endpoint]
        sparse: list[str] = []
        for cut in sorted(here, key=lambda cut: updates.places[cut.param]):
            delta = delta_name(cut.name)
            made.declare(cut.param, cut.name, Kind.PARAM, cut)
            made.declare(cut.param, delta, Kind.DATA, cut)
            read, out = Operands.named(X=(cut.name, delta)), Operands.named(Out=cut.name)
            pair = ((cut.name, delta),)
            added = Operator("sum", read, out, role=Role.OPTIMIZE, role_var=pair)
            made.add_block([self._mark(added)], delta)
            if cut.param in updates.prefetched:
                sparse.append(f"{delta}:{cut.name}")
        facts: dict[str, Attr] = {
            "distributed_mode": _NUMBER,
            "sparse_grad_to_param": tuple(sparse),
        }
        return made.program("listen_and_serv", GEO, facts, self._mark)


def _by_itself(op: Operator) -> Operator:
    if not op.attrs.get("remote_prefetch"):
        return op
    return replace(op, attrs=op.attrs.updated(remote_prefetch=False))


AVERAGED = "fl"  # the mode in which servers average
SAMPLES = "@FL_SAMPLES@"  # the number of samples that weights a trainer's parameters
SPLIT_NUM = "split_num"


@register_pass("fl_average")
@dataclass(frozen=True)
class FlAverage(_LocalTraining):
    """Writes a trainer's program, or a server's, for federated averaging of parameters.

    A trainer updates by its own optimizer, keeps a copy of each parameter (`w.opti.trainer_0`), and
    sends the copies instead of gradients. A server takes their mean (McMahan et al.,
    "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017, section 3).
    `split_num` is where a caller divides the program into the part that trains, many times per
    round, and the part that sends, once. With `weighted` a trainer's parameters are weighted by the
    number of samples that it feeds as `@FL_SAMPLES@`, as in that paper; without, all weights are
    equal, as in PaddleFL.

    Before::

        program p {dialect="fluid", endpoints=["s:1"], placement=[["w", "s:1"]], slices=[["w", [4]]]}
          param w: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = assign(w) for (w, w@GRAD)
            optimize
              ParamOut=w = sgd(Grad=w@GRAD, Param=w) for (w, w@GRAD)

    After::

        program p.trainer0 {dialect="fluid", endpoints=["s:1"], mode="fl", placement=[["w", "s:1"]], role="trainer", slices=[["w", [4]]], split_num=3, trainer_id=0, trainers=1}
          param w: f32[4]
          state w.opti.trainer_0: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = assign(w) for (w, w@GRAD)
            optimize
              ParamOut=w = sgd(Grad=w@GRAD, Param=w) for (w, w@GRAD)
              Out=w.opti.trainer_0 = scale(X=w) {scale=1.0} for (w, w.opti.trainer_0)
            rpc
              Out=__control_var@0: raw[] = send(X=w.opti.trainer_0) {epmap=["s:1"], sync_mode=true, trainer_id=0} for (w, w.opti.trainer_0)
              Out=__control_var@1: raw[] = send_barrier(X=__control_var@0) {endpoints=["s:1"], trainer_id=0}
    """  # noqa: E501  # a program's attributes are one line

    weighted: bool = False  # by the number of samples of each trainer

    def _check(self, program: Program) -> None:
        if Updates(program).tables:
            what = "fl_average: a distributed table has no copy on trainers that could be averaged"
            raise PassError(what, hint="make the embedding with is_distributed=False")
        whole = all(cut.is_whole for cut in slices_of(program))
        if not whole:
            what = "fl_average: parameters are sent whole, and some are cut"
            raise PassError(what, hint="run slice_var with slice=False")

    # --- trainer ---------------------------------------------------------------------------

    def _trainer(self, program: Program) -> Program:
        messages, kept = Messages(self._mark), list[Variable]()
        ops, sends = list(program.root.ops), list[Operator]()
        controls: list[str] = []
        for param, copy in self._copies(program):
            kept.append(replace(program.lookup(param), name=copy, kind=Kind.STATE))
            ops.append(self._copied(param, copy))
        # Weighted copies are made next to the send, when the number of samples is known.
        count = len(program.root.ops) if self.weighted else len(ops)
        placement = placement_of(program)
        if self.weighted:
            controls.append(messages.control())
            everywhere = tuple(sorted(set(placement.values())))
            sends.append(self._send(messages, [_samples(self.trainer_id)] * len(everywhere),
                                    controls[-1], everywhere))  # fmt: skip
        for param, copy in self._copies(program):
            controls.append(messages.control())
            op = self._send(messages, [copy], controls[-1], (placement[param],))
            sends.append(replace(op, role_var=((param, copy),)))
        everyone: dict[str, Attr] = {
            "endpoints": endpoints_of(program),
            "trainer_id": self.trainer_id,
        }
        sends.append(messages.rpc("send_barrier", controls, [messages.control()], everyone))
        variables = {**program.variables, **{v.name: v for v in kept}}
        if self.weighted:
            name = _samples(self.trainer_id)
            variables[name] = Variable(name, "f32", (1,), Kind.DATA)
        block = program.root.with_ops([*ops, *sends], declare=messages.declared.values())
        made = replace(program, variables=variables).with_block(block)
        return self._as_trainers(made, AVERAGED, **{SPLIT_NUM: count})

    def _copies(self, program: Program) -> Iterator[tuple[str, str]]:
        for param, _ in Updates(program).pairs:
            yield param, trainer_name(f"{param}.opti", self.trainer_id)

    def _copied(self, param: str, copy: str) -> Operator:
        out, pair = Operands.named(Out=copy), ((param, copy),)
        if self.weighted:
            read = Operands.named(X=param, Y=_samples(self.trainer_id))
            op = Operator("elementwise_mul", read, out, role=Role.OPTIMIZE, role_var=pair)
        else:
            attrs = Attrs({"scale": 1.0})
            op = Operator("scale", Operands.named(X=param), out, attrs, Role.OPTIMIZE, pair)
        return self._mark(op)

    def _send(
        self, messages: Messages, names: list[str], control: str, epmap: tuple[str, ...]
    ) -> Operator:
        attrs: dict[str, Attr] = {"epmap": epmap, "sync_mode": True, "trainer_id": self.trainer_id}
        return messages.rpc("send", names, [control], attrs)

    # --- server ----------------------------------------------------------------------------

    def _server(self, program: Program) -> Program:
        endpoint, placement = endpoints_of(program)[self.server], placement_of(program)
        made = ServerBlocks(program, endpoint, self.server, self.trainers)
        here = [cut.param for cut in slices_of(program) if placement[cut.name] == endpoint]
        if self.weighted and here:
            self._add_samples(made)
        for param in sorted(here, key=Updates(program).places.__getitem__):
            self._add_average(made, param)
        return made.program("fl_listen_and_serv", AVERAGED, {"sync_mode": True}, self._mark)

    def _add_samples(self, made: ServerBlocks) -> None:
        names = [_samples(trainer) for trainer in range(self.trainers)]
        for name in names:
            made.top[name] = Variable(name, "f32", (1,), Kind.DATA)
        made.blocks[0] = made.blocks[0].with_ops(
            (), declare=[Variable(SAMPLES, "f32", (1,), Kind.TEMP)]
        )
        ins, outs = Operands.named(X=names), Operands.named(Out=SAMPLES)
        made.add_block([self._mark(Operator("sum", ins, outs, role=Role.OPTIMIZE))], SAMPLES)

    def _add_average(self, made: ServerBlocks, param: str) -> None:
        copies = [trainer_name(f"{param}.opti", trainer) for trainer in range(self.trainers)]
        made.declare(param, param, Kind.PARAM)
        for copy in copies:
            made.declare(param, copy, Kind.DATA)
        out, pair = Operands.named(Out=param), ((param, f"{param}.opti"),)
        added = Operator("sum", Operands.named(X=copies), out, role=Role.OPTIMIZE, role_var=pair)
        if self.weighted:
            read = Operands.named(X=param, Y=SAMPLES)
            mean = Operator("elementwise_div", read, out, role=Role.OPTIMIZE, role_var=pair)
        else:
            attrs, read = Attrs({"scale": 1.0 / self.trainers}), Operands.named(X=param)
            mean = Operator("scale", read, out, attrs, Role.OPTIMIZE, pair)
        made.add_block([self._mark(added), self._mark(mean)], f"{param}.opti")


def receive_program(trainer: Program, mark_of: Pass | None = None) -> Program:
    """Returns the program with which a trainer receives the servers' results of the last round.

    Its operators are marked as made by the pass `mark_of`.
    """
    messages = Messages(lambda op: op if mark_of is None else made_by(op, mark_of))
    placement, number = placement_of(trainer), trainer.attrs["trainer_id"]
    params = [cut.param for cut in slices_of(trainer)]
    ops = [
        messages.rpc("recv", [], [name], {"epmap": (placement[name],), "trainer_id": number})
        for name in params
    ]
    everyone: dict[str, Attr] = {"endpoints": endpoints_of(trainer), "trainer_id": number}
    ops.append(messages.rpc("fetch_barrier", [], [messages.control()], everyone))
    variables = {name: trainer.variables[name] for name in params}
    block = replace(trainer.root, variables={}, ops=())
    block = block.with_ops(ops, declare=messages.declared.values())
    name = trainer.name.replace(".trainer", ".receive.trainer")
    return Program(name, variables, (block,), trainer.attrs)


def _samples(trainer: int) -> str:
    return trainer_name(SAMPLES, trainer)
