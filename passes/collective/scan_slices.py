"""Turns slices of the batch, cut out by a loop counter, into inputs that the loop scans over."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from jaxfleet.ir import Block, BlockRef, Literal, Operand, Operands, Operator, Program, Variable
from jaxfleet.ir.naming import unique
from jaxfleet.passes.building_blocks import op_like
from jaxfleet.pipeline import Pass, made_by, register_pass

_SCALAR: Mapping[str, Callable[..., int]] = {
    "jax.add": lambda x, y: x + y,
    "jax.sub": lambda x, y: x - y,
    "jax.mul": lambda x, y: x * y,
    "jax.max": max,
    "jax.min": min,
    "jax.neg": lambda x: -x,
    "jax.lt": lambda x, y: int(x < y),
    "jax.le": lambda x, y: int(x <= y),
    "jax.gt": lambda x, y: int(x > y),
    "jax.ge": lambda x, y: int(x >= y),
    "jax.clamp": lambda low, x, high: min(max(low, x), high),
    "jax.select_n": lambda which, *cases: cases[which],
    "jax.convert_element_type": lambda x: x,
}
_MOST_TURNS = 1 << 12  # their counter values are evaluated one by one


@register_pass("scan_slices")
@dataclass(frozen=True)
class ScanSlices(Pass):
    """Turns slices that a loop cuts out by its counter into inputs of a scan.

    `fori_loop` with `dynamic_slice(x, i * rows, rows)`, or a scan over `arange(n)`, reads all of
    the batch in every iteration, so the batch cannot be sharded. If iteration `i` takes slice `i`,
    and nothing else reads the counter, the same loop is a scan over `x.reshape(n, rows, ...)`,
    which `interleave_slices` and `grad_allreduce` divide. The slices are proven by evaluating the
    start of every iteration. Runs before `interleave_slices`, on a program with a numeric batch
    size.

    Before::

        program p {batch=12}
          data  x: f32[12,3]
          block 0
            forward
              count: i32[], total: f32[] = jax.scan(x, 0:i32, 0.0:f32) {body=^1, length=3, num_carry=2, num_consts=1, reverse=false, unroll=1}
              fetch(total)
          block 1 (a: f32[12,3], i: i32[], c: f32[]) -> (j, d)
            forward
              j: i32[] = jax.add(i, 1:i32)
              start: i32[] = jax.mul(i, 4:i32)
              s: f32[4,3] = jax.dynamic_slice(a, start, 0:i32) {slice_sizes=[4, 3]}
              z: f32[] = jax.reduce_sum(s) {axes=[0, 1]}
              d: f32[] = jax.add(c, z)

    After::

        program p {batch=12}
          data  x: f32[12,3]
          block 0
            forward
              x.slices: f32[3,4,3] = jax.reshape(x) {new_sizes=[3, 4, 3]}
              total: f32[] = jax.scan(0.0:f32, x.slices) {body=^1, length=3, num_carry=1, num_consts=0, reverse=false, unroll=1}
              fetch(total)
          block 1 (c: f32[], s: f32[4,3]) -> (d)
            forward
              z: f32[] = jax.reduce_sum(s) {axes=[0, 1]}
              d: f32[] = jax.add(c, z)
    """  # noqa: E501  # an operator stands on one line

    def run(self, program: Program) -> Program:
        for place, op in enumerate(program.root.ops):
            loop = _Loop.of(program, op) if op.type == "jax.scan" else None
            if loop is not None and (found := list(loop.slices())):
                changed = self._rewritten(program, place, loop, found)
                if changed is not None:
                    return self.run(changed)
        return program

    def _rewritten(
        self, program: Program, place: int, loop: "_Loop", found: list[Operator]
    ) -> Program | None:
        """Returns the program with a scan over slices; None if the loop needs its counter."""
        body = _without_dead(loop.body, found)
        counter = body.args.index(loop.index)
        if not loop.is_free_of_count(body, counter, program):
            return None
        root, taken = program.root, {*program.variables, *program.root.variables}
        reshapes: list[Operator] = []
        declared: list[Variable] = []
        for cut in found:
            given, whole = loop.operand(cut.inputs[0]), program.lookup(cut.writes[0], loop.body)
            sizes = (loop.length, *whole.shape)
            name = unique(f"{given}.slices", taken)
            taken.add(name)
            declared.append(Variable(name, whole.dtype, sizes))
            near = replace(cut, role=loop.op.role)
            reshape = op_like(near, "jax.reshape", [given], name, new_sizes=sizes)
            reshapes.append(made_by(reshape, self))
        scan, body = loop.over(body, counter, [x.writes[0] for x in reshapes], found)
        ops = [*root.ops[:place], *reshapes, made_by(scan, self), *root.ops[place + 1 :]]
        changed = program.with_block(root.with_ops(ops, declare=declared).without_unused())
        return changed.with_block(body.without_unused())


def counts_out_slices(program: Program) -> bool:
    """Whether a program may contain a loop for this pass."""
    loops = (_Loop.of(program, op) for op in program.root.ops if op.type == "jax.scan")
    return any(any(loop.slices()) for loop in loops if loop is not None)


@dataclass(frozen=True)
class _Loop:
    """A scan of block 0 with a counter."""

    program: Program
    op: Operator
    body: Block
    index: str  # the index of the body's counter argument
    values: range  # the counter's value in each iteration
    makers: Mapping[str, Operator] = field(repr=False)

    @classmethod
    def of(cls, program: Program, op: Operator) -> "_Loop | None":
        ref, length = op.attrs["body"], op.attrs["length"]
        assert isinstance(ref, BlockRef)
        body = program.blocks[ref.index]
        users = [x for block in program.blocks for x in block.ops if ref.index in x.blocks]
        is_plain = isinstance(length, int) and 0 < length <= _MOST_TURNS
        if not is_plain or op.attrs.get("reverse") or len(users) != 1:
            return None
        assert isinstance(length, int)
        makers = {name: x for x in body.ops for name in x.writes}
        around = {name: x for x in program.root.ops for name in x.writes}
        for place, name in enumerate(body.args):
            start = _count_from(op, body, place, makers, around)
            if start is not None:
                values = range(start, start + length)
                return cls(program, op, body, name, values, makers)
        return None

    @property
    def length(self) -> int:
        return len(self.values)

    @property
    def num_consts(self) -> int:
        return int(str(self.op.attrs["num_consts"]))

    @property
    def num_carry(self) -> int:
        return int(str(self.op.attrs["num_carry"]))

    def operand(self, arg: Operand) -> str:
        assert isinstance(arg, str)
        found = tuple(self.op.inputs)[self.body.args.index(arg)]
        assert isinstance(found, str)
        return found

    def slices(self) -> Iterator[Operator]:
        """Yields the operators that take slice i of the whole batch in iteration i."""
        batch = self.program.attrs.get("batch")
        constants = {
            name
            for name, given in zip(self.body.args, self.op.inputs, strict=True)
            if isinstance(given, str)
        }
        constants &= set(self.body.args[: self.num_consts])
        for op in self.body.ops:
            if op.type != "jax.dynamic_slice" or op.inputs[0] not in constants:
                continue
            whole = self.program.lookup(op.reads[0], self.body).shape
            part = self.program.lookup(op.writes[0], self.body).shape
            if not whole or whole[0] != batch or part[1:] != whole[1:]:
                continue
            rows = part[0]
            if not isinstance(rows, int) or rows * self.length != batch:
                continue
            starts = [self._at(op.inputs[1], count) for count in self.values]
            if starts == [turn * rows for turn in range(self.length)]:
                yield op

    def is_free_of_count(self, body: Block, counter: int, program: Program) -> bool:
        """Whether the counter is read only by its increment."""
        readers = [op for op in body.ops if self.index in op.reads]
        if counter >= self.num_consts + self.num_carry:
            return not readers and self.index not in body.results
        carried = counter - self.num_consts
        after = tuple(self.op.writes)[carried]
        is_read = any(after in op.reads for block in program.blocks for op in block.ops)
        is_state = after in program.variables
        if is_read or is_state or len(readers) != 1 or self.index in body.results:
            return False
        (following,) = readers[0].writes
        alone = not any(following in op.reads for op in body.ops)
        return alone and list(body.results).count(following) == 1

    def over(
        self, body: Block, counter: int, arrays: list[str], found: list[Operator]
    ) -> tuple[Operator, Block]:
        """Returns the scan over slices, and its body without the counter and its dead code."""
        carried = counter - self.num_consts
        is_carried = carried < self.num_carry
        read = {name for op in body.ops for name in op.reads} | set(body.results)
        gone = {counter, *(n for n in range(self.num_consts) if body.args[n] not in read)}
        results, writes = list(body.results), list(self.op.writes)
        ops = list(body.ops)
        if is_carried:
            ops = [op for op in ops if self.index not in op.reads]
            del results[carried], writes[carried]
        args = [name for n, name in enumerate(body.args) if n not in gone]
        inputs = [given for n, given in enumerate(self.op.inputs) if n not in gone]
        attrs = self.op.attrs.updated(
            num_consts=self.num_consts - sum(n < self.num_consts for n in gone),
            num_carry=self.num_carry - is_carried,
        )
        scan = replace(
            self.op,
            inputs=Operands.of(*inputs, *arrays),
            outputs=Operands.of(*writes),
            attrs=attrs,
        )
        taken = [op.writes[0] for op in found]
        return scan, replace(body, args=(*args, *taken), results=tuple(results), ops=tuple(ops))

    def _at(self, operand: Operand, count: int) -> int | None:
        """Evaluates an integer of the body at a counter value; None for any other operand."""
        if isinstance(operand, Literal):
            return _whole(operand)
        if operand == self.index:
            return count
        op = self.makers.get(operand)
        if op is None or op.type not in _SCALAR:
            return None
        values = [self._at(x, count) for x in op.inputs]
        known = [x for x in values if x is not None]
        if len(known) < len(values):
            return None
        dtype, made = self.body.variables[operand].dtype, _SCALAR[op.type](*known)
        if dtype == "bool":
            return int(made != 0)
        return made if _fits(made, dtype) else None


def _count_from(
    op: Operator,
    body: Block,
    place: int,
    makers: Mapping[str, Operator],
    around: Mapping[str, Operator],
) -> int | None:
    """Returns the initial value of an argument incremented by 1 per iteration, else None."""
    first, given = int(str(op.attrs["num_consts"])), tuple(op.inputs)[place]
    last, name = first + int(str(op.attrs["num_carry"])), body.args[place]
    if place < first or not body.variables[name].dtype.startswith(("i", "u")):
        return None
    if place < last:
        following = body.results[place - first]
        step = makers.get(following) if isinstance(following, str) else None
        adds = step is not None and step.type == "jax.add" and step.inputs[0] == name
        one = step is not None and adds and _whole(step.inputs[1]) == 1
        return _whole(given) if one else None
    maker = around.get(given) if isinstance(given, str) else None
    is_count = maker is not None and maker.type == "jax.iota"
    return 0 if is_count and body.variables[name].shape == () else None


def _whole(operand: Operand) -> int | None:
    if not isinstance(operand, Literal) or not operand.dtype.startswith(("i", "u")):
        return None
    return int(operand.text)


def _fits(value: int, dtype: str) -> bool:
    """Whether a dtype represents an integer exactly."""
    if not dtype[1:].isdigit() or dtype[0] not in "iu":
        return False
    least = -(1 << int(dtype[1:]) - 1) if dtype[0] == "i" else 0
    return least <= value < least + (1 << int(dtype[1:]))


def _without_dead(body: Block, found: list[Operator]) -> Block:
    ops = [op for op in body.ops if op not in found]
    while True:
        read = {name for op in ops for name in op.reads} | set(body.results)
        kept = [op for op in ops if op.type not in _SCALAR or not read.isdisjoint(op.writes)]
        if len(kept) == len(ops):
            return replace(body, ops=tuple(ops))
        ops = kept
