"""The operators of a step that trainers run, and the checks that servers can run the rest."""

from dataclasses import dataclass, field
from typing import TypeAlias

from jaxfleet.analysis.flow import Effects, OuterUses
from jaxfleet.analysis.optimizer_groups import OptimizerGroups, Reason, find_optimizer_groups
from jaxfleet.analysis.optimizer_groups.optimize_section import gradients_of
from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operator, Program, Variable
from jaxfleet.passes.pserver.server_split import WAY_OUT, ServerSplit

_Stage: TypeAlias = tuple[str, str]  # a parameter's gradients or its update; "": crossing


@dataclass
class TrainerSplit:
    """The trainers' part of a step."""

    bodies: ServerSplit  # the servers' part
    # the operators that complete gradients for the optimizer
    completions: dict[int, str] = field(default_factory=dict)
    places: set[int] = field(default_factory=set)  # the operators of block 0 that trainers run
    # the server-made values that they read, by operator
    needs: dict[int, set[str]] = field(default_factory=dict)
    # the operator of the step that makes a server's value for trainers, by name
    made: dict[str, int] = field(default_factory=dict)
    # the values that trainers need from servers, by parameter; "" for those of several
    exports: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # the state that servers update and trainers read; they receive it as parameters
    state: set[str] = field(default_factory=set)
    _makers: list[dict[str, int]] = field(default_factory=list)
    _effects: Effects = field(default_factory=Effects)

    def __post_init__(self) -> None:
        groups = self.bodies.groups
        self._root = groups.program.root.ops
        self._server_of = {place: group.name for group in groups.groups for place in group.ops}
        self._server_of.update(dict.fromkeys(groups.crossing_ops, ""))
        self._find_completions()
        self._find_makers()
        self._visit(self._start())
        self._refuse_late_feeds()
        self._refuse_updates_that_wait_for_themselves()

    def is_collective(self, op: Operator) -> bool:
        return self._effects.is_collective(op)

    def is_made(self, name: str, before: int) -> bool:
        """Whether a variable has its final value before an operator of the step."""
        return self._last.get(name, -1) < before

    @property
    def summed(self) -> frozenset[str]:
        """The gradients of which every trainer has a summand."""
        return frozenset(self.completions.values())

    def _find_completions(self) -> None:
        wanted = {name for group in self.bodies.groups.groups for name in group.gradients}
        for place, op in enumerate(self._root):
            pairs = [gradient for _, gradient in op.role_var if gradient in op.writes]
            is_sum = op.type == "c_allreduce_sum" and len(op.writes) == 1
            if is_sum and pairs and pairs[0] in wanted:
                # Other readers of the whole gradient receive it from the server that sums it.
                self.completions[place] = pairs[0]
                self._server_of[place] = op.role_var[0][0]

    def _find_makers(self) -> None:
        """Finds, for every operator, the makers of its inputs; -1 for none."""
        uses, made = OuterUses(self.bodies.groups.program), dict[str, int]()
        for place, op in enumerate(self._root):
            used = uses.of(op)
            self._makers.append({name: made.get(name, -1) for name in used.reads})
            made.update(dict.fromkeys(used.writes, place))
        self._last = made

    def _start(self) -> list[int]:
        program = self.bodies.groups.program
        params = {group.name for group in self.bodies.groups.groups}
        self.made.update((name, self._last[name]) for name in params)
        own = [
            v.name
            for v in program.of_kind(Kind.PARAM, Kind.STATE)
            if v.name not in params and v.name not in self.bodies.server_state
        ]
        found = [self._last[name] for name in own if name in self._last]
        gradients = {name for group in self.bodies.groups.groups for name in group.gradients}
        found += [self._last[name] for name in (*sorted(gradients), *self.bodies.feeds)
                  if name in self._last]  # fmt: skip
        found += [at for at, op in enumerate(self._root) if self._effects.has_effect(op)]
        return found

    def _visit(self, left: list[int]) -> None:
        while left:
            place = left.pop()
            if place in self.places:
                continue
            self.places.add(place)
            for name, maker in self._makers[place].items():
                if maker in self._server_of:
                    self.needs.setdefault(place, set()).add(name)
                    self._receive(name, maker)
                elif maker >= 0:
                    left.append(maker)
                elif name in self.bodies.server_state:
                    self.state.add(name)
                    if (last := self._last.get(name)) is not None:
                        self._receive(name, last)

    def _receive(self, name: str, maker: int) -> None:
        param = self._server_of[maker]
        self.made[name] = maker
        if name == param:
            return
        known = self.exports.get(param, ())
        if name not in known:
            self.exports[param] = (*known, name)

    def _late(self) -> set[int]:
        """Returns the operators that depend on server-made values of the same step."""
        found: set[int] = set()
        for place in sorted(self.places):
            if place in self.needs or not found.isdisjoint(self._makers[place].values()):
                found.add(place)
        return found

    def _refuse_late_feeds(self) -> None:
        late = self._late()
        for name in self.bodies.feeds:
            if (maker := self._last.get(name, -1)) in late:
                what = (
                    f"the optimizer reads '{name}', which trainers make of what servers give them "
                    "in the same step"
                )
                raise PassError(what, op=self._root[maker], hint=WAY_OUT)

    def _refuse_updates_that_wait_for_themselves(self) -> None:
        """Rejects a gradient that depends on a server's result from that gradient.

        A server updates a parameter once all its gradients have arrived. If one of them depends on
        an earlier update of the parameter in the same step, server and trainers would deadlock.
        """
        waits = self._waits()
        for group in self.bodies.groups.groups:
            reached, left = set[_Stage](), [("gradients", group.name)]
            while left:
                found = waits[left.pop()] - reached
                reached |= found
                left += found
            if ("gradients", group.name) in reached:
                what = (
                    f"a gradient of '{group.name}' depends on what servers make of another "
                    "gradient in the same step"
                )
                raise PassError(what, op=self._root[group.ops[-1]], hint=WAY_OUT)

    def _waits(self) -> dict[_Stage, set[_Stage]]:
        """Returns the dependencies among gradients, crossing sums and new parameters."""
        needed: list[set[str]] = []  # whose updates trainers need before each operator
        for makers in self._makers:
            of_servers = {self._server_of[at] for at in makers.values() if at in self._server_of}
            own = [at for at in makers.values() if at >= 0 and at not in self._server_of]
            needed.append(of_servers.union(*(needed[at] for at in own)))
        crossing: _Stage = ("update", "")
        waits: dict[_Stage, set[_Stage]] = {crossing: set()}
        for group in self.bodies.groups.groups:
            gradients: _Stage = ("gradients", group.name)
            places = [self._last[name] for name in group.gradients if name in self._last]
            waits[gradients] = {("update", name) for at in places for name in needed[at]}
            waits["update", group.name] = {gradients}
            if any(
                self._server_of.get(at) == ""
                for place in group.ops
                for at in self._makers[place].values()
            ):
                waits["update", group.name].add(crossing)
            if self.bodies.updates[group.name].part is not None:
                waits[crossing].add(gradients)
        return waits


