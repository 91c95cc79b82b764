"""Sparse tables: look-ups read rows that the host fetches, and push row gradients back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.ir import (
    Attrs,
    Dim,
    Literal,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
    grad_name,
    letter,
)
from jaxfleet.ir.naming import unique
from jaxfleet.pipeline import Pass, made_by, register_pass

_LOOKUP, _LOOKUP_GRAD, _HOST_LOOKUP = (
    "table_lookup",
    "table_lookup_grad",
    "distributed_lookup_table",
)
# Operators of the host; a table's gradient is sent with the first of these that follows.
_OF_THE_HOST = frozenset({"send", "send_barrier", "split_byref", "recv", "fetch_barrier"})
_LETTER = "u"  # the number of unique keys, rounded up


@register_pass("sparse_table")
@dataclass(frozen=True)
class SparseTable(Pass):
    """Turns look-ups in tables into rows of the batch's keys, and gradients into rows of them.

    The host deduplicates the keys of all look-ups of a table, and fetches their rows; `u` is their
    number, rounded up to a power of two, so that a step is compiled a few times instead of for
    every batch. The device gathers rows by an index, and backward sums the gradient of each row: no
    array is as long as the table. `send_rows` passes the rows' gradient to the table. The handle's
    own gradient is 0, so that the optimizer leaves it unchanged.

    Runs after `grad_allreduce` and `insert_send_recv`: on several devices the host joins the keys
    of all, and rows' gradients are summed over the devices; each of several trainers looks up its
    own keys, and servers sum.

    Before::

        program p {batch=<b>, tables=["users"]}
          data  ids: i64[b]
          param t: f32[]
          block 0
            forward
              v: f32[b,4] = table_lookup(t, ids) {dim=4, table="users"}
              fetch(v)
            backward
              t@GRAD: f32[] = table_lookup_grad(ids, v) {table="users"} for (t, t@GRAD)
            optimize
              t = jax.sub(t, t@GRAD)

    After::

        program p {batch=<b>, tables=["users"]}
          data  ids: i64[b]
          param t: f32[]
          block 0
            rpc
              Outputs=users.rows: f32[u,4], Index=users.index: i32[b] = distributed_lookup_table(Ids=ids) {dim=4, table="users"}
            forward
              v: f32[b,4] = lookup_rows(users.rows, users.index)
              fetch(v)
            backward
              users@GRAD: f32[u,4] = lookup_rows_grad(users.index, v) {shape=[<u>, 4]}
              t@GRAD: f32[] = assign(0.0:f32) for (t, t@GRAD)
            optimize
              t = jax.sub(t, t@GRAD)
            rpc
              send_rows(X=users@GRAD) {table="users"}
    """  # noqa: E501  # an operator stands on one line

    trainer_id: int = 0  # the trainer, for a trainer's program

    def run(self, program: Program) -> Program:
        if not any(op.type in {_LOOKUP, _LOOKUP_GRAD} for op in program.root.ops):
            return program
        return _Rewrite(program, self).run()

    def mark(self, op: Operator) -> Operator:
        return made_by(op, self)


@dataclass
class _Table:
    """A table, as one program uses it."""

    name: str
    rows: Variable  # the variable of its rows
    # for each variable of keys, the variable of the index
    index: dict[str, Variable] = field(default_factory=dict)
    # gradients of which each device, or trainer, has a summand
    parts: list[str] = field(default_factory=list)
    wholes: list[str] = field(default_factory=list)  # gradients that each has whole
    gradients: int = 0  # the number of its differentiated look-ups
    left: int = 0  # how many of these are still to come


@dataclass
class _Rewrite:
    program: Program
    by: SparseTable
    tables: dict[str, _Table] = field(default_factory=dict)
    declared: dict[str, Variable] = field(default_factory=dict)
    zeros: set[str] = field(default_factory=set)
    ops: list[Operator] = field(default_factory=list)

    def __post_init__(self) -> None:
        program = self.program
        self.taken = {name for block in program.blocks for name in block.variables}
        self.taken |= program.variables.keys()
        self.devices = 1 if "role" in program.attrs else program.attrs.get("devices", 1)
        self.trainers = program.attrs.get("trainers", 1) if "role" in program.attrs else 1
        # If trainers do not wait for each other, each has a row gradient of its own.
        waits = program.attrs.get("communication", "sync") == "sync"
        self.is_told = waits and self.by.trainer_id > 0
        for op in program.root.ops:
            if op.type in {_LOOKUP, _LOOKUP_GRAD}:
                self._know(op)

    def run(self) -> Program:
        for op in self.program.root.ops:
            if op.type == _LOOKUP:
                self._look_up(op)
            elif op.type == _LOOKUP_GRAD:
                self._differentiate(op)
            elif op.type == "c_allreduce_sum" and self.zeros.issuperset(op.reads):
                self._drop_sum(op)
            else:
                if op.type in {"jax.add_any", "jax.add"} and self.zeros.issuperset(op.reads):
                    self.zeros.update(op.writes)
                self.ops.append(op)
        ops = [*self._host_lookups(), *self._with_sends()]
        block = self.program.root.with_ops(ops, declare=self.declared.values()).without_unused()
        return self.program.with_block(block)

    def _know(self, op: Operator) -> None:
        name, keys = str(op.attrs["table"]), op.inputs[1 if op.type == _LOOKUP else 0]
        table = self.tables.get(name)
        if table is None:
            count = letter(f"{_LETTER}{len(self.tables) or ''}")
            rows = self._declare(f"{name}.rows", "f32", (count, self._dim(op)))
            table = self.tables[name] = _Table(name, rows)
        table.left += op.type == _LOOKUP_GRAD
        table.gradients += op.type == _LOOKUP_GRAD
        assert isinstance(keys, str)
        if keys not in table.index:
            shape = self.program.lookup(keys).shape
            table.index[keys] = self._declare(f"{name}.index", "i32", shape)

    def _dim(self, op: Operator) -> int:
        of = op.writes[0] if op.type == _LOOKUP else op.reads[1]
        size = self.program.lookup(of).shape[-1]
        assert isinstance(size, int)
        return size

    def _host_lookups(self) -> Iterator[Operator]:
        for table in self.tables.values():
            outputs = Operands.named(
                Outputs=table.rows.name, Index=[v.name for v in table.index.values()]
            )
            attrs = Attrs({"dim": table.rows.shape[1], "table": table.name})
            ids = Operands.named(Ids=list(table.index))
            yield self.by.mark(Operator(_HOST_LOOKUP, ids, outputs, attrs, Role.RPC))

    def _look_up(self, op: Operator) -> None:
        table = self.tables[str(op.attrs["table"])]
        index = table.index[str(op.inputs[1])].name
        inputs = Operands.of(table.rows.name, index)
        self._add(replace(op, type="lookup_rows", inputs=inputs, attrs=Attrs()))

    def _differentiate(self, op: Operator) -> None:
        """Adds up the rows of a gradient; the handle's is 0."""
        zero = Operands.of(Literal.of(0.0, "f32"))
        self.zeros.update(op.writes)
        is_part = op.attrs.get("summed", False)
        table = self.tables[str(op.attrs["table"])]
        if is_part or not self.is_told:
            own = table.parts if is_part else table.wholes
            own.append(self._rows_of(op, table))
        self._add(replace(op, type="assign", inputs=zero, attrs=Attrs()))
        self._finish(table)

    def _rows_of(self, op: Operator, table: _Table) -> str:
        like = table.rows
        name, count = grad_name(table.name), len(table.parts) + len(table.wholes)
        name = name if table.gradients == 1 else f"{name}@RENAME@{count}"
        made = self._declare(name, "f32", like.shape)
        self._add(
            Operator(
                "lookup_rows_grad",
                Operands.of(table.index[op.reads[0]].name, op.reads[1]),
                Operands.of(made.name),
                Attrs({"shape": like.shape}),
                Role.BACKWARD,
                source=op.source,
            )
        )
        return made.name

    def _finish(self, table: _Table) -> None:
        """Sums the gradients of all look-ups of a table after the last of them."""
        table.left -= 1
        if table.left:
            return
        if table.parts and self.devices != 1:
            total = self._sum(table, table.parts)
            inputs = Operands.of(total)
            attrs = Attrs({"ring_id": 0})
            self._add(Operator("c_allreduce_sum", inputs, inputs, attrs, Role.BACKWARD))
            table.parts = [total]
        found = [*table.parts, *table.wholes]
        table.parts = [self._sum(table, found)] if found else []

    def _sum(self, table: _Table, names: Sequence[str]) -> str:
        if len(names) == 1:
            return names[0]
        made = self._declare(grad_name(table.name), "f32", table.rows.shape)
        inputs, outputs = Operands.of(*names), Operands.of(made.name)
        self._add(Operator("sum", inputs, outputs, role=Role.BACKWARD))
        return made.name

    def _drop_sum(self, op: Operator) -> None:
        """Omits a sum of zeros over devices; its operand keeps its value."""
        self.zeros.update(op.writes)
        zero = Operands.of(Literal.of(0.0, "f32"))
        if op.reads != op.writes:
            self._add(replace(op, type="assign", inputs=zero, attrs=Attrs()))
            return
        place = max(at for at, made in enumerate(self.ops) if op.reads[0] in made.writes)
        self.ops[place] = replace(self.ops[place], role_var=op.role_var)

    def _with_sends(self) -> Iterator[Operator]:
        """Yields the operators, with gradients passed to tables before the next send."""
        made = {table.parts[0]: table for table in self.tables.values() if table.parts}
        last = {name: at for at, op in enumerate(self.ops) for name in op.writes if name in made}
        ready: list[Operator] = []
        for at, op in enumerate(self.ops):
            if op.type in _OF_THE_HOST:
                yield from ready
                ready = []
            yield op
            ready += [self._send(made[name]) for name in op.writes if last.get(name) == at]
        yield from ready

    def _send(self, table: _Table) -> Operator:
        attrs = Attrs({"table": table.name})
        inputs = Operands.named(X=table.parts)
        return self.by.mark(Operator("send_rows", inputs, attrs=attrs, role=Role.RPC))

    def _declare(self, name: str, dtype: str, shape: Sequence[int | Dim]) -> Variable:
        found = Variable(unique(name, self.taken), dtype, tuple(shape))
        self.taken.add(found.name)
        self.declared[found.name] = found
        return found

    def _add(self, op: Operator) -> None:
        self.ops.append(self.by.mark(op))
