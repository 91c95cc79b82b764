"""A trainer's program: the step with the exchange instead of its optimize section."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.placement.sliced_layout import Slice
from jaxfleet.ir import (
    Attrs,
    Kind,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
    trainer_name,
)
from jaxfleet.passes.pserver.job import Mark, PServerJob, exchange_op, named_trainer
from jaxfleet.passes.pserver.server_split import ServerSplit
from jaxfleet.passes.pserver.trainer_split import TrainerSplit


def trainer_program(
    bodies: ServerSplit, job: PServerJob, work: TrainerSplit, trainer_id: int, mark: Mark
) -> Program:
    """Returns the program of a trainer."""
    return _Trainer(bodies, job, work, trainer_id, mark).run()


@dataclass
class _Trainer:
    bodies: ServerSplit
    job: PServerJob
    work: TrainerSplit
    trainer_id: int
    mark: Mark
    ops: list[Operator] = field(default_factory=list)
    declared: dict[str, Variable] = field(default_factory=dict)
    received: set[str] = field(default_factory=set)
    fed: set[str] = field(default_factory=set)
    collectives: int = 0

    def run(self) -> Program:
        program, work = self.bodies.groups.program, self.work
        fetches: list[Operator] = []
        for place, op in enumerate(program.root.ops):
            if place in work.completions:
                ((param, gradient),) = op.role_var
                self._send(param, gradient, op)
            elif op.type == "fetch":
                fetches.append(op)
            elif place in work.places:
                if not work.needs.get(place, set()) <= self.received:
                    self._receive(place)
                self.ops.append(self._with_endpoint(op))
            self._send_whole_gradients(op)
        self._receive(len(program.root.ops))
        for op in fetches:
            self.ops.append(self._gathered(op))
        return self._program()

    def _program(self) -> Program:
        program = self.bodies.groups.program
        dropped = self.bodies.server_state - self.work.state
        variables = {n: v for n, v in program.variables.items() if n not in dropped}
        mode = self.job.mode.facts()
        if mode and self.bodies.feeds:
            mode["feeds"] = tuple(sorted(self.bodies.feeds))
        block = program.root.with_ops(self.ops, declare=self.declared.values())
        made = replace(program, variables=variables).with_block(block.without_unused())
        return named_trainer(program, made, self.job, self.trainer_id, mode)

    def _with_endpoint(self, op: Operator) -> Operator:
        """Returns the operator; a collective gets the server that runs it."""
        if not self.work.is_collective(op):
            return op
        self.collectives += 1
        endpoint = self.job.endpoints[self.collectives % len(self.job.endpoints)]
        return replace(op, attrs=op.attrs.updated(endpoint=endpoint))

    def _gathered(self, fetch: Operator) -> Operator:
        """Gathers a fetched value that is in rows; returns the fetch of the whole."""
        program, names = self.bodies.groups.program, dict[str, str]()
        axes = {name: axis for name, axis in sharded_axes(program) if name in fetch.reads}
        for name, axis in axes.items():
            names[name] = f"{name}.whole"
            like = program.lookup(name)
            shape = list(like.shape)
            shape[axis] = shape[axis] * self.job.trainers
            whole = replace(like, name=names[name], shape=tuple(shape), kind=Kind.TEMP)
            self.declared[whole.name] = whole
            attrs = Attrs({"axis": axis, "devices": self.job.trainers})
            op = Operator("c_allgather", Operands.of(name), Operands.of(names[name]), attrs)
            self.ops.append(self.mark(self._with_endpoint(op)))
        return replace(fetch, inputs=fetch.inputs.renamed(names))

    def _send(self, param: str, gradient: str, near: Operator) -> None:
        """Sends a gradient to the servers of its parameter's slices, cut like the parameter.

        The gradient is the trainer's summand, or all of it, which only trainer 0 sends. `near` is
        the replaced operator, for the source line.
        """
        cuts, is_summed = self.job.of(param), gradient in self.job.summed
        if not is_summed and self._is_told():
            return
        own = self.job.trainers > 1 and is_summed
        names = [
            trainer_name(name, self.trainer_id) if own else name
            for name in (self.job.name(gradient, cut) for cut in cuts)
        ]
        like = self.bodies.groups.program.lookup(gradient)
        for name, cut in zip(names, cuts, strict=True):
            if name != gradient:
                self.declared[name] = replace(like, name=name, shape=cut.shape, kind=Kind.TEMP)
        if len(cuts) > 1:
            rows = tuple(cut.rows for cut in cuts)
            split = exchange_op("split_byref", [gradient], names, sections=rows)
            self._add(replace(split, source=near.source))
        elif names[0] != gradient:
            self._call(gradient, names[0], near)
        send = exchange_op("send", names, epmap=self.job.endpoints_of(cuts))
        self._add(replace(send, role_var=((param, gradient),), source=near.source))

    def _is_told(self) -> bool:
        """Whether trainer 0 sends replicated values for this one, as in sync mode."""
        return self.trainer_id > 0 and self.job.mode.is_sync

    def _call(self, gradient: str, name: str, near: Operator) -> None:
        """Renames a gradient: at its maker, if that came just before."""
        if self.ops and self.ops[-1].writes == (gradient,):
            made = self.ops.pop()
            self.ops.append(replace(made, outputs=made.outputs.renamed({gradient: name})))
            return
        ins, outs, role = Operands.of(gradient), Operands.of(name), Role.BACKWARD
        self.ops.append(Operator("assign", ins, outs, role=role, source=near.source))

    def _send_whole_gradients(self, op: Operator) -> None:
        """Sends, from trainer 0, an operator's gradients that no sum completes."""
        gradients = {name: g.name for g in self.bodies.groups.groups for name in g.gradients}
        for name in op.writes:
            if name in gradients and name not in self.job.summed:
                self._send(gradients[name], name, op)

    def _send_feeds(self, before: int) -> None:
        """Sends, from trainer 0, values other than gradients to servers, once made."""
        if self._is_told():
            return
        for name in self.bodies.feeds:
            if name in self.fed or not self.work.is_made(name, before):
                continue
            self.fed.add(name)
            to = self._readers(name)
            self._add(exchange_op("send", [name] * len(to), epmap=to))

    def _readers(self, feed: str) -> tuple[str, ...]:
        bodies, job = self.bodies, self.job
        common = [bodies.lr] if bodies.combine is None else [bodies.lr, bodies.combine]
        if any(feed in body.variables for body in common):
            return job.sharers()
        readers = {
            job.placement[cut.name]
            for param, update in bodies.updates.items()
            for body in (update.part, update.rest)
            if body is not None and feed in body.variables
            for cut in job.of(param)
        }
        return tuple(endpoint for endpoint in job.endpoints if endpoint in readers)

    def _receive(self, before: int) -> None:
        """Receives values that servers make from values fed before an operator of the step."""
        self._send_feeds(before)
        made = {name for name, place in self.work.made.items() if place < before}
        found = [(name, cuts) for name, cuts in self._receivable() if name in made - self.received]
        self.received |= made
        self._barrier("send_barrier")
        joins = [join for name, cuts in found for join in self._receive_one(name, cuts)]
        self._barrier("fetch_barrier")
        for op in joins:
            self._add(op)

    def _barrier(self, op_type: str) -> None:
        if self.job.mode.is_sync:
            endpoints, trainer_id = self.job.endpoints, self.trainer_id
            self._add(exchange_op(op_type, endpoints=endpoints, trainer_id=trainer_id))

    def _receivable(self) -> Iterator[tuple[str, Sequence[Slice]]]:
        for group in self.bodies.groups.groups:
            cuts = self.job.of(group.name)
            yield group.name, cuts
            for name in self.job.exports.get(group.name, ()):
                yield name, cuts
        for name in self.job.exports.get("", ()):
            yield name, ()

    def _receive_one(self, name: str, cuts: Sequence[Slice]) -> Iterator[Operator]:
        like, held = self.bodies.groups.program.lookup(name), {Kind.PARAM, Kind.STATE}
        cuts = cuts if self._is_in_rows(name, cuts) else cuts[:1]
        names = [self.job.name(name, cut) for cut in cuts] or [name]
        if like.kind not in held or name in self.bodies.server_state - self.work.state:
            self.declared.setdefault(name, replace(like, kind=Kind.TEMP))
        for part, cut in zip(names, cuts, strict=False):
            if part != name:
                shape = (cut.rows, *like.shape[1:]) if len(cuts) > 1 else like.shape
                self.declared[part] = replace(like, name=part, shape=shape, kind=Kind.TEMP)
        epmap = self.job.endpoints_of(cuts) or self.job.sharers()[:1]
        self._add(exchange_op("recv", (), names, epmap=epmap, trainer_id=self.trainer_id))
        if len(names) > 1:
            yield exchange_op("concat", names, [name], axis=0)
        elif names != [name]:
            yield exchange_op("assign", names, [name])

    def _is_in_rows(self, name: str, cuts: Sequence[Slice]) -> bool:
        """Whether each slice has rows of a server's value; of a scalar, each has all."""
        if len(cuts) < 2 or name not in self.work.state:
            return True
        body = self.bodies.cut(cuts[0].param, cuts[0].rows)
        return not all(isinstance(size, int) for size in body.variables[name].shape)

    def _add(self, op: Operator) -> None:
        self.ops.append(self.mark(op))


def sharded_axes(program: Program) -> Iterator[tuple[str, int]]:
    """Yields the sharded inputs and outputs, with the axis."""
    pairs = program.attrs.get("sharded", ())
    assert isinstance(pairs, tuple)
    for pair in pairs:
        match pair:
            case (str(name), int(axis)):
                yield name, axis
