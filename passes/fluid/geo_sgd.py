"""GEO-SGD in fluid's dialect: trainers update and exchange deltas, which servers add up."""

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
)
from jaxfleet.passes.fluid.job import GEO, ServerBlocks
from jaxfleet.pipeline import Pass, made_by, register_pass


def delta_name(slice_name: str) -> str:
    """Returns the name of a slice's delta: `w.block0.delta`."""
    return f"{slice_name}.delta"


PUSH_EVERY = "push_every"  # in a trainer's facts: steps between exchanges
_NUMBER = 3  # fluid's number of the mode


@register_pass("geo_sgd")
@dataclass(frozen=True)
class GeoSgd(Pass):
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

    trainer_id: int = 0  # the trainer whose program is written
    server: int = -1  # the server whose program is written instead; -1: a trainer's
    trainers: int = 1

    runs_after = ("slice_var", "dispatch")

    def run(self, program: Program) -> Program:
        if not is_fluid_dialect(program):
            what = "geo_sgd: roles do not say what updates what"
            raise PassError(what, hint="it is for programs in fluid's dialect")
        updates = Updates(program)
        if updates.tables:
            what = f"geo_sgd: '{min(updates.tables)}' is distributed, and trainers hold all rows"
            raise PassError(what, hint="make the embedding with is_sparse=True alone")
        return self._server(program) if self.server >= 0 else self._trainer(program)

    def _trainer(self, program: Program) -> Program:
        updates = Updates(program)
        ops = [_by_itself(op) for op in program.root.ops]
        sparse = [op for op in ops if op.type in LOOKUPS and op.attrs.get("is_sparse")]
        asked = [(str(n), str(op.inputs.slot("W")[0]))
                 for op in sparse for n in op.inputs.slot("Ids")]  # fmt: skip
        said = Attrs({"send_varnames": tuple(table for _, table in asked)})
        ids = Operands.named(X=[name for name, _ in asked])
        ops.append(self._mark(Operator("send", ids, attrs=said, role=Role.FORWARD)))
        facts = program.attrs.updated(
            mode=GEO,
            on_servers=(),
            prefetched=tuple(sorted(updates.prefetched)),
            role="trainer",
            trainer_id=self.trainer_id,
            trainers=self.trainers,
        )
        made = replace(program, attrs=facts, name=f"{program.name}.trainer{self.trainer_id}")
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

    def _mark(self, op: Operator) -> Operator:
        return made_by(op, self)


def _by_itself(op: Operator) -> Operator:
    if not op.attrs.get("remote_prefetch"):
        return op
    return replace(op, attrs=op.attrs.updated(remote_prefetch=False))
