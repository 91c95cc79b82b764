"""Recomputation: backward recomputes parts of forward, group by group, in own executables."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxfleet.analysis.flow import OuterUses, forward_places
from jaxfleet.analysis.ssa import in_single_assignment
from jaxfleet.errors import PassError
from jaxfleet.ir import (
    Dim,
    Kind,
    Literal,
    Operands,
    Operator,
    Program,
    Role,
    Size,
    Variable,
    evaluate,
)
from jaxfleet.ir.naming import next_name, recomputed_name, unique
from jaxfleet.passes.building_blocks import OperatorCopies
from jaxfleet.passes.memory.recompute_schedule import (
    ForwardGroups,
    RecomputeSchedule,
    UpdateChunks,
    by_time,
)
from jaxfleet.pipeline import Pass, made_by, register_pass


@dataclass(frozen=True)
class Repetition:
    """A repeating stretch of a list: its first index, period, and total length."""

    start: int
    period: int
    length: int


def longest_repetition(items: Sequence[Any], *, least: int) -> Repetition | None:
    """Returns the longest stretch with at least `least` repetitions, of the shortest period."""
    numbers: dict[Any, int] = {}
    row = np.array([numbers.setdefault(item, len(numbers)) for item in items], dtype=np.int64)
    best: Repetition | None = None
    for period in range(1, len(row) // least + 1):
        start, count = _longest(row[period:] == row[:-period])
        length = count + period
        if length >= least * period and (best is None or length > best.length):
            best = Repetition(start, period, length)
    return best


def _longest(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Returns the start and the length of the longest run of true."""
    ends = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    if not len(ends):
        return 0, 0
    starts, stops = ends[::2], ends[1::2]
    at = int(np.argmax(stops - starts))
    return int(starts[at]), int(stops[at] - starts[at])


_LEAST = 3  # layers
_ROWS = 256  # assumed batch size if unknown


def default_cut_points(program: Program) -> tuple[int, ...]:
    """Returns the indices of the first operators of all groups but the first.

    The number of groups is about that of operators in each, which minimizes the sum of both (Chen
    et al., 2016); near the end of each equal share, the cut is made where the fewest bytes cross.
    """
    places = sorted(forward_places(program))
    groups = math.isqrt(len(places))
    if groups < 2:
        return ()
    crossing = _crossing(program, places)
    if (layers := _repeated(program, places)) is not None:
        return tuple(places[n] for n in _between_layers(layers, groups, crossing))
    width = len(places) / groups
    found = set()
    for group in range(1, groups):
        middle = group * width
        near = range(max(1, math.ceil(middle - width / 2)), math.floor(middle + width / 2) + 1)
        inside = [place for place in near if place < len(places)]
        found.add(min(inside, key=lambda n: (crossing[n], abs(n - middle), -n)))
    return tuple(places[n] for n in sorted(found))


def _repeated(program: Program, places: list[int]) -> Repetition | None:
    """Returns the layers of forward, if most of it is equal layers."""
    ops = [program.root.ops[place] for place in places]
    found = longest_repetition([_looks(program, op) for op in ops], least=_LEAST)
    return found if found is not None and 2 * found.length >= len(places) else None


def _looks(program: Program, op: Operator) -> str:
    """Returns the properties that an operator shares with its counterparts in other layers."""
    attrs = "" if op.blocks else str(dict(op.attrs))
    types = [x.dtype if isinstance(x, Literal) else program.lookup(x).type for x in op.inputs]
    return f"{op.type} {attrs} {types} {[program.lookup(x).type for x in op.writes]}"


def _between_layers(layers: Repetition, groups: int, crossing: list[int]) -> list[int]:
    """Returns the starts of groups of equally many layers, where the least crosses in a layer."""
    count = layers.length // layers.period
    step = layers.period * max(1, round(count / groups))

    def cuts(first: int) -> list[int]:
        stop = layers.start + layers.length
        return [n for n in range(first, stop + 1, step) if 0 < n < len(crossing)]

    firsts = range(layers.start, layers.start + layers.period)
    best = min(firsts, key=lambda first: (max(crossing[n] for n in cuts(first)), first))
    return cuts(best)


def _crossing(program: Program, places: list[int]) -> list[int]:
    """Returns, for each operator of forward, the bytes of earlier values read from it on."""
    uses, ops = OuterUses(program), program.root.ops
    made: dict[str, int] = {}
    change = [0] * (len(places) + 1)
    last: dict[str, int] = {}
    for at, place in enumerate(places):
        used = uses.of(ops[place])
        last.update(dict.fromkeys(used.reads & made.keys(), at))
        made.update(dict.fromkeys(used.writes, at))
    for name, end in last.items():
        if program.lookup(name).kind is Kind.TEMP:
            change[made[name] + 1] += _elements(program, name)
            change[end + 1] -= _elements(program, name)
    found, total = list[int](), 0
    for step in change[:-1]:
        total += step
        found.append(total)
    return found


