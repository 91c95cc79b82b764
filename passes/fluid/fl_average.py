"""Federated averaging in fluid's dialect: trainers update, and servers average their parameters."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxfleet.analysis.placement.sliced_layout import endpoints_of, placement_of, slices_of
from jaxfleet.analysis.updates import Updates, is_fluid_dialect
from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Attrs, Kind, Operands, Operator, Program, Role, Variable, trainer_name
from jaxfleet.passes.fluid.job import Messages, ServerBlocks
from jaxfleet.pipeline import Pass, made_by, register_pass

MODE = "fl"
SAMPLES = "@FL_SAMPLES@"  # the number of samples that weights a trainer's parameters
SPLIT_NUM = "split_num"

RpcAttrs = dict[str, Attr]


@register_pass("fl_average")
@dataclass(frozen=True)
class FlAverage(Pass):
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

    trainer_id: int = 0  # the trainer whose program is written
    server: int = -1  # the server whose program is written instead; -1: a trainer's
    trainers: int = 1
    weighted: bool = False  # by the number of samples of each trainer

    runs_after = ("slice_var", "dispatch")

    def run(self, program: Program) -> Program:
        if not is_fluid_dialect(program):
            what = "fl_average: roles do not say what updates what"
            raise PassError(what, hint="it is for programs in fluid's dialect")
        if Updates(program).tables:
            what = "fl_average: a distributed table has no copy on trainers that could be averaged"
            raise PassError(what, hint="make the embedding with is_distributed=False")
        whole = all(cut.is_whole for cut in slices_of(program))
        if not whole:
            what = "fl_average: parameters are sent whole, and some are cut"
            raise PassError(what, hint="run slice_var with slice=False")
        return self._server(program) if self.server >= 0 else self._trainer(program)

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
        everyone: RpcAttrs = {"endpoints": endpoints_of(program), "trainer_id": self.trainer_id}
        sends.append(messages.rpc("send_barrier", controls, [messages.control()], everyone))
        facts = program.attrs.updated(
            mode=MODE,
            role="trainer",
            trainer_id=self.trainer_id,
            trainers=self.trainers,
            **{SPLIT_NUM: count},
        )
        variables = {**program.variables, **{v.name: v for v in kept}}
        if self.weighted:
            name = _samples(self.trainer_id)
            variables[name] = Variable(name, "f32", (1,), Kind.DATA)
        block = program.root.with_ops([*ops, *sends], declare=messages.declared.values())
        made = replace(program, variables=variables, attrs=facts).with_block(block)
        return replace(made, name=f"{program.name}.trainer{self.trainer_id}")

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
        attrs: RpcAttrs = {"epmap": epmap, "sync_mode": True, "trainer_id": self.trainer_id}
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
        return made.program("fl_listen_and_serv", MODE, {"sync_mode": True}, self._mark)

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

    def _mark(self, op: Operator) -> Operator:
        return made_by(op, self)


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
    everyone: RpcAttrs = {"endpoints": endpoints_of(trainer), "trainer_id": number}
    ops.append(messages.rpc("fetch_barrier", [], [messages.control()], everyone))
    variables = {name: trainer.variables[name] for name in params}
    block = replace(trainer.root, variables={}, ops=())
    block = block.with_ops(ops, declare=messages.declared.values())
    name = trainer.name.replace(".trainer", ".receive.trainer")
    return Program(name, variables, (block,), trainer.attrs)


def _samples(trainer: int) -> str:
    return trainer_name(SAMPLES, trainer)
