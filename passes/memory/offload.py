"""Offloads values to pinned host memory from one executable to a much later one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from jaxfleet.analysis.flow import Effects, OuterUses
from jaxfleet.analysis.memory.costs import bytes_of, equal_sizes
from jaxfleet.analysis.memory.live_ranges import executables
from jaxfleet.analysis.placement.sliced_layout import joins_slices
from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operands, Operator, Program, Role, Variable
from jaxfleet.ir.naming import back_name, host_name, unique
from jaxfleet.passes.building_blocks import OperatorCopies
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("offload")
@dataclass(frozen=True)
class Offload(Pass):
    """Moves values unused between executables to the host, and prefetches them.

    In a program with cuts, a value that backward reads stays on the device from its forward
    executable on, while all others run. This pass copies it to the host right after the executable
    that makes it, while the next one runs, which frees its device memory after that. It returns
    `ahead` executables before its reader, which hides the copy if an executable takes longer;
    likewise for every such pause.

    Moved are temporaries with axes, of at least `smallest_bytes`, that are written once and absent
    from the device while at least one executable runs. Scalars, random keys, fetched values and
    values sent to servers stay. Nothing is recomputed, and results are equal bit for bit.

    Runs after `recompute` or `cut_apart`, which cut the program.

    Before::

        program p
          data  x: f32[200,200]
          state s: f32[200,200]
          block 0
            forward
              h: f32[200,200] = jax.sin(x)
              cut()
              a: f32[200,200] = jax.cos(h)
              cut()
              b: f32[200,200] = jax.cos(a)
              cut()
              c: f32[200,200] = jax.cos(b)
              cut()
              d: f32[200,200] = jax.cos(c)
              cut()
              s = jax.mul(d, h)

    After::

        program p
          data  x: f32[200,200]
          state s: f32[200,200]
          block 0
            forward
              h: f32[200,200] = jax.sin(x)
              cut()
              h@HOST: f32[200,200] = to_host(h)
              a: f32[200,200] = jax.cos(h)
              cut()
              b: f32[200,200] = jax.cos(a)
              cut()
              c: f32[200,200] = jax.cos(b)
              cut()
              h@BACK: f32[200,200] = to_device(h@HOST)
              d: f32[200,200] = jax.cos(c)
              cut()
              s = jax.mul(d, h@BACK)
    """

    values: tuple[str, ...] | None = None  # may be moved; all by default
    smallest_bytes: int = 1 << 16  # smaller values are not worth the copy
    ahead: int = 1  # number of executables between the prefetch and its reader
    rows: int = 256  # assumed batch size

    runs_after = ("recompute", "cut_apart")

    def run(self, program: Program) -> Program:
        if self.ahead < 0 or self.smallest_bytes < 0:
            what = f"offload: ahead {self.ahead}, smallest_bytes {self.smallest_bytes}"
            raise PassError(what, hint="neither may be less than 0")
        moved = next((op for op in program.root.ops if op.type in {"to_host", "to_device"}), None)
        if moved is not None:
            raise PassError("offload: values are moved already", op=moved)
        if not any(op.type == "cut" for op in program.root.ops):
            what = f"offload: '{program.name}' is one executable, and values move between them"
            hint = "cut it first: strategy.memory_budget, or passes='recompute,offload'"
            raise PassError(what, hint=hint)
        self._check_values(program)
        return _Rewrite(self, program).run()

    def _check_values(self, program: Program) -> None:
        for name in self.values or ():
            if name not in program.root.variables:
                what = f"offload: there is no value '{name}' in '{program.name}'"
                raise PassError(what, hint="values are named as in the text of the program")


@dataclass
class _Rewrite:
    pass_: Offload
    program: Program
    declared: list[Variable] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ops, self.uses = self.program.root.ops, OuterUses(self.program)
        self.runs_in = executables(self.ops)
        self.copies = OperatorCopies(self.program)
        self.taken = {*self.program.variables, *self.program.root.variables}

    def run(self) -> Program:
        made_at = {name: op for op in self.ops for name in op.writes}
        moves: dict[int, list[Operator]] = {}  # by the executable that they precede
        names: dict[str, list[tuple[int, str]]] = {}  # by value: its name, from an executable on
        for name, used_in in self._used_in().items():
            pauses, maker = list(self._pauses(used_in)), made_at[name]
            if pauses:
                on_host = self._new(name, host_name(name))
                leaving = self._move("to_host", name, on_host, maker)
                moves.setdefault(used_in[0] + 1, []).append(leaving)
            for until, place in pauses:
                back = self._new(name, back_name(name))
                names.setdefault(name, []).append((until, back))
                coming = self._move("to_device", on_host, back, maker)
                moves.setdefault(place, []).append(coming)
        if not moves:
            return self.program
        written = list(self._written(moves, names))
        root = self.program.root.with_ops(written, declare=self.declared)
        return replace(self.program, blocks=(root, *self.program.blocks[1:], *self.copies.blocks))

    def _used_in(self) -> Mapping[str, Sequence[int]]:
        """Returns the executables that make and read each movable value, in order."""
        found: dict[str, list[int]] = {}
        for place, op in enumerate(self.ops):
            used, number = self.uses.of(op), self.runs_in[place]
            for name in (*op.writes, *sorted(used.reads - {*op.writes})):
                if name in found and found[name][-1] != number:
                    found[name].append(number)
                elif name in op.writes:
                    found[name] = [number]
        movable = self._movable()
        return {name: numbers for name, numbers in found.items() if name in movable}

    def _movable(self) -> set[str]:
        effects, writes, stay = Effects(), dict[str, int](), set[str]()
        for op in self.ops:
            used = self.uses.of(op)
            for name in used.writes:
                writes[name] = writes.get(name, 0) + 1
            stay |= used.writes - {*op.writes}  # a sub-block writes it
            if effects.has_effect(op) or "endpoint" in op.attrs or joins_slices(op):
                stay |= used.reads | used.writes  # used by name, by the host or a server
        sizes = equal_sizes(self.program, self.pass_.rows)
        return {
            name
            for name, count in writes.items()
            if count == 1 and name not in stay and self._is_worth_it(name, sizes)
        }

    def _is_worth_it(self, name: str, sizes: Mapping[str, int]) -> bool:
        variable = self.program.lookup(name)
        if self.pass_.values is not None and name not in self.pass_.values:
            return False
        if variable.kind is not Kind.TEMP or not variable.shape or variable.constant is not None:
            return False
        if variable.dtype.startswith("key<"):
            return False
        return bytes_of(variable, sizes) >= self.pass_.smallest_bytes

    def _pauses(self, used_in: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields the executable that reads a value next, and the one before which it returns."""
        copied = used_in[0] + 1  # while this executable runs
        for before, until in pairwise(used_in):
            back = until - self.pass_.ahead
            if back > max(before, copied) + 1:  # else it is absent from no executable
                yield until, back

    def _new(self, of: str, name: str) -> str:
        made = unique(name, self.taken)
        self.taken.add(made)
        self.declared.append(replace(self.program.lookup(of), name=made))
        return made

    def _move(self, kind: str, of: str, to: str, maker: Operator) -> Operator:
        op = Operator(
            kind, Operands.of(of), Operands.of(to), role=Role.BACKWARD, source=maker.source
        )
        return made_by(op, self.pass_)

    def _written(
        self,
        moves: Mapping[int, Sequence[Operator]],
        names: Mapping[str, Sequence[tuple[int, str]]],
    ) -> Iterator[Operator]:
        for place, op in enumerate(self.ops):
            number = self.runs_in[place]
            reads = self.uses.of(op).reads
            now = {
                name: back
                for name in reads & names.keys()
                for since, back in names[name]
                if since <= number  # the last of them counts
            }
            if now and op.blocks:
                yield self.copies.of(op, now)
            elif now:
                yield replace(op, inputs=op.inputs.renamed(now))
            else:
                yield op
            if op.type == "cut":
                yield from (replace(move, role=op.role) for move in moves.get(number, ()))