def _elements(program: Program, name: str) -> int:
    return math.prod(_number(size) for size in program.lookup(name).shape)


def _number(size: Size) -> int:
    return evaluate(size, dict.fromkeys(size.letters, _ROWS)) if isinstance(size, Dim) else size


def with_state_written_last(program: Program) -> Program:
    """Returns a program with forward's writes of state deferred to its end.

    Recomputation must read the same values as the first time: the running mean of a normalization,
    a key that dropout draws from. A sub-block that reads state that forward has overwritten is a
    PassError.
    """
    states = {v.name for v in program.of_kind(Kind.PARAM, Kind.STATE)}
    forward = forward_places(program)
    if not any(states.intersection(program.root.ops[place].writes) for place in forward):
        return program
    uses, names = OuterUses(program), dict[str, str]()
    ops, declared, last = list[Operator](), list[Variable](), list[Operator]()
    for place, op in enumerate(program.root.ops):
        if found := sorted((uses.of(op).reads - set(op.reads)) & names.keys()):
            what = f"recompute: '{found[0]}' is written by forward, and then read in a sub-block"
            hint = "read it before forward writes it, or recompute nothing: leave checkpoints out"
            raise PassError(what, op=op, hint=hint)
        reads = op.inputs if op.type == "fetch" else op.inputs.renamed(names)
        if place in forward:
            for name in [n for n in op.writes if n in states and n not in names]:
                new = replace(program.variables[name], name=next_name(name), kind=Kind.TEMP)
                names[name] = new.name
                declared.append(new)
        elif found := sorted(names.keys() & set(op.writes)):
            what = f"recompute: '{found[0]}' is written by forward and after it"
            hint = "write it in one of them; forward's value may have a variable of its own"
            raise PassError(what, op=op, hint=hint)
        ops.append(replace(op, inputs=reads, outputs=op.outputs.renamed(names)))
    last = [
        Operator("assign", Operands.of(new), Operands.of(name), role=Role.OPTIMIZE)
        for name, new in names.items()
    ]
    at_end = [op for op in ops if op.type == "fetch"]
    others = [op for op in ops if op.type != "fetch"]
    return program.with_block(program.root.with_ops([*others, *last, *at_end], declare=declared))


@register_pass("recompute")
@dataclass(frozen=True)
class Recompute(Pass):
    """Cuts a step into executables, and recomputes values that are not kept for backward.

    Forward is divided into groups. Of a group that is not kept, only the inputs of later groups
    stay; the rest is recomputed (`h@RECOMPUTE`) right before the group's backward. Backward runs
    from the last group to the first, and each update as soon as its gradient is complete and the
    old value has no readers left. A `cut` ends an executable, so that no compiler detects the
    duplicate computation and keeps its result after all.

    The last group is kept: its backward follows at once. By default there are about as many groups
    as operators in each, and groups of whole layers if most of forward is equal layers.

    After Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.

    Before::

        program p
          data  x: f32[4]
          param v: f32[4]
          param w: f32[4]
          block 0
            forward
              a: f32[4] = jax.mul(x, v)
              s: f32[4] = jax.sin(a)
              c: f32[4] = jax.cos(a)
              h: f32[4] = jax.mul(s, w)
            backward
              w@GRAD: f32[4] = jax.mul(h, s) for (w, w@GRAD)
              s@GRAD: f32[4] = jax.mul(h, w)
              a@GRAD: f32[4] = jax.mul(s@GRAD, c)
              v@GRAD: f32[4] = jax.mul(a@GRAD, x) for (v, v@GRAD)
            optimize
              v = jax.sub(v, v@GRAD)
              w = jax.sub(w, w@GRAD)

    After::

        program p
          data  x: f32[4]
          param v: f32[4]
          param w: f32[4]
          block 0
            forward
              a: f32[4] = jax.mul(x, v)
              s: f32[4] = jax.sin(a)
              cut()
              h: f32[4] = jax.mul(s, w)
            backward
              w@GRAD: f32[4] = jax.mul(h, s) for (w, w@GRAD)
              s@GRAD: f32[4] = jax.mul(h, w)
            optimize
              w = jax.sub(w, w@GRAD)
            backward
              cut()
              a@RECOMPUTE: f32[4] = jax.mul(x, v)
              c@RECOMPUTE: f32[4] = jax.cos(a@RECOMPUTE)
              a@GRAD: f32[4] = jax.mul(s@GRAD, c@RECOMPUTE)
              v@GRAD: f32[4] = jax.mul(a@GRAD, x) for (v, v@GRAD)
            optimize
              v = jax.sub(v, v@GRAD)
    """

    cuts: tuple[int, ...] | None = None  # first operators of groups except the first; None: chosen
    kept: tuple[bool, ...] = ()  # per group, whether its values for backward stay; none by default
    saved: tuple[str, ...] = ()  # values that stay of groups that are not kept

    def run(self, program: Program) -> Program:
        cut = next((op for op in program.root.ops if op.type == "cut"), None)
        if cut is not None:
            raise PassError("recompute: the program is cut already", op=cut)
        cuts = default_cut_points(program) if self.cuts is None else self.cuts
        kept = self._kept(cuts)
        if list(cuts) != sorted(set(cuts)):
            raise PassError(f"recompute: the cuts {list(cuts)} are not in order")
        program = with_state_written_last(in_single_assignment(program))
        return _Rewrite(self, ForwardGroups(program, cuts, kept, frozenset(self.saved))).run()

    def _kept(self, cuts: Sequence[int]) -> tuple[bool, ...]:
        kept = self.kept or (False,) * (len(cuts) + 1)
        if len(kept) != len(cuts) + 1:
            what = f"recompute: {len(cuts)} cuts make {len(cuts) + 1} groups"
            raise PassError(f"{what}, but kept has {len(kept)}")
        return (*kept[:-1], True)