def update_obstacle(program: Program) -> Reason | None:
    """Returns the reason why servers cannot run a captured step's update, or None if they can.

    The step may already be divided among trainers.
    """
    groups = find_optimizer_groups(program)
    if (op := first_batch_operator(groups)) is not None:
        return Reason("the optimizer computes with the batch", op)
    try:
        TrainerSplit(ServerSplit(groups))
    except PassError as error:
        return Reason(error.what, error.op if isinstance(error.op, Operator) else None)
    return None


def first_batch_operator(groups: OptimizerGroups) -> Operator | None:
    """Returns the first operator of the update that needs rows of the batch, or sums over them."""
    effects, program = Effects(), groups.program
    places = {*groups.lr_ops, *groups.crossing_ops, *(at for g in groups.groups for at in g.ops)}
    for place in sorted(places):
        op = program.root.ops[place]
        used = [program.lookup(name) for name in (*op.reads, *op.writes)]
        if effects.is_collective(op) or any(map(_has_rows, used)):
            return op
    return None


def _has_rows(variable: Variable) -> bool:
    is_fed = variable.kind is Kind.DATA and bool(variable.shape)
    return is_fed or not all(isinstance(size, int) for size in variable.shape)


_WAY_OUT = (
    "communication='geo' and 'fl' leave the optimizer on trainers and can do this; so can 'sync'"
)


def check_updates_are_separable(groups: OptimizerGroups) -> None:
    """Rejects a step whose update cannot run on servers: it uses the batch, or is in a loop."""
    if (op := first_batch_operator(groups)) is not None:
        raise PassError("the optimizer computes with the batch", op=op, hint=_WAY_OUT)
    for group in groups.groups:
        if not group.gradients:
            ops = [groups.program.root.ops[place] for place in group.ops[:1]]
            what = f"the update of '{group.name}' runs inside a loop or a branch"
            raise PassError(what, op=ops[0] if ops else None, hint=_WAY_OUT)


def check_async_is_possible(bodies: ServerSplit, work: TrainerSplit) -> None:
    """Rejects a step in which trainers and servers would have to wait for each other."""
    ops = bodies.groups.program.root.ops
    if bodies.combine is not None:
        place = bodies.groups.crossing_ops[0]
        what = f"the optimizer brings parameters together ('{ops[place].writes[0]}')"
        what = f"{what}, and servers that do not wait for all trainers cannot"
        hint = f"clip gradients before jf.distributed_optimizer's update; {_WAY_OUT}"
        raise PassError(what, op=ops[place], hint=hint)
    if work.state:
        what = f"trainers read '{min(work.state)}', which servers update with the parameters"
        op = next(op for op in ops if min(work.state) in op.reads)
        raise PassError(what, op=op, hint=_WAY_OUT)
    sent = {name for group in bodies.groups.groups for name in group.gradients}
    for gradient, param in gradients_of(bodies.groups.program).items():
        if gradient not in sent:
            what = f"'{param}' is updated more than once in a step, and servers make one update"
            raise PassError(what, op=next(op for op in ops if gradient in op.writes), hint=_WAY_OUT)
    for place, names in sorted(work.needs.items()):
        what = f"trainers read '{min(names)}', which servers make in the same step"
        raise PassError(what, op=ops[place], hint=_WAY_OUT)
