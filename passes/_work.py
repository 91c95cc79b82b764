"""Says which operators of a step trainers run, and what they must get from servers for it."""

from dataclasses import dataclass, field
from typing import TypeAlias

from jaxfleet.analysis.uses import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operator
from jaxfleet.passes._bodies import WAY_OUT, Bodies
from jaxfleet.passes._effects import Effects

_Stage: TypeAlias = tuple[str, str]  # gradients of a parameter, or its update; "" for what crosses


@dataclass
class Work:
    """What trainers do of a step.

    Attributes:
        bodies: what servers do.
        completions: the operators that complete gradients for the optimizer.
        places: the operators of block 0 that trainers run.
        needs: what those of them read that servers make, by operator.
        made: the operator of the step that makes what servers make for trainers, by name.
        exports: what trainers need of servers, by parameter; "" for what is of several.
        state: the state that servers update and trainers read; they receive it as parameters.
    """

    bodies: Bodies
    completions: dict[int, str] = field(default_factory=dict)
    places: set[int] = field(default_factory=set)
    needs: dict[int, set[str]] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    exports: dict[str, tuple[str, ...]] = field(default_factory=dict)
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
        """Tells whether trainers must run an operator together."""
        return self._effects.is_collective(op)

    def is_made(self, name: str, before: int) -> bool:
        """Tells whether a variable is not written any more from an operator of the step on."""
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
                # Whoever else needs all of the gradient gets it from the server that sums it.
                self.completions[place] = pairs[0]
                self._server_of[place] = op.role_var[0][0]

    def _find_makers(self) -> None:
        """Finds, for every operator, which one made what it reads; -1 for none."""
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
        """Returns the operators that depend on what servers make in the same step."""
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
        """Refuses a gradient that depends on what a server makes with that gradient.

        A server updates a parameter once all its gradients are there. Where one of them depends on
        an earlier update of the parameter in the same step, it and the trainers would wait for
        each other.
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
        """Returns what has to be there before what: gradients, sums that cross, new parameters."""
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