@dataclass
class _Rewrite:
    pass_: Recompute
    groups: ForwardGroups

    def __post_init__(self) -> None:
        program = self.groups.program
        self.copies, self.ops = OperatorCopies(program), program.root.ops
        taken = {*program.variables, *program.root.variables}
        self.names = [
            {
                name: unique(recomputed_name(name), taken)
                for place in again.places
                for name in self.ops[place].writes
            }
            for again in self.groups.again
        ]
        self.made_again = {  # values read after forward, by their names there
            old: names[old]
            for names, again in zip(self.names, self.groups.again, strict=True)
            for old in again.names
        }

    def run(self) -> Program:
        groups, program = self.groups, self.groups.program
        times = RecomputeSchedule(groups)
        later = by_time(times.find(), 2 * groups.count - 1)
        written: list[Operator] = []
        computed = (time for n, time in times.of.items() if self.ops[n].type != "fetch")
        last = max(computed, default=0)
        for time, places in enumerate(later):
            now, *rest = self._parts(times, last, places) if time == last else [places]
            ops = [*self._forward(time), *self._again(times, time), *self._later(now)]
            for part in (ops, *(list(self._later(more)) for more in rest)):
                if part and written:
                    written.append(self._cut(part[0]))
                written += part
        inner = (*program.blocks[1:], *self.copies.blocks)
        inside = {name for block in inner for op in block.ops for name in (*op.reads, *op.writes)}
        root = program.root.with_ops(written, declare=self._declared())
        return replace(program, blocks=(root.without_unused(keep=inside), *inner))

    def _parts(
        self, times: RecomputeSchedule, last: int, places: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """Returns the operators of the last time, in executables of their own."""
        early = {x for n, time in times.of.items() if time < last for x in self.ops[n].writes}
        root = self.groups.program.root
        made = frozenset(early & root.variables.keys())
        light = frozenset(n for n in places if times.is_light(self.ops[n]))
        return UpdateChunks(self.groups.program, self.groups.uses, places, made, light).all()

    def _forward(self, group: int) -> Iterator[Operator]:
        return (self.ops[place] for place in self.groups.once if self.groups.group(place) == group)

    def _again(self, times: RecomputeSchedule, time: int) -> Iterator[Operator]:
        for group, again in enumerate(self.groups.again):
            if times.backward(group) == time:
                reads = {old: new for old, new in self.names[group].items() if old in again.names}
                for place in again.places:
                    yield self._copy(self.ops[place], reads, self.names[group])

    def _copy(self, op: Operator, reads: Mapping[str, str], writes: Mapping[str, str]) -> Operator:
        copied = self.copies.of(op, reads)
        copied = replace(copied, outputs=op.outputs.renamed(writes), role=Role.BACKWARD)
        return made_by(copied, self.pass_)

    def _later(self, places: Sequence[int]) -> Iterator[Operator]:
        for place in places:
            op = self.ops[place]
            if self.groups.uses.of(op).reads.isdisjoint(self.made_again):
                yield op
            elif op.blocks:
                yield self.copies.of(op, self.made_again)
            else:
                yield replace(op, inputs=op.inputs.renamed(self.made_again))

    def _cut(self, before: Operator) -> Operator:
        role = Role.FORWARD if before.role is Role.FORWARD else Role.BACKWARD
        return made_by(Operator("cut", role=role), self.pass_)

    def _declared(self) -> list[Variable]:
        root = self.groups.program.root
        return [
            replace(root.variables[old], name=new)
            for names in self.names
            for old, new in names.items()
        ]
